"""Additions that the house carries but does not need: each registers its rows, and plugs into an
interface that anybody may use. Who looks after them, and when they go: README.md here."""

from __future__ import annotations

from blockwalk.contrib import mezo_original as mezo_original

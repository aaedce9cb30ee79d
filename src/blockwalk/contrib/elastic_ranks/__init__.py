"""Ranks that join and leave a zeroth-order run while it goes on (``elastic``)."""

from __future__ import annotations

from blockwalk.plan.sharings import SHARINGS, SharingFacts

SHARINGS.register(
    "elastic",
    SharingFacts(f"{__name__}.elastic:elastic", help="a store of keys that the host serves"),
)

"""The accelerator of this process, as plain values."""

from __future__ import annotations

from blockwalk.numerics.device import card_of, chosen
from blockwalk.system.card import Card


def card(device: str) -> Card:
    """Return the facts of the device that this process computes on, where it is of the type
    ``device``; else none."""
    device_here = chosen()
    return card_of(device_here) if device_here.type == device else Card()

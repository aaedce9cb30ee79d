"""This machine, as plans are foreseen on it: its description, and the memory that a run finds.

Importing this imports no torch; asking for an accelerator does.
"""

from __future__ import annotations

from pathlib import Path

from blockwalk.program.settling import Room
from blockwalk.simulate import hardware
from blockwalk.simulate.hardware import Hardware
from blockwalk.system.card import Card
from blockwalk.system.process_memory import free_memory, page_cache


def card(device: str) -> Card:
    """Return the facts of this process's accelerator, whose type torch calls ``device``; of a
    processor none."""
    if device == "cpu":
        return Card()
    from blockwalk.walk.device_card import card

    return card(device)


def this_machine(device: str) -> Hardware:
    """Return the description of this machine with a device of the type that torch calls
    ``device``."""
    return hardware.of_this_machine(device, card(device))


def room(folder: Path, device: str) -> Room:
    """Return the memory that is there for a run whose files go to ``folder``."""
    return Room(card(device).free_bytes, free_memory(), page_cache(folder))

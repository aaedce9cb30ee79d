"""Words for numbers in messages. No torch."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with the noun that it counts, a regular one in the singular: ``1 tensor``,
    ``1,024 tensors``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_or_are(number: int) -> str:
    """Return the verb of so many."""
    return "is" if number == 1 else "are"

"""Words for numbers in messages. No torch."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time in words: seconds, then whole minutes, hours or days."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.3g} s"


def counted(number: int, noun: str) -> str:
    """Return a number with the noun that it counts, a regular one in the singular: ``1 tensor``,
    ``1,024 tensors``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_or_are(number: int) -> str:
    """Return the verb of so many."""
    return "is" if number == 1 else "are"

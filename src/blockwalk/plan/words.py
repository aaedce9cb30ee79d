"""Words for numbers in messages. No torch."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time in words: seconds, then whole minutes, hours or days."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.3g} s"


def short_count(number: int) -> str:
    """Return a number in two or three digits, as models are named by it: ``135M``, ``2.4M``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 1000)):
        if number >= size:
            figure = number / size
            return f"{figure:.1f}{unit}" if figure < 10 else f"{figure:.0f}{unit}"
    return str(number)


def counted(number: int, noun: str) -> str:
    """Return a number with the noun that it counts, a regular one in the singular: ``1 tensor``,
    ``1,024 tensors``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_or_are(number: int) -> str:
    """Return the verb of so many."""
    return "is" if number == 1 else "are"

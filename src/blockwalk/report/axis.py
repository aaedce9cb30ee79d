"""The vertical axis of a chart: its ends, its marks, and where a value lies between them. No
torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["zero", "range", "ratio"]
"""Beginning of an axis: zero; near the least value; or there, with equal ratios of equal height
if the values differ by :data:`DECADE` or more."""

DECADE = 10.0
"""The ratio of the largest to the least value from which an axis of ratios is logarithmic."""

MOST_MARKS = 7
MARGIN = 0.05
"""The most marks of an axis; the share of its height that is left free at each end."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A vertical axis."""

    low: float
    high: float
    logarithmic: bool = False

    def below_top(self, value: float) -> float:
        """Return where a value lies: 0 at the top of the axis, 1 at its foot."""
        if self.logarithmic:
            return math.log(self.high / value) / math.log(self.high / self.low)
        return (self.high - value) / (self.high - self.low)

    def marks(self) -> list[float]:
        """Return round numbers between the ends."""
        return (decades if self.logarithmic else ticks)(self.low, self.high)


def axis(values: Sequence[float], kind: Kind) -> Axis:
    """Return the axis of values, with a margin above them, and below them unless it begins at
    zero."""
    low = min(0.0 if kind == "zero" else math.inf, *values)
    high = max(values)
    if kind == "ratio" and 0 < low * DECADE <= high:
        margin = (high / low) ** MARGIN
        return Axis(low / margin, high * margin, logarithmic=True)
    margin = (high - low) * MARGIN or abs(high) * MARGIN or 1.0
    return Axis(low - margin * (low != 0), high + margin)


def ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers between ``low`` and ``high``: multiples of 1, 2 or 5
    times a power of ten."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * (1 - 1e-9))
    start = math.ceil(low / step - 1e-9)
    return [
        float(f"{multiple * step:.12g}")
        for multiple in range(start, math.floor(high / step + 1e-9) + 1)
    ]


def decades(low: float, high: float) -> list[float]:
    """Return powers of ten between ``low`` and ``high``, at least a decade apart: with twice and
    five times of each while the marks are few, and only some of them where they are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        marks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        marks = [mark for mark in marks if low <= mark <= high]
        if len(marks) <= MOST_MARKS:
            return marks
    return marks[:: -(-len(marks) // MOST_MARKS)]

"""Tensors that ranks hold together, assembled unit by unit when their rows are read: for saving,
outside a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from blockwalk.numerics.codecs.weights import Value


class Assembler:
    """Whole units that ranks assemble when they are read; the one read last is kept. All ranks read
    them in one order.

    Args:
        assemble: makes a unit, of whatever form, from every rank's slice.
    """

    def __init__(self, assemble: Callable[[int], Any]) -> None:
        self._assemble = assemble
        self._number = -1
        self._whole: Any = None

    def unit(self, number: int) -> Any:
        if number != self._number:
            self._whole = None  # let go of one before the next comes
            self._whole = self._assemble(number)
            self._number = number
        return self._whole


@dataclass(frozen=True, slots=True)
class Assembled:
    """A tensor of a unit that ranks hold together, or all of its bytes: the unit is assembled when
    its rows are read."""

    assembler: Assembler
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype that its rows are answered in."""
    open: Callable[[Any], Value]
    """The function that takes the tensor from the unit."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows ``start:stop`` of a matrix, or elements of a vector."""
        value = self.open(self.assembler.unit(self.number))
        return (
            value[start:stop] if isinstance(value, torch.Tensor) else value.rows(start, stop)
        ).to(self.dtype)

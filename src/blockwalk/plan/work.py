"""Operations counted by what a machine is fast or slow at: products, attention, bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of one op of a program.

    >>> both = Work(products=100) + Work(products=200, touched=8)
    >>> both.flops, both.touched
    (300, 8)
    """

    products: int = 0
    """FLOPs of matrix products."""
    attention: int = 0
    """FLOPs of fused attention."""
    touched: int = 0
    """Bytes that element-wise operations and reductions read and write."""
    starts: int = 0
    """Operations that the host starts on an accelerator, views apart."""

    @property
    def flops(self) -> int:
        return self.products + self.attention

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.touched + other.touched,
            self.starts + other.starts,
        )

    def __sub__(self, part: Work) -> Work:
        """Return the rest of the work without a part of it."""
        return self + part * -1

    def __mul__(self, times: int) -> Work:
        """Return the work done so many times."""
        return Work(
            self.products * times,
            self.attention * times,
            self.touched * times,
            self.starts * times,
        )


NOTHING = Work()

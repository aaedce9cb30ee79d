"""Operations counted by what a machine is fast or slow at: products, element-wise passes,
starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

Sizes = tuple[tuple[int, int], ...]
"""(size of one, how many), sizes in ascending order."""


THIN = 32
"""Rows, columns or summands under which a product counts as thin."""


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of one op of a program.

    >>> both = Work(products=((100, 1),)) + Work(products=((100, 2),), starts=1)
    >>> both.products, both.flops, both.starts
    (((100, 3),), 300, 1)
    """

    products: Sizes = ()
    """Matrix products, by FLOPs of one."""
    passes: Sizes = ()
    """Element-wise operations and reductions in 16 bits, by bytes that one reads and writes."""
    attention: int = 0
    """FLOPs of fused attention."""
    starts: int = 0
    """Operations that move nothing: views, allocations."""
    thin_products: Sizes = ()
    """Products by FLOPs, with a side that is below :data:`THIN`, an adapter's: far from a machine's
    rate for the others."""
    float32_passes: Sizes = ()
    """Passes whose result is float32: of a float32 model all of them, of others the norms."""
    in_place: Sizes = ()
    """Passes in place over a buffer that was just written: a chunked loss's."""

    @property
    def flops(self) -> int:
        return self.attention + sum(
            size * count for size, count in (*self.products, *self.thin_products)
        )

    @property
    def touched(self) -> int:
        """Bytes that element-wise operations read and write."""
        return sum(
            size * count for size, count in (*self.passes, *self.float32_passes, *self.in_place)
        )

    @property
    def all(self) -> int:
        """Operations that are started."""
        return self.starts + sum(count for counts in self._sized().values() for _, count in counts)

    def _sized(self) -> dict[str, Sizes]:
        return {name: getattr(self, name) for name in _SIZED}

    def __add__(self, other: Work) -> Work:
        sized = {
            name: sizes((*counts, *getattr(other, name))) for name, counts in self._sized().items()
        }
        return Work(
            **sized, attention=self.attention + other.attention, starts=self.starts + other.starts
        )

    def __sub__(self, part: Work) -> Work:
        """Return the rest of the work without a part of it."""
        return self + part * -1

    def __mul__(self, times: int) -> Work:
        """Return the work done so many times."""
        sized = {
            name: tuple((size, n * times) for size, n in counts)
            for name, counts in self._sized().items()
        }
        return Work(**sized, attention=self.attention * times, starts=self.starts * times)


_SIZED = ("products", "passes", "thin_products", "float32_passes", "in_place")
NOTHING = Work()


def elementwise(passes: Sizes, itemsize: int) -> Work:
    """Return passes whose results have elements of so many bytes."""
    return Work(passes=passes) if itemsize < 4 else Work(float32_passes=passes)


def sizes(pairs: Iterable[tuple[int, int]]) -> Sizes:
    """Return pairs of size and count with equal sizes added up; pairs without a size are left
    out."""
    total: Counter[int] = Counter()
    for size, count in pairs:
        if size > 0:
            total[size] += count
    return tuple(sorted((size, count) for size, count in total.items() if count > 0))

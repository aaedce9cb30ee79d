"""The parts of a unit's state side by side, cut into equal slices for the ranks that hold it.

Every part begins at a multiple of a grain, and so does every slice: 64 bytes, so that a slice of
plain numbers may end anywhere in a part. A codec that is trained keeps a scale for each row of a
matrix, and a scale belongs to one rank's update: such a matrix is cut between rows instead.

Flat buffers over ranks, buckets of zeroth order and buckets of frozen parameters are cut so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blockwalk.plan.sizes import ALIGN, side_by_side


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one part that lie in a range of its unit: those from ``start`` to
    ``stop`` of the part, from ``place`` on in the range."""

    name: str
    start: int
    stop: int
    place: int

    @property
    def size(self) -> int:
        """Elements of the run."""
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The element of the range at which the run ends."""
        return self.place + self.size


@dataclass(frozen=True, slots=True)
class Slicing:
    """The places of a unit's parts, counted in elements of one size (or in bytes)."""

    parts: tuple[tuple[str, int, int], ...]
    """The name, the first element and the number of elements of each part."""
    size: int
    """Elements of all parts, padded so that slices for every rank are equal."""

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield what lies of each part in the range ``start:stop`` of the unit."""
        for name, offset, size in self.parts:
            run_start = max(start - offset, 0)
            run_stop = min(stop - offset, size)
            if run_start < run_stop:
                yield Run(name, run_start, run_stop, offset + run_start - start)


def sliced(sizes: Iterable[tuple[str, int]], ranks: int = 1, grain: int = ALIGN) -> Slicing:
    """Place parts, of so many elements each by name, for ``ranks`` slices."""
    parts = tuple(sizes)
    offsets, end = side_by_side((size for _, size in parts), grain)
    placed = tuple(
        (name, offset, size) for (name, size), offset in zip(parts, offsets, strict=True)
    )
    return Slicing(placed, ranks * slice_size(end, ranks, grain))


def slice_size(size: int, ranks: int = 1, grain: int = ALIGN) -> int:
    """Return the elements of one of ``ranks`` equal slices of so many: a multiple of the grain."""
    return -(-size // (ranks * grain)) * grain


def share(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the rows (first, end) that a rank takes of so many, as equally as they can be cut."""
    return rows * rank // ranks, rows * (rank + 1) // ranks

"""File maps that every step writes again, from their beginning."""

from __future__ import annotations

import time

from torch import Tensor

from blockwalk.plan.sizes import ALIGN
from blockwalk.tiers.disk import is_in_memory, will_need
from blockwalk.tiers.scratch_maps import ScratchMaps

_PIECE = 8 << 20
"""Bytes of the maps, which are filled one after the other."""
FRESH = 20.0
"""Seconds for which maps are used again. Linux writes out what has been dirty for 30, though nobody
will read it from the disk: of SmolLM2's graphs 1.4 GB each time, in 5 s in which one of two cores
did nothing else (docs/tricks.md). The dirty pages of an unlinked file that is closed are never
written. So the maps of graphs are closed as soon after a step that no other follows."""


class ReusedMaps:
    """Places in file maps, one behind the other, until :meth:`rewind`.

    Making a map costs more than writing one whose pages are there: for 100 MB in 24 maps 0.1 to 0.3
    s of a step instead of 0.03."""

    def __init__(self, scratch: ScratchMaps) -> None:
        self._scratch = scratch
        self._maps: list[Tensor] = []
        self._used: list[int] = []
        """The bytes of each map that were written, of any step."""
        self._place = (0, 0)
        self._since = 0.0
        self.nbytes = 0
        """The bytes of places since the last :meth:`rewind`."""

    def rewind(self) -> None:
        """Begin anew: everything that was written may be overwritten, or goes with its map."""
        self._place = (0, 0)
        self.nbytes = 0
        if time.monotonic() > self._since + FRESH:
            self.close()

    def close(self) -> None:
        """Close all maps: each goes with its last tensor."""
        self._maps = []
        self._used = []
        self._place = (0, 0)
        self.nbytes = 0
        self._since = time.monotonic()

    def will_need(self) -> None:
        """Bring back what was written since the last :meth:`rewind`, blocking."""
        number, end = self._place
        sizes = self._used[:number]
        parts = [map_P[:nbytes] for map_P, nbytes in zip(self._maps, sizes, strict=False) if nbytes]
        will_need(parts)
        if end:
            will_need([self._maps[number][:end]])

    def take(self, nbytes: int) -> Tensor:
        """Return a place (uint8 [nbytes]) behind the last one. A map that the kernel has taken
        pages of is made anew: it would read each from the disk, only to have it overwritten."""
        number, start = self._place
        while number < len(self._maps) and start + nbytes > self._maps[number].numel():
            number = number + 1
            start = 0
        if number == len(self._maps):
            self._maps.append(self._scratch.buffer(max(nbytes, _PIECE)))
            self._used.append(0)
        elif not start and not is_in_memory(self._maps[number][: self._used[number]]):
            self._maps[number] = self._scratch.buffer(self._maps[number].numel())
            self._used[number] = 0
        stop = min(start + -(-nbytes // ALIGN) * ALIGN, self._maps[number].numel())
        self._place = (number, stop)
        self._used[number] = max(self._used[number], stop)
        self.nbytes += nbytes
        return self._maps[number][start : start + nbytes]

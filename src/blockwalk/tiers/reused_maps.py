"""File maps that every step writes again, from their beginning."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from blockwalk.plan.sizes import ALIGN
from blockwalk.system.process_memory import host_memory
from blockwalk.tiers.disk import is_in_memory, will_need, will_write
from blockwalk.tiers.scratch_maps import ScratchMaps

PIECE = 8 << 20
"""Bytes of a map with room for many places."""
_AT_ONCE = 2 << 20
"""Bytes of a new map that are made ready for writing at a time, where a place takes fewer."""
FRESH = 15.0
"""Seconds for which maps are used again. Linux writes out what has been dirty for 30, though nobody
will read it from the disk: of SmolLM2's graphs 1.4 GB each time, in 5 s in which one of two cores
did nothing else (docs/tricks.md). The dirty pages of an unlinked file that is closed are never
written. Half of 30 it is, for a map that is used again is next looked at a step later; and those of
graphs are closed as soon after a step that no other follows."""


@dataclass
class _Map:
    bytes_P: Tensor
    born: float
    ready: int = 0
    """Its first bytes that have been made ready and written, in any step."""

    def is_fresh(self) -> bool:
        return time.monotonic() < self.born + FRESH


class ReusedMaps:
    """Places in file maps, one behind the other, until :meth:`rewind`.

    Making a map costs more than writing one whose pages are there: for 100 MB in 24 maps 0.1 to 0.3
    s instead of 0.02. So a map that is too old goes when its place is written again, and its pages
    become those of the new one: a machine that another system runs beside others may have to ask
    for pages that it had let go of (0.4 GB/s).

    Args:
        scratch: where maps are made.
        piece: the bytes of a map, unless a place needs more; 0: each place has a map of its own.
    """

    def __init__(self, scratch: ScratchMaps, piece: int = PIECE) -> None:
        self._scratch = scratch
        self._piece = piece
        _, is_limited = host_memory()
        self._makes_ready = not is_limited  # Linux would write what is ready, and it filled again
        self._maps: list[_Map] = []
        self._place = (0, 0)
        self.nbytes = 0
        """The bytes of places since the last :meth:`rewind`."""

    def rewind(self) -> None:
        """Begin anew: everything that was written may be overwritten, or goes with its map."""
        last, _ = self._place
        self._maps = [m for number, m in enumerate(self._maps) if number <= last or m.is_fresh()]
        self._place = (0, 0)
        self.nbytes = 0

    def close(self) -> None:
        """Close all maps: each goes with its last tensor."""
        self._maps = []
        self.rewind()

    def will_need(self) -> None:
        """Bring back what was written since the last :meth:`rewind`, blocking."""
        number, end = self._place
        parts = [of.bytes_P[: of.ready] for of in self._maps[:number] if of.ready]
        will_need(parts)
        if end:
            will_need([self._maps[number].bytes_P[:end]])

    def take(self, nbytes: int) -> Tensor:
        """Return a place (uint8 [nbytes]) behind the last one."""
        number, start = self._place
        while number < len(self._maps) and start + nbytes > self._maps[number].bytes_P.numel():
            number = number + 1
            start = 0
        if number == len(self._maps):
            size = max(nbytes, self._piece)
            self._maps.append(_Map(self._scratch.buffer(size), time.monotonic()))
        current = self._maps[number]
        if not start:
            self._renew(current)
        size = current.bytes_P.numel()
        stop = min(start + -(-nbytes // ALIGN) * ALIGN, size)
        if stop > current.ready:
            ready = min(-(-stop // _AT_ONCE) * _AT_ONCE, size)
            if self._makes_ready:
                will_write(current.bytes_P[current.ready : ready])
            current.ready = ready
        self._place = (number, stop)
        self.nbytes += nbytes
        return current.bytes_P[start : start + nbytes]

    def _renew(self, old: _Map) -> None:
        """Make a map anew that Linux is about to write out, or has taken pages of: it would read
        each from the disk, only to have it overwritten."""
        if old.is_fresh() and is_in_memory(old.bytes_P[: old.ready]):
            return
        size = old.bytes_P.numel()
        old.bytes_P = torch.empty(0, dtype=torch.uint8)  # the pages go before others are asked for
        old.bytes_P = self._scratch.buffer(size)
        old.born = time.monotonic()
        old.ready = 0

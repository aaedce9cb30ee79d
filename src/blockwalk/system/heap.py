"""The C allocator's free memory: kept from block to block, since giving it back and faulting it in
again costs more than a block's smaller operators, and bounded, since temporaries of many sizes
leave holes in it. Left to itself glibc does neither: it returns each large temporary at once, and
over a few steps of a 0.5B model held 110 MB more than was in use."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLACK = 24 << 20
"""Bytes that anonymous memory may grow by before free heap is given back, at least."""
MARGIN = 15 << 20
"""Bytes that anonymous memory may grow by beyond a block's working set, at least. If free heap were
given back sooner, each block would fault its own pages in again (a 0.5B step: 150,000 page faults
and 0.7 s of the kernel's time; 8,000 and 0.1 s when they are kept)."""

RETURNED = 1 << 20
"""Bytes of a block that goes back to the system at once in a step of long sequences, whose holes
would be as large: products of so many rows outweigh what faulting them in costs. Hidden states of a
tile are among them (1.8 MB of Qwen2.5-0.5B): what a kept graph holds of small pieces would end up
in the hole that each leaves, and the next one would need another."""

LARGE = 1 << 20
"""Bytes of a block that is large while a tokenizer is read. Left to itself glibc keeps larger and
larger blocks in its heap as they come and go (up to :data:`_GROWN`), and one of 150,000 entries
leaves holes of 20 MB there."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_NEVER = 1 << 30
_GROWN = 32 << 20

# Torch, which looks at this when it first allocates, asks for pages of 2 MB for its larger tensors,
# where the system leaves that to be asked for: a block then faults its memory in again 2 MB at a
# time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@functools.cache
def _trimmer() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``, or None elsewhere."""
    if sys.platform != "linux":
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def give_back() -> None:
    """Collect garbage, and give all free heap back to the system: after construction, which frees
    much in small pieces."""
    gc.collect()
    if (trim := _trimmer()) is not None:
        trim(0)


def _return_from(size: int) -> None:
    """Let glibc return every freed block of ``size`` bytes or more to the system at once; older
    ones refuse more than 32 MB."""
    if _trimmer() is not None:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, size) or libc.mallopt(_M_MMAP_THRESHOLD, _GROWN)


@contextmanager
def large_returned() -> Iterator[None]:
    """Return every block of :data:`LARGE` bytes or more that is freed inside to the system at
    once."""
    _return_from(LARGE)
    try:
        yield
    finally:
        _return_from(_NEVER if _keep_freed.cache_info().currsize else _GROWN)


@functools.cache
def _keep_freed() -> None:
    """Let glibc keep what is freed, however large, until :meth:`Slack.bound` gives it back."""
    _return_from(_NEVER)
    if _trimmer() is not None:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_M_ARENA_MAX, 1)  # what one lane frees, another uses


class Slack:
    """A bound on the free heap that the process keeps for its next block. :meth:`bound` is cheap
    enough to be called after every block. The allocator's settings are the process's: they stay
    when this object is gone.

    Args:
        share: the quantile of the recent blocks' heap growth that is kept untrimmed. Rare blocks
            beyond it, such as a loss once a step, fault their pages in again.
        spare: the fraction of that growth, at least :data:`MARGIN` bytes, that is allowed on top
            before the heap is trimmed.
    """

    def __init__(self, share: float = 0.95, spare: float = 0.0) -> None:
        self._share = share
        self._spare = spare
        self._floor = 0
        self._left: deque[int] = deque(maxlen=32)
        """Bytes by which anonymous memory grew over single blocks that began with a trimmed heap,
        the newest 32, less what stayed after the next trim: programs that oneDNN compiled are no
        working set."""
        self._is_fresh = False
        self._returns = False
        _keep_freed()

    @property
    def _working_set(self) -> int:
        """Bytes of heap growth that ``share`` of the recent blocks stay below; 0 before any was
        seen."""
        count = len(self._left)
        return sorted(self._left)[int((count - 1) * self._share)] if count else 0

    def return_large(self, returns: bool) -> None:
        """Return every block of :data:`RETURNED` bytes or more to the system as soon as it is
        freed, and what else is free in each :meth:`bound`; or keep them."""
        if returns is not self._returns:
            self._returns = returns
            _return_from(RETURNED if returns else _NEVER)

    def bound(self, *, anew: bool = False) -> None:
        """Give free heap back if anonymous memory has grown, since the last time, by more than a
        block needs; or ``anew``, before blocks of other lengths than the last, which would find no
        room among what those left."""
        if (trim := _trimmer()) is None:
            return
        grown = _anonymous_bytes() - self._floor
        if self._is_fresh:
            self._left.append(grown)
        working_set = self._working_set
        needed = working_set + max(MARGIN, int(working_set * self._spare))
        self._is_fresh = anew or self._returns or grown > max(SLACK, needed)
        if self._is_fresh:
            trim(0)
            floor = _anonymous_bytes()
            if self._left:
                self._left[-1] -= max(floor - self._floor, 0)
            self._floor = floor


def _anonymous_bytes() -> int:
    """Return bytes of resident memory that no file stands behind."""
    # a file object costs twice as much, and this is asked at each block
    fd = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        _, resident, shared, *_ = os.read(fd, 128).split()
    finally:
        os.close(fd)
    return (int(resident) - int(shared)) * mmap.PAGESIZE

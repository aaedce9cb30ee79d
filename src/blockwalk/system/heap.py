"""The C allocator's free memory: kept from block to block, since giving it back and faulting it in again costs more than a
block's smaller operators, and bounded, since temporaries of many sizes leave holes in it. Left to itself glibc does neither:
it returns each large temporary at once, and over a few steps of a 0.5B model held 110 MB more than was in use."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections import deque
from collections.abc import Callable

SLACK = 24 << 20
"""Bytes that anonymous memory may grow by before free heap is given back, at least."""
MARGIN = 3 << 20
"""... and beyond a block's working set: given back sooner, each block would fault its own in again (a 0.5B step: 150,000
page faults and 0.7 s of the kernel's time, 8,000 and 0.1 s when it is kept)."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 1 << 30


@functools.cache
def _trimmer() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``, or None elsewhere."""
    if sys.platform != "linux":
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def give_back() -> None:
    """Collect garbage, and give all free heap back to the system: after construction, which frees much in small pieces."""
    gc.collect()
    if (trim := _trimmer()) is not None:
        trim(0)


@functools.cache
def _keep_freed() -> None:
    """Let glibc keep what is freed, however large, until :meth:`Slack.bound` gives it back."""
    if _trimmer() is not None:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_M_ARENA_MAX, 1)  # what one lane frees, another uses


class Slack:
    """Keeps free heap for the next block, and bounds how much of it stays backed by memory; cheap enough to be asked after
    every block. The allocator's settings are the process's: they stay when this object is gone."""

    def __init__(self, share: float = 0.8, spare: float = 0.125) -> None:
        """``share`` of the blocks find their working set kept (for those beyond it, such as a loss once a step, memory matters
        more than its faults), and ``spare`` of that, or :data:`MARGIN`, for the holes between."""
        self._share, self._spare = share, spare
        self._floor = 0
        self._left: deque[int] = deque(maxlen=32)
        """What one block has left behind on a heap without slack, of late."""
        self._is_fresh = False
        _keep_freed()

    @property
    def _working_set(self) -> int:
        """What that share of the blocks need."""
        count = len(self._left)
        return sorted(self._left)[int((count - 1) * self._share)] if count else 0

    def bound(self) -> None:
        """Give free heap back if anonymous memory has grown, since it last was, by more than a block needs."""
        if (trim := _trimmer()) is None:
            return
        grown = _anonymous_bytes() - self._floor
        if self._is_fresh:
            self._left.append(grown)
        working_set = self._working_set
        self._is_fresh = grown > max(SLACK, working_set + max(MARGIN, int(working_set * self._spare)))
        if self._is_fresh:
            trim(0)
            self._floor = _anonymous_bytes()


def _anonymous_bytes() -> int:
    """Resident bytes that no file stands behind."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

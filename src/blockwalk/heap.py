"""The C allocator's slack, kept small. Freed temporaries of many sizes leave it with holes that it does not give back:
over a few steps of a 0.5B model glibc held 110 MB more than was in use, a third of the whole process."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable

SLACK = 24 << 20
"""Bytes that anonymous memory may grow by before free heap is given back. Giving it back and faulting it in again costs
about a second for 4 GB: after every block that would be a tenth of a step."""


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


class Slack:
    """Bounds the free heap that stays backed by memory; cheap enough to be asked after every block."""

    def __init__(self, limit: int = SLACK) -> None:
        self._limit = limit
        self._floor = 0

    def bound(self) -> None:
        """Give free heap back if anonymous memory has grown by more than the limit since it last was."""
        if (trim := _trimmer()) is not None and _anonymous_bytes() > self._floor + self._limit:
            trim(0)
            self._floor = _anonymous_bytes()


def _anonymous_bytes() -> int:
    """Resident bytes that no file stands behind."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

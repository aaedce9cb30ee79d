"""The state of a file, as the kernel has it: enough to tell that it was changed, or replaced."""

from __future__ import annotations

import os

from blockwalk.system.paths import StrPath

FileState = tuple[int, int, int, int]
"""Inode, size in bytes, and the times of the last write and of the last change of the inode, in
nanoseconds."""


def state_of(file: StrPath | int) -> FileState:
    """Return the state of a file by its path or its descriptor.

    Programs set the time of the last write as they like, and archives restore it. The kernel moves
    the time of the inode's change at every write, and no program can set it back.

    Raises:
        OSError: there is no such file.
    """
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

"""Outputs that a command is still writing, beside the name that they take in the end. A process
that is killed leaves its own behind, gigabytes of a merged model: the next one of that output
removes them.

A partial output is locked (``flock``) for as long as its process lives; one without its lock is of
a process that has ended. Where the file system has no locks, nothing is removed."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blockwalk.system.locks import got_lock


@contextmanager
def held(partial: Path, path: Path, make: Callable[[], None], end: str) -> Iterator[None]:
    """Make a partial output of ``path``, and hold it for the time of the block; those of processes
    that were killed go.

    Args:
        partial: where it is made, beside ``path``: ``.NAME.<8 hexadecimal digits>`` and ``end``.
        make: makes the file or the folder ``partial``.
    """
    if os.name == "nt":  # no folder is opened there
        make()
        yield
        return
    own = _made(partial, make)
    for other in _others(path, end):
        if other != partial:
            _remove_ended(other)
    try:
        yield
    finally:
        os.close(own)


def _made(partial: Path, make: Callable[[], None]) -> int:
    """Make a partial output, and return its open and locked file. One that another process took for
    an ended one's, before it was locked, is made again."""
    while True:
        make()
        try:
            own = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue
        has_locks = got_lock(own, wait=True)
        if not has_locks or _is_at(own, partial):
            return own
        os.close(own)


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _others(path: Path, end: str) -> list[Path]:
    """Return the partial outputs of a path."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(end)}")
    return [other for other in path.parent.iterdir() if pattern.fullmatch(other.name)]


def _remove_ended(other: Path) -> None:
    """Remove a partial output whose process has ended; a link, and what cannot be opened, stays."""
    try:
        fd = os.open(other, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)) or not got_lock(fd):
            return
        if stat.S_ISDIR(mode):
            shutil.rmtree(other, ignore_errors=True)
        else:
            other.unlink(missing_ok=True)
    finally:
        os.close(fd)

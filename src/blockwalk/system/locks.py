"""Locks between processes: the kernel's own on an open file (``flock``), which end with the process
that holds them.

Windows has locks of bytes instead, which were not tried. ``fcntl`` is imported where a lock is
taken, so that the package can be imported without it.

Some network file systems, and some that are mounted without the option, have none. A run goes on
there after a warning: its user sees to it that no other process is at work in the same place."""

from __future__ import annotations

import errno
import logging
import os
import sys

from blockwalk.system.paths import StrPath

log = logging.getLogger(__name__)

WITHOUT_LOCKS = (
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.ENOLCK,
    errno.EINVAL,
    errno.EBADF,
)
"""Errors of a file system that has no locks. Linux's NFS answers EBADF for a file that is open for
reading alone."""


_BEYOND = 1 << 40
"""The byte that Windows locks: one behind the end of any lock file, for a locked byte cannot be
read by others."""


def got_lock(fd: int, *, wait: bool = False) -> bool:
    """Lock the open file ``fd`` for this process, until it is closed, and return whether it could:
    False where another process holds it and this one does not ``wait``, and where the file system
    has no locks."""
    try:
        _take(fd, wait)
    except OSError:
        return False
    return True


def lock(fd: int, path: StrPath, *, wait: bool = False) -> bool:
    """Lock the open file ``fd``, ``path`` in messages, for this process, until it is closed.

    Args:
        wait: for as long as another process holds it.

    Returns:
        Whether it is this process's, or the file system has no locks; False: another process holds
            it.
    """
    try:
        _take(fd, wait)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        log.warning(
            "%s is on a file system without locks (%s): see that no other run uses it", path, error
        )
    return True


def _take(fd: int, wait: bool) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError: another process holds it, and ``wait`` is false.
        OSError: the file system has no locks.
    """
    if sys.platform == "win32":
        import msvcrt

        os.lseek(fd, _BEYOND, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from None
        finally:
            os.lseek(fd, 0, os.SEEK_SET)
    else:
        try:
            import fcntl
        except ImportError:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

"""Locks between processes: the kernel's own on an open file (``flock``), which end with the process that holds them.

Some network file systems, and some that are mounted without the option, have none. A run goes on there after a warning: its
user sees to it that no other process is at work in the same place.
"""

from __future__ import annotations

import errno
import fcntl
import logging

from blockwalk.system.paths import StrPath

log = logging.getLogger(__name__)

WITHOUT_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""Errors of a file system that has no locks. Linux's NFS answers EBADF for a file that is open for reading alone."""


def lock(fd: int, path: StrPath, *, wait: bool = False) -> bool:
    """Lock the open file ``fd``, ``path`` in messages, for this process, until it is closed.

    Args:
        wait: for as long as another process holds it.

    Returns:
        Whether it is this process's, or the file system has no locks; False: another process holds it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        log.warning("%s is on a file system without locks (%s): see that no other run uses it", path, error)
    return True

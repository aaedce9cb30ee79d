"""The question who may change what lies at a path: this user and root alone, or others too."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_LINKS = 40
"""Links on one way at most; Linux follows as many."""


def exposed(path: Path) -> Path | None:
    """Return the first place on the way to a path where another user may put something else: a
    folder around it, the folder of a link on the way, or the path itself; None: there is none.

    A folder that all may write to, with the sticky bit (``/tmp``), exposes nothing below it:
    nobody renames there what is another's.

    Raises:
        OSError: there is no such path.
    """
    *folders, last = _way(path.absolute(), _LINKS)
    for folder in folders:
        if not is_private(os.stat(folder), around=True):
            return folder
    return None if is_private(os.stat(last)) else last


def _way(path: Path, links: int) -> Iterator[Path]:
    """Yield every folder that is entered on the way to an absolute path, from the root on, and the
    path."""
    for place in (*reversed(path.parents), path):
        if place.is_symlink() and links:
            yield from _way(place.parent / os.readlink(place), links - 1)
        else:
            yield place


def is_private(facts: os.stat_result, *, around: bool = False) -> bool:
    """Return whether only this user or root can write a file, or a folder's entries.

    Args:
        facts: of the file or folder; a descriptor's cannot be exchanged meanwhile.
        around: of a folder around what is asked for: entries of others may be added to it, but none
            exchanged.
    """
    writers = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    owners = {0, os.geteuid()}
    if around:
        owners.add(_unmapped_user())
        if facts.st_mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _is_of_one(facts.st_gid)):
            writers = 0
    return facts.st_uid in owners and not writers


def _is_of_one(group: int) -> bool:
    """Whether a group is this user's own: by its name, and without other members. Systems with such
    groups let them write to whatever the user makes (umask 002)."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


@lru_cache
def _unmapped_user() -> int:
    """Return the number under which a container without root shows the real root's folders, such
    as ``/``; where every user has his own number, root's."""
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
        if mapped == ["0", "0", "4294967295"]:
            return 0
        return int(Path("/proc/sys/fs/overflowuid").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0

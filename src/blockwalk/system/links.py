"""Files below a folder that others may have filled: opened without following a link, removed
without going through one."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import IO

KNOWN_BY = (".blockwalk", "store.json", "config.json")
"""Names of a mark, of a block store's index, and of a model's configuration."""


def open_own(path: Path, flags: int) -> int:
    """Open a file that nobody else has under another name, and answer its descriptor.

    Args:
        flags: of ``os.open``; with ``os.O_CREAT`` the file is made where it is not there.

    Raises:
        ValueError: ``path`` is a link, no ordinary file, or has a second name: to write it would
            change a file elsewhere.
    """
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, which would be written instead: remove the"
            " link"
        )
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):  # Windows has none of them
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags, 0o666)
    seen = os.fstat(descriptor)
    if stat.S_ISREG(seen.st_mode) and seen.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    kind = (
        "has a second name (a hard link), whose file"
        if stat.S_ISREG(seen.st_mode)
        else "is no ordinary file, and it"
    )
    raise ValueError(f"{path} {kind} would be written: remove it, or put a copy in its place")


def append_to(path: Path) -> IO[str]:
    """Open a file as text to read and to append to, as :func:`open_own` does; it is made where it
    is not there.

    Raises:
        ValueError: as :func:`open_own`.
    """
    descriptor = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    return os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace", buffering=1)


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder; none where it is no folder, or goes while it is read: the
    processes of a run remove their own."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that lies in it; where a link leads stays as it
    is. Names by which a folder is known again (:data:`KNOWN_BY`) go last: a kill leaves one that
    the next run still knows."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for file in sorted(path.iterdir(), key=lambda file: file.name in KNOWN_BY):
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink()
    path.rmdir()


def refuse_linked(folder: Path) -> None:
    """Raise ValueError where a folder is a link."""
    if folder.is_symlink():
        raise ValueError(
            f"{folder} is a link to {os.readlink(folder)}; a folder is needed: remove the link"
        )


def within(folder: Path, path: Path) -> Path:
    """Return the path of a file below a folder.

    Raises:
        ValueError: it is a link that leads out of the folder, or lies behind one.
    """
    place = os.path.realpath(path)
    if not Path(place).is_relative_to(os.path.realpath(folder)):
        raise ValueError(
            f"{path} leads out of {folder}, to {place}, and is left alone: put the file itself in"
            " its place"
        )
    return path

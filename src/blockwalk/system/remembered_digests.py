"""Digests of files' content, remembered for as long as no file changes.

A digest costs one read of the files, and is kept in the cache folder beside what the kernel says of
them: device, inode, size, and the times of the last write and of the last change of the inode. One
thing is trusted: that no file gets other bytes while all of these stay equal. The kernel moves the
last one at every call of ``write``, and no program can set it back; but its clock ticks in
milliseconds, so that files which were changed within the last seconds are not remembered, and are
read again next time. A store through a shared map moves it only where the page was clean: files are
synced before they are read, which makes their pages clean, and what lies in memory alone (tmpfs,
whose pages are never clean) is not remembered. A change by another machine, on a disk that several
share, is as that disk tells."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from blockwalk.system import cache
from blockwalk.system.file_states import state_of
from blockwalk.system.paths import StrPath

_CHUNK = 1 << 20
"""Bytes of a file that are digested at a time."""
_SETTLED = 3.0
"""Seconds without a change after which a file's times tell every later change."""
_LONG = 8 << 20
"""Bytes of a file whose digest is worth remembering."""


def remembered(entry: str, name: StrPath, paths: Sequence[Path], digest: Callable[[], str]) -> str:
    """Return the digest of some files, which is taken where none is remembered.

    Args:
        entry: the name that it is remembered by.
        name: the files in a message.

    Raises:
        ValueError: a file changed while it was read.
    """
    for path in paths:
        _sync(path)
    seen = _seen(paths)
    entry_value = cache.read_sealed(entry, lambda kept: (kept["seen"], str(kept["digest"])))
    if entry_value is not None and entry_value[0] == seen:
        return entry_value[1]
    began = time.time()
    result = digest()
    if _seen(paths) != seen:
        raise ValueError(
            f"{name} changed while it was read: wait until it is written, and start again"
        )
    settled = began - max(max(written, changed) for *_, written, changed in seen) / 1e9 > _SETTLED
    if settled and not _in_memory({device for device, *_ in seen}):
        cache.write_sealed(entry, {"seen": seen, "digest": result})
    return result


def file_digest(path: Path) -> str:
    """Return the digest of a file's content: 16 hexadecimal digits.

    Raises:
        ValueError: the file changed while it was read.
    """

    def read() -> str:
        digest = hashlib.blake2b(digest_size=8)
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    if path.stat().st_size < _LONG:
        return read()
    entry = f"digest-{cache.key(os.fsencode(path.resolve()) + b' of a file')}"
    return remembered(entry, path, [path.resolve()], read)


def _sync(path: Path) -> None:
    """Have the pages of a file written that were changed through a map, so that the kernel hears of
    the next change."""
    with suppress(OSError), open(path, "rb") as file:  # a disk that cannot sync is read-only
        os.fsync(file)


def _in_memory(devices: set[int]) -> bool:
    """Whether one of some devices is a file system that lies in memory, whose pages are written
    nowhere; true where the kernel does not say."""
    try:
        mounts = [
            line.split()
            for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        ]
    except (OSError, UnicodeError):
        return True
    kinds = {mount[2]: mount[mount.index("-") + 1] for mount in mounts}
    numbers = {f"{os.major(device)}:{os.minor(device)}" for device in devices}
    return any(kinds.get(number) in ("tmpfs", "ramfs") for number in numbers)


def _seen(paths: Sequence[Path]) -> list[list[int]]:
    """Return device, inode, size and times of each file, as the kernel has them."""
    return [[path.stat().st_dev, *state_of(path)] for path in paths]

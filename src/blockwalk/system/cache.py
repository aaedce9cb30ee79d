"""The cache folder: what can be found out again, kept between runs and shared by them. It may be
removed at any time.

Runs depend on what they read there, so every entry is sealed: a bit that flips on the disk makes an
entry that is not there. What other rooms keep in folders of their own has seals of its own: the
stand-ins of GGUF files, compiled kernels, packed models.

``BLOCKWALK_CACHE`` names it; else it is ``$XDG_CACHE_HOME/blockwalk``, else ``~/.cache/blockwalk``.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from blockwalk.system import atomic_files

T = TypeVar("T")


def folder() -> Path:
    """Return the cache folder, which need not exist yet.

    Raises:
        PermissionError: none is named, and the user has no home directory.
    """
    try:
        if chosen := os.environ.get("BLOCKWALK_CACHE"):
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockwalk"
    except RuntimeError:  # a user whom the system does not know, without HOME
        raise PermissionError(
            errno.EACCES, "this user has no home directory; set BLOCKWALK_CACHE or HOME"
        ) from None


def key(facts: bytes) -> str:
    """Return the name for an entry that depends on ``facts``: 32 hexadecimal digits."""
    return hashlib.blake2s(facts, digest_size=16).hexdigest()


def source_key(*files: str | None) -> str:
    """Return the key of modules' source files. To be called where the modules are imported: files
    that change later are not the code that this process runs."""
    return key(b"".join(Path(str(file)).read_bytes() for file in files))


def file_of(name: str) -> Path:
    """Return the file of an entry."""
    return folder() / f"{name}.json"


def read_sealed(name: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Return the value that ``parse`` makes of the object that :func:`write_sealed` kept as
    ``name``, or None if there is none, if a bit of it has changed since, or if another version of
    Blockwalk wrote it."""
    try:
        return parse(atomic_files.read_sealed(file_of(name)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def write_sealed(name: str, value: dict[str, Any]) -> None:
    """Keep a JSON object, with its digest, as ``name``. If the folder cannot be written, the next
    run takes the time to find it out again."""
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        atomic_files.write_sealed(file_of(name), value)

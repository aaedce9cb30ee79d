"""The cache folder: what can be found out again, kept between runs and shared by them. It may be
removed at any time.

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


def read_json(name: str, parse: Callable[[Any], T]) -> T | None:
    """Return the value that ``parse`` makes of what :func:`write_json` kept as ``name``, or None
    where there is none, or one that is not as this version writes it."""
    try:
        return parse(atomic_files.read_json(folder() / f"{name}.json"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def write_json(name: str, value: Any) -> None:
    """Keep a value as ``name``. A folder that cannot be written costs the next run the time to find
    it out, nothing else."""
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        atomic_files.write_json(folder() / f"{name}.json", value)

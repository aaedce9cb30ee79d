"""The cache folder: what can be found out again, kept between runs and shared by them. It may be removed at any time.

``BLOCKWALK_CACHE`` names it; else it is ``$XDG_CACHE_HOME/blockwalk``, else ``~/.cache/blockwalk``.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from blockwalk.system import atomic_files


def folder() -> Path:
    """The cache folder, which need not exist yet."""
    if chosen := os.environ.get("BLOCKWALK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockwalk"


def key(facts: bytes) -> str:
    """The name for an entry that depends on ``facts``: 32 hexadecimal digits."""
    return hashlib.blake2s(facts, digest_size=16).hexdigest()


def read_json(name: str) -> Any:
    """The value that :func:`write_json` kept as ``name``, or None where there is none."""
    try:
        return json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(name: str, value: Any) -> None:
    """Keep a value as ``name``. A folder that cannot be written costs the next run the time to find it out, nothing else."""
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        atomic_files.write_json(folder() / f"{name}.json", value)

"""The identity of a folder's weights: a digest of its content, remembered for as long as no file of
it changes.

A digest costs one read of the weights, on several threads, and is kept in the cache folder beside
what the kernel says of the files: device, inode, size, and the times of the last write and of the
last change of the inode. One thing is trusted: that no file gets other bytes while all of these
stay equal. The kernel moves the last one at every call of ``write``, and no program can set it
back; but its clock ticks in milliseconds, so that files which were changed within the last seconds
are not remembered, and are read again next time. A store through a shared map moves it only where
the page was clean: files are synced before they are read, which makes their pages clean, and what
lies in memory alone (tmpfs, whose pages are never clean) is not remembered. A change by another
machine, on a disk that several share, is as that disk tells."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blockwalk.models.gguf_folder import MADE
from blockwalk.models.model_source import STORE_INDEX, ModelSource, model_source
from blockwalk.system import cache
from blockwalk.system.file_states import FileState, state_of
from blockwalk.system.paths import StrPath

_SPAN = 64 << 20
_CHUNK = 1 << 20
"""Bytes that one thread digests, and bytes of them that it holds at a time."""
_SETTLED = 3.0
"""Seconds without a change after which a file's times tell every later change."""


def same_weights(folder: StrPath, digest: str) -> bool:
    """Return whether a digest is that of a model folder, by content; or, of a GGUF file, by content
    and name, as earlier versions made it."""
    return digest in (weights_digest(folder), weights_digest(folder, by_name=True))


@dataclass(frozen=True, slots=True)
class WeightsInUse:
    """The files of a model that a run reads, as they were when it began."""

    name: StrPath
    digest: str
    """The digest of their content, as of :func:`weights_digest`."""
    states: Mapping[Path, FileState]

    @classmethod
    def of(cls, name: StrPath, digest: str) -> WeightsInUse:
        """Return the files of a model whose digest is known."""
        return cls(name, digest, {path: state_of(path) for path in _files(model_source(name))})

    def require_unchanged(self) -> None:
        """Check that no file was written to since. One that has another in its place stays as it
        was for this process, which has mapped it.

        Raises:
            ValueError: one was, and has other content now; its name.
        """
        written = [path for path, state in self.states.items() if _is_written(path, state)]
        if written and weights_digest(self.name) != self.digest:
            raise ValueError(
                f"{written[0]} was written to while it was read: what was made of it since is of"
                " two models. Put the model back as it was and start again, a run from its last"
                " checkpoint (--resume_from_checkpoint latest)"
            )


def _is_written(path: Path, before: FileState) -> bool:
    """Whether the file at a path is the one that was there, and has other bytes or times."""
    try:
        state = state_of(path)
    except FileNotFoundError:
        return False
    return state[0] == before[0] and state != before


def _files(model: ModelSource) -> list[Path]:
    """Return the files that a model's digest is of."""
    folder = model.weights_folder.resolve()
    names = ["config.json", *([STORE_INDEX] if model.packed else model.checkpoint_files())]
    return [folder / name for name in names if (folder / name).is_file()]


def weights_digest(name: StrPath, *, by_name: bool = False) -> str:
    """Return the content of a model folder (configuration and weights) as 32 hexadecimal digits; of
    a block store its index, which has the checksums of all that was packed. The names that people
    give GGUF files are no part of it, unless ``by_name``.

    Raises:
        ValueError: the folder holds no model, or one that is being written.
    """
    model = model_source(name)
    folder = model.weights_folder.resolve()
    free_names = (folder / MADE).is_file() and not by_name
    paths = _files(model)
    for path in paths:
        _sync(path)
    seen = _seen(paths)
    entry = f"digest-{cache.key(os.fsencode(folder) + b' by content' * free_names)}"
    remembered = cache.read_sealed(entry, lambda kept: (kept["seen"], str(kept["digest"])))
    if remembered is not None and remembered[0] == seen:
        return remembered[1]
    began = time.time()
    digest = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for number, path in enumerate(paths):
            starts = range(0, path.stat().st_size, _SPAN)
            name = f"part {number}" if free_names and path.suffix == ".gguf" else path.name
            digest.update(
                json.dumps(
                    [name, *threads.map(_digest_span, [path] * len(starts), starts)]
                ).encode()
            )
    if _seen(paths) != seen:
        raise ValueError(
            f"{folder} changed while it was read: wait until it is written, and start again"
        )
    settled = began - max(max(written, changed) for *_, written, changed in seen) / 1e9 > _SETTLED
    if settled and not _in_memory({device for device, *_ in seen}):
        cache.write_sealed(entry, {"seen": seen, "digest": digest.hexdigest()})
    return digest.hexdigest()


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


def _seen(paths: list[Path]) -> list[list[int]]:
    """Return device, inode, size and times of each file, as the kernel has them."""
    return [[path.stat().st_dev, *state_of(path)] for path in paths]


def _digest_span(path: Path, start: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        remaining = _SPAN
        while remaining and (chunk := file.read(min(_CHUNK, remaining))):
            digest.update(chunk)
            remaining -= len(chunk)
    return digest.hexdigest()

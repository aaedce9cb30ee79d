"""The identity of a folder's weights: a digest of its content, taken on several threads, and
remembered for as long as no file of it changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blockwalk.models.gguf_folder import MADE
from blockwalk.models.model_source import STORE_INDEX, ModelSource, model_source
from blockwalk.system import cache
from blockwalk.system.file_states import FileState, state_of
from blockwalk.system.paths import StrPath
from blockwalk.system.remembered_digests import remembered

_SPAN = 64 << 20
_CHUNK = 1 << 20
"""Bytes that one thread digests, and bytes of them that it holds at a time."""


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
    entry = f"digest-{cache.key(os.fsencode(folder) + b' by content' * free_names)}"

    def read() -> str:
        digest = hashlib.blake2b(digest_size=16)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            for number, path in enumerate(paths):
                starts = range(0, path.stat().st_size, _SPAN)
                spans = threads.map(_digest_span, [path] * len(starts), starts)
                is_part = free_names and path.suffix == ".gguf"
                label = f"part {number}" if is_part else path.name
                digest.update(json.dumps([label, *spans]).encode())
        return digest.hexdigest()

    return remembered(entry, folder, paths, read)


def _digest_span(path: Path, start: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        remaining = _SPAN
        while remaining and (chunk := file.read(min(_CHUNK, remaining))):
            digest.update(chunk)
            remaining -= len(chunk)
    return digest.hexdigest()

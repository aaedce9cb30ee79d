"""Tokens that are kept: a large data set is encoded once, and later starts read it from a file.

    cache folder/tokens/
        KEY.tokens    token_ids | in_loss | starts | positions | numbers | digests of their chunks
        KEY.json      sizes, report and summary of the data set, sealed; written last
        KEY.lock      held by the process that encodes; others wait for it, and read

The key is a digest of all that the tokens are made of: the content of the files, the tokenizer, its
template, the settings, this package's code and the versions of the libraries. Every chunk of the
file has a digest, which is compared before the first read of it: a file of gigabytes is not read to
be opened. Damaged tokens are removed, and made again by the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blockwalk.data.column import token_folder
from blockwalk.data.dataset import Encoded, Summary, dtype_of, is_by_token
from blockwalk.data.encode_report import EncodeReport
from blockwalk.data.rendered import Tokenizer
from blockwalk.data.sources import files_of
from blockwalk.plan.data_source import listed
from blockwalk.plan.parsing import plain_values
from blockwalk.plan.run_config import DataSettings
from blockwalk.system import atomic_files, cache
from blockwalk.system.atomic_files import Damaged
from blockwalk.system.file_maps import map_file
from blockwalk.system.remembered_digests import file_digest

KEPT_FROM = 8 << 20
"""Bytes of the files of a data set whose tokens are kept; smaller ones are encoded at each
start."""
CHUNK = 128 << 10
"""Bytes that have a digest together."""
CHECKED_AT_ONCE = 64 << 20
"""Bytes of a file of tokens that is compared with its digests when it is opened."""
UNUSED_SECONDS = 30 * 24 * 3600.0
"""Seconds after which tokens that no run has read go when others are kept."""

_DIGEST_BYTES = 8
_NO_MATTER = frozenset(
    ("appended", "shuffle", "padding_multiple", "show_first", "label_scores", "allow_truncation")
)
"""Settings of ``data`` that change no token."""
_LIBRARIES = ("blockwalk", "transformers", "tokenizers", "jinja2", "numpy", "datasets", "pyarrow")
_CODE = cache.source_key(*map(str, sorted(Path(__file__).parent.glob("*.py"))))

log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """A data set, and the number of records that it was drawn from."""

    rows: Any
    records: int = 0


def kept(key: str, make: Callable[[], Kept]) -> Kept:
    """Return the data set that is kept under a key, or make it and keep it. Another process that
    makes it is waited for.

    Args:
        key: of :func:`key_of`; empty: the data set is made, and not kept.
    """
    folder = token_folder() if key else None
    if folder is None:
        return make()
    with atomic_files.in_turn(folder / f"{key}.lock"):
        path = folder / f"{key}.tokens"
        try:
            return _opened(path)
        except FileNotFoundError:
            pass
        except (Damaged, OSError) as error:
            log.warning("%s: the data are encoded again", error)
        result = make()
        if not isinstance(result.rows, Encoded):
            return result
        _sweep(folder, path)
        try:
            atomic_files.require_space(path, result.rows.nbytes, "the copy of its tokens")
            _write(path, result)
            return _opened(path)
        except (OSError, ValueError) as error:
            log.warning("%s; the next start encodes the data again", error)
            return result


def key_of(
    part: str,
    settings: DataSettings,
    tokenizer: Tokenizer,
    seed: int,
    limit: int = 0,
    kind: str = "",
) -> str:
    """Return the key of a data set (``train`` or ``eval``): 32 hexadecimal digits; empty where it
    is not kept, since it is small, a task's or not of files of this machine.

    Args:
        limit: records of it that are taken; 0: all.
        kind: the judged format that the objective learns; empty: none.
    """
    from_train = part == "train" or settings.eval_share
    sources = listed(settings.train if from_train else settings.eval)
    files = [files_of(source.path) for source in sources]
    all_files = [file for files_of_source in files for file in files_of_source]
    large = sum(file.stat().st_size for file in all_files) >= KEPT_FROM
    if settings.task or not all(files) or not large:
        return ""
    values = {
        name: value
        for name, value in plain_values(settings).items()
        if name not in _NO_MATTER
        and not (part == "train" and name.startswith("eval") and name != "eval_share")
    }
    template = str(getattr(tokenizer, "chat_template", None) or "")
    facts = {
        "part": part,
        "limit": limit,
        "kind": kind,
        "settings": values,
        "seed": seed,
        "files": [[str(file), file.stat().st_size, file_digest(file)] for file in all_files],
        "tokenizer": [
            cache.key(tokenizer.backend_tokenizer.to_str().encode()),
            repr(tokenizer),
            json.dumps(tokenizer.init_kwargs, default=str, sort_keys=True),
        ],
        "template": template,
        "day": date.today().isoformat() if "strftime_now" in template else "",
        "code": _CODE,
        "libraries": [_version(name) for name in _LIBRARIES],
    }
    return cache.key(json.dumps(facts, sort_keys=True, default=str).encode())


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def _write(path: Path, result: Kept) -> None:
    """Write a data set beside its place, then its header."""
    rows = result.rows
    arrays = rows.arrays()
    digests = bytearray()
    with atomic_files.atomic_open(path) as file:
        for array in arrays.values():
            for chunk in _chunks(array):
                digests += _digest(chunk)
                file.write(chunk)
            file.write(bytes(-file.tell() % CHUNK))
        file.write(digests)
    header = {
        "sizes": {name: len(array) for name, array in arrays.items()},
        "digests": hashlib.blake2b(digests).hexdigest(),
        "pad_id": rows.pad_id,
        "group": rows.group,
        "report": rows.report.to_plain(),
        "summary": asdict(rows.summary),
        "records": result.records,
    }
    atomic_files.write_sealed(path.with_suffix(".json"), header)


def _chunks(array: np.ndarray) -> Iterator[memoryview]:
    """Yield an array's bytes, some at a time."""
    content = np.ascontiguousarray(array).view(np.uint8)
    for begin in range(0, len(content), CHUNK):
        yield content[begin : begin + CHUNK].data


def _digest(chunk: Any) -> bytes:
    return hashlib.blake2b(chunk, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class _Section:
    """The bytes of one array in a file of tokens."""

    content: np.ndarray
    """The bytes themselves, uint8 [N]."""
    itemsize: int
    digests: np.ndarray
    """Digests of the chunks, uint8 [C, 8]."""
    checked: np.ndarray
    """Whether each chunk was compared, bool [C]."""
    path: Path

    def require(self, begin: int, end: int) -> None:
        """Compare the chunks of some values with their digests, where that was not done before.

        Raises:
            Damaged: a chunk differs.
        """
        begin_chunk = begin * self.itemsize // CHUNK
        end_chunk = -(-end * self.itemsize // CHUNK)
        if self.checked[begin_chunk:end_chunk].all():
            return
        for number in range(begin_chunk, end_chunk):
            chunk = self.content[number * CHUNK : (number + 1) * CHUNK]
            if _digest(chunk.data) != self.digests[number].tobytes():
                _remove(self.path)
                raise Damaged(
                    f"{self.path} is damaged (chunk {number} of {len(self.digests)}), and is"
                    " removed: start again, a run from its last checkpoint"
                    " (--resume_from_checkpoint latest), and the data are encoded again"
                )
            self.checked[number] = True


def _opened(path: Path) -> Kept:
    """Return the data set in a file of tokens.

    Raises:
        FileNotFoundError: there is none.
        Damaged: the file or its header is not as it was written.
    """
    header_file = path.with_suffix(".json")
    if not header_file.exists():
        raise FileNotFoundError(header_file)
    header = atomic_files.read_sealed(header_file)
    with atomic_files.reading(header_file):
        sizes = {
            name: int(size) * dtype_of(name).itemsize for name, size in header["sizes"].items()
        }
        chunks = {name: -(-size // CHUNK) for name, size in sizes.items()}
        digests_at = sum(chunks.values()) * CHUNK
        nbytes = digests_at + sum(chunks.values()) * _DIGEST_BYTES
        with path.open("rb") as file:
            size = path.stat().st_size
            if size != nbytes:
                raise Damaged(f"{path} is damaged: it has {size:,} bytes, and had {nbytes:,}")
            content = map_file(file.fileno(), nbytes, str(path))
        digests = content[digests_at:].reshape(-1, _DIGEST_BYTES)
        if hashlib.blake2b(digests.tobytes()).hexdigest() != header["digests"]:
            raise Damaged(f"{path} is damaged: the digests at its end have changed")
        sections: dict[str, _Section] = {}
        begin = 0
        for name, size in sizes.items():
            sections[name] = _Section(
                content[begin * CHUNK : begin * CHUNK + size],
                dtype_of(name).itemsize,
                digests[begin : begin + chunks[name]],
                np.zeros(chunks[name], dtype=np.bool_),
                path,
            )
            begin += chunks[name]
        arrays = {name: section.content.view(dtype_of(name)) for name, section in sections.items()}
        by_token = [section for name, section in sections.items() if is_by_token(name)]
        for name, section in sections.items():
            if not is_by_token(name):
                section.require(0, len(arrays[name]))

        def require(begin: int, end: int) -> None:
            for section in by_token:
                section.require(begin, end)

        if nbytes <= CHECKED_AT_ONCE:
            require(0, len(arrays["token_ids"]))
        rows = Encoded.of_arrays(
            arrays,
            pad_id=header["pad_id"],
            report=EncodeReport.of_plain(header["report"]),
            in_maps=True,
            summary_at_start=Summary(**header["summary"]),
            require=require,
            group=header["group"],
        )
        header_file.touch()  # the time of its last use
        return Kept(rows, header["records"])


def _remove(path: Path) -> None:
    """Remove tokens, their header first."""
    for file in (path.with_suffix(".json"), path):
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _sweep(folder: Path, path: Path) -> None:
    """Remove what a killed process left of the tokens at a path, and tokens that no run has read
    for long."""
    for leftover in folder.glob(f".{path.stem}.*{atomic_files.PARTIAL}"):
        with suppress(OSError):
            leftover.unlink()
    for header in folder.glob("*.json"):
        with suppress(OSError):
            if header.stat().st_mtime < time.time() - UNUSED_SECONDS:
                _remove(header.with_suffix(".tokens"))

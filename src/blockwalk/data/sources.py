"""Records from files of this machine, or from the hub.

    suffix                    record
    .jsonl .ndjson .json      an object on each line; or the objects of one array
    .csv .tsv                 a line below the header
    .parquet                  a row
    .txt                      the whole file, as the field text
    .jsonl.gz .csv.gz ...     as without .gz, for JSON, CSV and TSV
    a hub name                a row of the split, read by ``datasets``

A suffix may be in capitals. Every record keeps the place that it came from, so that whatever is
wrong with it can be named. What lies in a folder and is not read is named too: data are refused,
any other file is a warning.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from blockwalk.data.records import Record, half_character
from blockwalk.system.bounds import Endless, bounded
from blockwalk.system.file_states import FileState, state_of
from blockwalk.system.lfs import refuse_pointer

INSTALL = "pip install 'blockwalk[data]'"
HELD_OUT = frozenset(("test", "valid", "validation", "val", "dev", "eval", "heldout"))
"""Words in the names of files whose records are not to be trained on."""

UNREAD = frozenset(
    (
        ".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz", ".arrow", ".feather", ".orc",
        ".avro", ".tfrecord", ".xlsx", ".xls", ".ods", ".xml", ".yaml", ".yml", ".db", ".sqlite",
        ".pkl", ".npy", ".npz", ".h5", ".hdf5", ".lance", ".msgpack", ".mds",
    )
)  # fmt: skip
"""Suffixes of files that may hold records, and are not read."""
PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh91AY&SY": "bzip2",
    b"7z\xbc\xaf": "7z",
    b"Rar!\x1a\x07": "rar",
    b"\x04\x22\x4d\x18": "lz4",
}
"""First bytes of packed files, whatever they are called."""
OF_OTHERS = {
    b"PAR1\x15": "Parquet: give it a name that ends in .parquet",
    b"ARROW1\0\0": "Arrow: save it as Parquet, or as JSON lines",
    b"\xff\xff\xff\xff": "an Arrow stream: save it as Parquet, or as JSON lines",
    b"Obj\x01\x04": "Avro: save it as Parquet, or as JSON lines",
    b"\x93NUMPY": "an array of NumPy's: save its records as JSON lines",
    b"\x89HDF": "HDF5: save its records as JSON lines",
    b"SQLite format 3\0": "a data base: save a table of it as CSV",
    b"%PDF-1.": "a PDF: save its text as .txt",
}
"""First bytes of files that are no text, with what they are and what to do."""
WEB_PAGES = (b"<!doctype html", b"<html")
"""First bytes of a page that was saved instead of a file, in small letters."""
_TAR = b"ustar"
_TAR_AT = 257
"""The mark of a tar archive, and the byte of it where the mark stands."""
_NAMED = 4
"""Names of files in a message at most."""

log = logging.getLogger(__name__)

UNPACKED = 1000
"""Times that the rows of a Parquet file may take its bytes."""
LEAST_UNPACKED = 64 << 20
"""Bytes that the rows of any Parquet file may take."""
ROWS_AT_ONCE = 64
"""Rows that are unpacked together: each may hold the same long text, which the file has once."""
ARROW_BYTES = 1 << 30
"""Bytes of address space that its library takes for itself meanwhile, at most."""
SECONDS = 60.0
"""Seconds after which rows count as ones without an end."""
LONGEST_UNPACKED = 64 << 20
"""Bytes of a line, or of an array of JSON, in a gzip file at most: they are held together."""
LONGEST_CELL = 1 << 30
"""Characters of a CSV cell at most; Python's own limit, 131,072, is less than a long document."""


def read_records(
    source: str | Path,
    *,
    split: str = "train",
    subset: str | None = None,
    columns: Sequence[str] = (),
) -> Iterator[Record]:
    """Yield records of a file, of a folder's files in the order of their names, or of a data set on
    the hub.

    A source that exists on this machine is read from it; ``split`` and ``subset`` apply to the hub
    alone. A name that is no local path and has the form ``owner/name`` or ``name`` is asked of the
    hub, through ``datasets``. ``columns`` are ``field=column`` pairs: the field that a format asks
    for, and the column that holds it here."""
    pairs = [tuple(part.strip() for part in entry.partition("=")[::2]) for entry in columns]
    if malformed := next(
        (entry for entry, pair in zip(columns, pairs, strict=True) if not all(pair)), None
    ):
        raise ValueError(
            f"data.columns holds {malformed!r}; field=column is expected, as in prompt=question"
        )
    for record in _read(source, split, subset):
        _refuse_halves(record)
        fields = record.fields
        if missing := next((column for _, column in pairs if column not in fields), None):
            raise ValueError(
                f"{record.place}: no column {missing!r} (data.columns); it has {record.names}"
            )
        named = {field: fields[column] for field, column in pairs}
        yield Record({**fields, **named}, record.place, tuple(itertools.chain(*pairs)))


def _refuse_halves(record: Record) -> None:
    """Raise ValueError where a text holds half a character (a lone surrogate), which no tokenizer
    reads."""
    pending: list[tuple[str, Any]] = list(record.fields.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, str):
            if half := half_character(value):
                raise ValueError(
                    f"{record.place}: field {name!r} holds half a character, \\u{ord(half):04x} (a"
                    " lone surrogate): write the character whole, or U+FFFD"
                )
        elif isinstance(value, dict):
            pending += [(name, key) for key in value if isinstance(key, str)]
            pending += [(name, part) for part in value.values()]
        elif isinstance(value, list):
            pending += [(name, part) for part in value]


def _read(source: str | Path, split: str, subset: str | None) -> Iterator[Record]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = _files_of(path)
        _refuse_splits(path, files)
        for file in files:
            yield from _of_file(file)
    elif path.is_file():
        if _suffix(path) == path.suffix.lower():
            _refuse_packed(path)
        if _suffix(path) not in SUFFIXES:
            raise ValueError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")
        yield from _of_file(path)
    elif _suffix(path) in SUFFIXES or path.is_absolute() or str(source).count("/") > 1:
        raise ValueError(f"{source}: no such file")
    else:
        yield from _read_hub(str(source), split, subset)


def files_of(source: str) -> list[Path]:
    """Return the files of this machine that a source is read from; none of one on the hub.

    Raises:
        ValueError: as :func:`read_records`, of a folder.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _files_of(path)
    return [path] if path.is_file() else []


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that are read, in the order of their names; the others are
    named in a warning.

    Raises:
        ValueError: there is none, or there are data that are not read, in files of other suffixes
            or in folders.
    """
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in entries if _is_read(path)]
    if left_out := [path for path in entries if path not in files and _holds_data(path)]:
        folders = [path for path in left_out if path.is_dir()]
        listed = f"[{files[0] if files else folder}, {folders[0]}]" if folders else ""
        way_out = f"name folders as sources of their own, as in {listed}" if folders else ""
        if len(folders) < len(left_out):
            way_out += f"{way_out and ', and '}unpack, convert or move the files"
        raise ValueError(
            f"{folder} holds {_names(left_out)}, which would be left out: of a folder the files are"
            f" read that end in {', '.join(SUFFIXES[:-1])}; {way_out}"
        )
    if not files:
        raise ValueError(f"{folder}: no {', '.join(SUFFIXES[:-1])} file in this folder")
    if unread := [path for path in entries if path.is_file() and path not in files]:
        _warn_of(folder, _names(unread))
    return files


@lru_cache
def _warn_of(folder: Path, names: str) -> None:
    """Warn of files that are not read, once: a source is read several times."""
    log.warning("%s: not read: %s", folder, names)


def _suffix(path: Path) -> str:
    """Return the suffix that says how a file is read: of a gzip file of text the one before
    ``.gz``."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix == ".gz" and inner in _IN_GZIP else suffix


def _is_read(path: Path) -> bool:
    suffix = _suffix(path)
    return path.is_file() and suffix in SUFFIXES and suffix != ".txt"


def _holds_data(path: Path) -> bool:
    """Return whether a path that is not read may hold records: by its suffix, or that of a file in
    a folder."""
    if path.is_dir():
        return any(
            _is_read(inner) or inner.suffix.lower() in UNREAD
            for inner in path.rglob("*")
            if not any(part.startswith(".") for part in inner.relative_to(path).parts)
        )
    return path.suffix.lower() in UNREAD


def _names(paths: Sequence[Path]) -> str:
    """Return the names of some paths, a folder's with a slash behind it."""
    names = [f"{path.name}/" if path.is_dir() else path.name for path in paths]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _refuse_splits(folder: Path, files: Sequence[Path]) -> None:
    """Raise ValueError where some files of a folder are held out by their names, and others are
    not: nobody means to train on both."""
    held_out = [
        file for file in files if not HELD_OUT.isdisjoint(re.split(r"[\W_]+", file.stem.lower()))
    ]
    others = [file for file in files if file not in held_out]
    if held_out and others:
        raise ValueError(
            f"{folder} holds {others[0].name} and {held_out[0].name}, which is held out by its"
            f" name, and all files of a folder are read: name files instead, as in {others[0]}"
        )


def _of_file(path: Path) -> Iterator[Record]:
    """Yield records of one file. Raises ValueError where its reader cannot read it, and where it
    changes meanwhile; the message names the file."""
    refuse_pointer(path)
    suffix = _suffix(path)
    if suffix == path.suffix.lower():
        _refuse_packed(path)
    state = state_of(path)
    try:
        yield from _READERS[suffix](path)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        _require_unchanged(path, state)
        raise ValueError(f"{path} cannot be unpacked: {error}") from None
    except (csv.Error, ValueError) as error:
        _require_unchanged(path, state)
        if isinstance(error, UnicodeDecodeError):
            raise ValueError(
                f"{path} is not UTF-8 text ({_reason(error)}): save it as UTF-8"
            ) from None
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read as {suffix[1:]}: {error}") from None
    _require_unchanged(path, state)


def _require_unchanged(path: Path, state: FileState) -> None:
    """Raise ValueError where a file has grown, shrunk, or was replaced since its state was
    taken."""
    now = state_of(path) if path.is_file() else None
    # the last time tells of links and rights too
    if now is None or now[:3] != state[:3]:
        bytes_now = "none" if now is None else f"{now[1]:,}"
        raise ValueError(
            f"{path} changed while it was read ({state[1]:,} bytes, now {bytes_now}): wait until"
            " it is written, and start again"
        )


def _refuse_packed(path: Path) -> None:
    """Raise ValueError for a file that is packed, or of another kind than its name says, by its
    first bytes."""
    with path.open("rb") as file:
        begin = file.read(_TAR_AT + len(_TAR))
    is_tar = begin[_TAR_AT:] == _TAR
    kind = next((name for magic, name in PACKED.items() if begin.startswith(magic)), None)
    if kind or is_tar:
        raise ValueError(f"{path} is packed ({kind or 'tar'}): unpack it, and name what it holds")
    if _suffix(path) == ".parquet":
        return
    if text := next((text for magic, text in OF_OTHERS.items() if begin.startswith(magic)), None):
        raise ValueError(f"{path} is {text}")
    if _suffix(path) != ".txt" and begin.lstrip().lower().startswith(WEB_PAGES):
        raise ValueError(f"{path} is a web page: download the file itself")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open the bytes of a file, those of a gzip file unpacked as they are read."""
    with path.open("rb") as file:
        if path.suffix.lower() != ".gz":
            yield file
            return
        with gzip.open(file) as unpacked:
            yield unpacked  # type: ignore[misc]


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield lines of bytes.

    Raises:
        ValueError: one of a gzip file takes more than :data:`LONGEST_UNPACKED`.
    """
    if path.suffix.lower() != ".gz":
        yield from file
        return
    while line := file.readline(LONGEST_UNPACKED + 1):
        _require_held(path, line)
        yield line


def _require_held(path: Path, content: bytes) -> None:
    """Raise ValueError where a line or an array of a gzip file is larger than may be held."""
    if len(content) > LONGEST_UNPACKED:
        raise ValueError(
            f"{path} unpacks to a line or an array of more than {LONGEST_UNPACKED:,} bytes: unpack"
            " it, or write the records as JSON lines"
        )


def _array(file: IO[bytes], path: Path) -> Any:
    """Return the array of records in a file of JSON."""
    if path.suffix.lower() != ".gz":
        return json.load(file, object_pairs_hook=_fields)
    content = file.read(LONGEST_UNPACKED + 1)
    _require_held(path, content)
    return json.loads(content, object_pairs_hook=_fields)


def _read_json(path: Path) -> Iterator[Record]:
    with _opened(path) as file:
        if 0 in (begin := file.read(4)):
            raise ValueError(
                f"{path} is UTF-16 or UTF-32, or no text: save it as UTF-8 (it begins with"
                f" {begin.hex(' ')})"
            )
        file.seek(0)
        while (character := file.read(1)) and character in b"\xef\xbb\xbf \t\r\n":
            pass
        file.seek(0)
        if character == b"[":
            try:
                records = enumerate(_array(file, path), start=1)
            except RecursionError:
                raise ValueError(
                    f"{path}: not JSON that can be read: it is nested too deeply"
                ) from None
            yield from (_record(fields, f"{path} record {number}") for number, fields in records)
            return
        for number, line in enumerate(_lines(file, path), start=1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                fields = json.loads(line, object_pairs_hook=_fields)
            except RecursionError:
                raise ValueError(
                    f"{place}: not JSON that can be read: it is nested too deeply"
                ) from None
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{place}: not UTF-8 text ({_reason(error)}): save the file as UTF-8"
                ) from None
            except json.JSONDecodeError as error:
                hint = (
                    "; an object on each line is expected, or one array of objects"
                    if number == 1
                    else ""
                )
                raise ValueError(f"{place}: not JSON: {error}{hint}") from None
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            yield _record(fields, place)


def _fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's fields.

    Raises:
        ValueError: a name stands twice, of which one would be lost.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"an object has {_twice(name for name, _ in pairs)}: name each field once")
    return fields


def _twice(names: Iterable[str]) -> str:
    """Return the names that stand more than once, each with how often."""
    counts = Counter(names)
    return ", ".join(
        f"the name {name!r} {count} times" for name, count in counts.items() if count > 1
    )


def _reason(error: UnicodeDecodeError) -> str:
    """Return the byte that is none of its encoding's, and where it stands."""
    return f"byte 0x{error.object[error.start]:02x} at {error.start}: {error.reason}"


def _record(fields: Any, place: str) -> Record:
    if not isinstance(fields, dict):
        raise ValueError(f"{place}: expected a JSON object, not {type(fields).__name__}")
    return Record(fields, place)


@contextmanager
def _text_lines(path: Path) -> Iterator[Iterable[str]]:
    """Open the lines of a file of text, with their ends as they are."""
    if path.suffix.lower() != ".gz":
        with path.open(newline="", encoding="utf-8-sig") as text:
            yield text
        return
    with _opened(path) as file:
        lines = enumerate(_lines(file, path))
        yield (line.decode("utf-8" if number else "utf-8-sig") for number, line in lines)


def _read_csv(path: Path) -> Iterator[Record]:
    """Yield records of a CSV or TSV file.

    Raises:
        ValueError: a quote that is not closed, or closed within a cell, with its line; a header
            with a name twice, or cells beyond it.
    """
    csv.field_size_limit(LONGEST_CELL)
    delimiter = "\t" if _suffix(path) == ".tsv" else ","
    with _text_lines(path) as lines:
        # Strict: a reader that forgives takes the rest of the file for one text.
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        number = 0
        while True:
            first_line = rows.line_num + 1
            try:
                cells = next(rows, None)
            except csv.Error as error:
                raise ValueError(
                    f"{path} line {first_line}: a quote opens a cell that does not end as one:"
                    f" {error}. Close it, and write a quote within a quoted text twice"
                ) from None
            if cells is None:
                return
            if not cells:
                continue
            if header is None:
                if named := _twice(name for name in cells if name):
                    raise ValueError(f"{path}: the header has {named}: name each column once")
                header = cells
                continue
            number += 1
            if len(cells) > len(header):
                raise ValueError(
                    f"{path} record {number}: {len(cells) - len(header)} cells more than the header"
                    " has; quote texts with commas"
                )
            yield Record(dict(zip(header, cells, strict=False)), f"{path} record {number}")


def _read_text(path: Path) -> Iterator[Record]:
    yield Record({"text": path.read_text(encoding="utf-8-sig")}, str(path))


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: {INSTALL}") from None
    number = 0
    nbytes = 0
    bound = max(LEAST_UNPACKED, UNPACKED * path.stat().st_size)
    with parquet.ParquetFile(path) as file:
        if named := _twice(file.schema_arrow.names):
            raise ValueError(f"{path}: the file has {named}: name each column once")
        groups = (file.metadata.row_group(group) for group in range(file.metadata.num_row_groups))
        _require_small(path, sum(group.total_byte_size for group in groups), bound)
        batches = file.iter_batches(batch_size=ROWS_AT_ONCE)
        while (batch := _next_batch(path, batches, bound)) is not None:
            nbytes += batch.nbytes
            _require_small(path, nbytes, bound)
            for fields in batch.to_pylist():
                number += 1
                yield Record(without_nulls(fields), f"{path} row {number}")


def _next_batch(path: Path, batches: Iterator[Any], bound: int) -> Any:
    """Return the next rows of a Parquet file, or None; what it says of its bytes may be wrong."""
    try:
        with bounded(SECONDS, bound + ARROW_BYTES):
            return next(batches, None)
    except MemoryError:
        _require_small(path, bound + 1, bound)
        raise
    except Endless:
        raise ValueError(f"{path}: {ROWS_AT_ONCE} rows take more than {SECONDS:g} s") from None


def _require_small(path: Path, nbytes: int, bound: int) -> None:
    """Raise ValueError for a Parquet file whose rows take more bytes than the bound."""
    if nbytes > bound:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, and its rows take {nbytes:,} or more, past"
            f" the bound of {bound:,} ({UNPACKED:,} times as many): it is damaged, or is meant to"
            " take all memory; write the records as JSON lines"
        )


def _read_hub(name: str, split: str, subset: str | None) -> Iterator[Record]:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name}: no such file, and reading from the hub needs datasets: {INSTALL}"
        ) from None
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise ValueError(
            f"{name}: neither a file nor a data set that the hub gave (split {split!r} by"
            f" data.train_split or data.eval_split, subset {subset or ''!r} by data.subset):"
            f" {' '.join(str(error).split())}"
        ) from error
    for number, fields in enumerate(rows, start=1):
        yield Record(without_nulls(dict(fields)), f"{name}[{split}] row {number}")


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a row of Arrow whose structs have lost their nulls: Arrow gives each struct the fields
    of all, as null. Columns stay."""
    return {name: _pruned(value) for name, value in fields.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pruned(part) for name, part in value.items() if part is not None}
    return [_pruned(part) for part in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
SUFFIXES = tuple(_READERS)
_IN_GZIP = frozenset((".jsonl", ".ndjson", ".json", ".csv", ".tsv"))
"""Suffixes of text that is read from gzip files as well."""

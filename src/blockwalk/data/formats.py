"""Records from JSONL or Parquet files, or from the hub, and what shape they have.

A record is a plain dict with the place it came from, so that whatever is wrong with it can be named by file, line and
field. Nothing here knows of tokens.

    format            fields                        what is learnt
    messages          messages (role, content)      the assistant's turns
    completion        prompt, completion            the completion
    classification    those of a Template, label    the label word
    text              text                          all of it
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
INSTALL = "pip install 'blockwalk[data]'"


class Format(StrEnum):
    """The shape of a data set's records."""

    MESSAGES = "messages"
    COMPLETION = "completion"
    CLASSIFICATION = "classification"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Record:
    """One example as it was read: its fields, and where it stands ("reviews.jsonl line 7")."""

    fields: dict[str, Any]
    where: str

    def text(self, name: str) -> str:
        """The field ``name``, which must be there and be a string."""
        if name not in self.fields:
            raise ValueError(f"{self.where}: no field {name!r}; it has {', '.join(map(repr, self.fields)) or 'none'}")
        value = self.fields[name]
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: field {name!r} must be a string, not {type(value).__name__}")
        return value


@dataclass(frozen=True)
class Template:
    """The text that a classification record becomes, in the style of MeZO's SST-2 prompt (Malladi et al. 2023, Table 14).

    ``text`` names fields of the record in braces and the label's place as ``{label}``: ``"{text} It was {label}."``.
    ``words`` holds the label word of each class. A record's label is a class number or one of the words. Text after
    ``{label}`` is left off: a causal model's word does not depend on it. The blank before ``{label}`` is the word's.
    """

    text: str
    words: tuple[str, ...]
    label_field: str = "label"

    def __post_init__(self) -> None:
        if len(self.words) < 2 or len(set(self.words)) < len(self.words) or not all(self.words):
            raise ValueError(f"label words must be two or more different words, not {list(self.words)}")
        if "label" not in self.fields or self.fields.count("label") > 1:
            raise ValueError(f"template {self.text!r} must hold {{label}} once")
        if self.fields[0] == "label":
            raise ValueError(f"template {self.text!r} must name a field of the record before {{label}}")

    @property
    def fields(self) -> list[str]:
        """Names in braces, in order."""
        try:
            return [name for _, name, _, _ in string.Formatter().parse(self.text) if name is not None]
        except ValueError as error:
            raise ValueError(f"template {self.text!r}: {error}") from None

    def _parts(self) -> list[tuple[str, str | None]]:
        """(literal, field) pairs up to the label."""
        parts: list[tuple[str, str | None]] = []
        for literal, name, _, _ in string.Formatter().parse(self.text):
            if name == "label":
                return [*parts, (literal, None)]
            parts.append((literal, name))
        return parts

    def prompt(self, record: Record) -> str:
        """The text before the label word, without the blank that joins them."""
        *parts, (before, _) = self._parts()
        return "".join(literal + (record.text(name) if name else "") for literal, name in parts) + before.rstrip()

    def continuation(self, class_index: int) -> str:
        """The label word of a class, with the blank before it where the template has one."""
        before = self._parts()[-1][0]
        return before[len(before.rstrip()) :] + self.words[class_index]

    def class_index(self, record: Record) -> int:
        """The class of a record, from a number or a label word."""
        if self.label_field not in record.fields:
            raise ValueError(f"{record.where}: no field {self.label_field!r}, which holds the class")
        label = record.fields[self.label_field]
        if isinstance(label, str) and label in self.words:
            return self.words.index(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.words):
            return label
        raise ValueError(
            f"{record.where}: field {self.label_field!r} is {label!r}; it must be one of {list(self.words)} "
            f"or a number from 0 to {len(self.words) - 1}"
        )


def detect_format(record: Record, template: Template | None = None) -> Format:
    """The format of a data set, from its first record; a template means classification."""
    if template is not None:
        return Format.CLASSIFICATION
    fields = record.fields
    if "messages" in fields:
        return Format.MESSAGES
    if "prompt" in fields or "completion" in fields:
        return Format.COMPLETION
    if "text" in fields and "label" in fields:
        raise ValueError(f"{record.where}: text with a label needs a template and label words, or format 'text'")
    if "text" in fields:
        return Format.TEXT
    raise ValueError(
        f"{record.where}: expected the field 'messages', 'prompt' and 'completion', or 'text'; "
        f"found {', '.join(map(repr, fields)) or 'none'}"
    )


def read_records(source: str | Path, *, split: str = "train", subset: str | None = None) -> Iterator[Record]:
    """Records of a file, of a folder's files in the order of their names, or of a data set on the hub.

    A source that exists on this machine is read from it; ``split`` and ``subset`` apply to the hub alone. A name that
    is no local path and has the form ``owner/name`` or ``name`` is asked of the hub, through ``datasets``.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise ValueError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
        for file in files:
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    elif path.suffix in SUFFIXES or path.is_absolute() or str(source).count("/") > 1:
        raise ValueError(f"{source}: no such file")
    else:
        yield from _read_hub(str(source), split, subset)


def _read_file(path: Path) -> Iterator[Record]:
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix in SUFFIXES:
        yield from _read_jsonl(path)
    else:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}")


def _read_jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:
                hint = "; one JSON object on each line is expected" if number == 1 else ""
                raise ValueError(f"{where}: not JSON: {error}{hint}") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{where}: expected a JSON object, not {type(fields).__name__}")
            yield Record(fields, where)


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: {INSTALL}") from None
    number = 0
    with parquet.ParquetFile(path) as file:
        for group in file.iter_batches(batch_size=1024):
            for fields in group.to_pylist():
                number += 1
                yield Record(fields, f"{path} row {number}")


def _read_hub(name: str, split: str, subset: str | None) -> Iterator[Record]:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{name}: no such file, and reading from the hub needs datasets: {INSTALL}") from None
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise ValueError(f"{name}: neither a file nor a data set that the hub gave: {error}") from error
    for number, fields in enumerate(rows, start=1):
        yield Record(dict(fields), f"{name}[{split}] row {number}")

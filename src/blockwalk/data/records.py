"""Records, the questions that they ask, and the templates that make questions of them.

A record is a plain dict with the place it came from, so that whatever is wrong with it can be named
by file, line and field."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockwalk.plan.parsing import fields_of


class WatchedFields(dict[str, Any]):
    """The fields of a record, which note the names by which values are read."""

    read: set[str]

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


@dataclass(frozen=True, slots=True)
class Record:
    """One example as it was read: its fields, and where it stands ("reviews.jsonl line 7")."""

    fields: dict[str, Any]
    place: str
    renamed: tuple[str, ...] = ()
    """Columns that ``data.columns`` reads under other names, and these names."""

    def watched(self, read: set[str]) -> Record:
        """Return the record with fields that add to ``read`` the names that are read of them."""
        fields = WatchedFields(self.fields)
        fields.read = read
        return replace(self, fields=fields)

    @property
    def names(self) -> str:
        """The names of its fields, for an error's text."""
        return ", ".join(map(repr, self.fields)) or "none"

    def text(self, name: str) -> str:
        """Return the field ``name``, which must be there and be a string."""
        if name not in self.fields:
            raise ValueError(
                f"{self.place}: no field {name!r}; it has {self.names} (data.columns:"
                f" [{name}=COLUMN] takes it from one of these)"
            )
        value = self.fields[name]
        if not isinstance(value, str):
            raise ValueError(
                f"{self.place}: field {name!r} must be a string, not {type(value).__name__}"
            )
        return value


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with the continuations that are ranked, each with the blank that joins it; or with
    the texts of which a generated answer should be one."""

    prompt: str
    candidates: tuple[str, ...]
    right: tuple[int, ...]
    """Numbers of the candidates that are right; the first is learnt."""
    answers: tuple[str, ...] = ()
    """Texts that a generated answer may have; empty: candidates are ranked."""
    place: str = ""

    @staticmethod
    def asked(prompt: str, answers: Sequence[str], place: str) -> Question:
        """Return a question that is answered in a line of the model's own; the first answer is
        learnt, with the end of its line."""
        return Question(prompt, (f" {answers[0]}\n",), (0,), tuple(answers), place)

    @property
    def learnt(self) -> str:
        """The continuation that is learnt."""
        return self.candidates[self.right[0]]


@dataclass(frozen=True)
class Template:
    """The text that a classification record becomes, in the style of MeZO's SST-2 prompt (Malladi
    et al. 2023, Table 14).

    ``text`` names fields of the record in braces and the label's place as ``{label}``: ``"{text} It
    was {label}."``. ``words`` holds the label word of each class. A record's label is a class
    number or one of the words. Text after ``{label}`` is left off: a causal model's word does not
    depend on it. Blanks before ``{label}`` are the word's; a line's end is the prompt's."""

    text: str
    words: tuple[str, ...]
    label_field: str = "label"

    def __post_init__(self) -> None:
        if len(self.words) < 2 or len(set(self.words)) < len(self.words) or not all(self.words):
            raise ValueError(
                f"label words must be two or more different words, not {list(self.words)}"
            )
        if "label" not in self.fields or self.fields.count("label") > 1:
            raise ValueError(f"template {self.text!r} must hold {{label}} once")
        if self.fields[0] == "label":
            raise ValueError(
                f"template {self.text!r} must name a field of the record before {{label}}"
            )

    @property
    def fields(self) -> list[str]:
        """Names in braces, in order.

        Raises:
            ValueError: braces that do not close, or with more in them than a name.
        """
        return fields_of(self.text, "template")

    def _parts(self) -> list[tuple[str, str | None]]:
        """Return (literal, field) pairs up to the label."""
        parts: list[tuple[str, str | None]] = []
        for literal, name, _, _ in string.Formatter().parse(self.text):
            if name == "label":
                return [*parts, (literal, None)]
            parts.append((literal, name))
        return parts

    def prompt(self, record: Record) -> str:
        """Return the text before the label word, without the blank that joins them."""
        *parts, (ending, _) = self._parts()
        return "".join(
            literal + (record.text(name) if name else "") for literal, name in parts
        ) + ending.rstrip(" ")

    def continuation(self, class_index: int) -> str:
        """Return the label word of a class, with the blank before it where the template has one."""
        literal = self._parts()[-1][0]
        return literal[len(literal.rstrip(" ")) :] + self.words[class_index]

    def question(self, record: Record) -> Question:
        """Return the record with every label word."""
        words = tuple(map(self.continuation, range(len(self.words))))
        return Question(self.prompt(record), words, (self.class_index(record),), place=record.place)

    def class_index(self, record: Record) -> int:
        """Return the class of a record, from a number or a label word."""
        if self.label_field not in record.fields:
            raise ValueError(
                f"{record.place}: no field {self.label_field!r}, which holds the class"
            )
        label = record.fields[self.label_field]
        if isinstance(label, str) and label in self.words:
            return self.words.index(label)
        if isinstance(label, str) and label.isdecimal():  # CSV has texts alone
            label = int(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.words):
            return label
        raise ValueError(
            f"{record.place}: field {self.label_field!r} is {label!r}; it must be one of"
            f" {list(self.words)} or a number from 0 to {len(self.words) - 1}"
        )


def half_character(text: str) -> str:
    """Return the first lone surrogate of a text, half a character that no tokenizer reads; empty
    where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""

"""Formats of records: the fields that each has, and how one is known.

format           fields                                 what is learnt
messages         messages (role, content)               the assistant's turns
sharegpt         conversations (from, value)            the assistant's turns
alpaca           instruction, input, output             the output
                 (history; before any of these: system,
                 system_prompt)
completion       prompt, completion: texts, or lists    the completion; of turns, the
                 of turns (role, content)               assistant's in it
classification   those of a Template, label             the label word
text             text                                   all of it
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from blockwalk.data.records import Record


class Format(StrEnum):
    """The shape of a data set's records."""

    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    COMPLETION = "completion"
    CLASSIFICATION = "classification"
    TEXT = "text"


COLUMNS: dict[Format, tuple[str, ...]] = {
    Format.MESSAGES: ("messages",),
    Format.SHAREGPT: ("conversations",),
    Format.ALPACA: ("instruction", "output"),
    Format.COMPLETION: ("prompt", "completion"),
    Format.TEXT: ("text",),
}
"""The columns that a format is known by, in the order in which formats are tried."""


PAIRS = (("question", "answer"), ("query", "response"))
"""Other data sets' names of ``instruction`` and ``output``."""


def detect_format(record: Record) -> Format:
    """Return the format of a data set, from its first record.

    Raises:
        ValueError: none fits, or learning every answer would be a mistake; the setting that reads
            the file is named.
    """
    fields = record.fields
    if {"chosen", "rejected"} <= fields.keys() and not fields.keys() & {"completion", "output"}:
        answer = "output" if "instruction" in fields else "completion"
        spoken = next(
            (kind for kind in (Format.MESSAGES, Format.SHAREGPT) if COLUMNS[kind][0] in fields),
            None,
        )
        settings = f"data.format: {spoken}" if spoken else f"data.columns: [{answer}=chosen]"
        if not spoken and isinstance(fields["chosen"], list):
            settings = "data.columns: [messages=chosen] with data.format: messages"
        raise ValueError(
            f"{record.place}: fields 'chosen' and 'rejected' are a pair to prefer one of, and one"
            f" answer is learnt here; {settings} learns the chosen one"
        )
    matching = next((kind for kind, names in COLUMNS.items() if fields.keys() >= set(names)), None)
    if matching in (Format.MESSAGES, Format.SHAREGPT) and isinstance(fields.get("label"), bool):
        raise ValueError(
            f"{record.place}: field 'label' says whether an answer is wanted, and none is held back"
            f" here; data.format: {matching} learns every answer"
        )
    if matching is Format.TEXT and "label" in fields:
        raise ValueError(
            f"{record.place}: text with a label needs a template and label words (data.template,"
            " data.label_words), or data.format: text"
        )
    if matching is not None:
        return matching
    if any(fields.keys() >= set(pair) for pair in PAIRS):
        return Format.ALPACA
    partly = [kind for kind, names in COLUMNS.items() if fields.keys() & set(names)]
    if len(partly) == 1:
        return partly[0]  # whatever lacks of it is named where it is read
    raise _of_no_format(record)


def _of_no_format(record: Record) -> ValueError:
    """Return the refusal of a record that has the fields of no format."""
    fields = record.fields
    if inner := [name for name, value in fields.items() if _holds_records(value)]:
        return ValueError(
            f"{record.place}: the records lie in its field {inner[0]!r}: write that list as the"
            " file, an array of objects or one on each line"
        )
    expected = "; ".join(
        f"{', '.join(map(repr, names))} ({kind})" for kind, names in COLUMNS.items()
    )
    expected += "".join(
        f"; {question!r}, {answer!r} ({Format.ALPACA})" for question, answer in PAIRS
    )
    return ValueError(
        f"{record.place}: expected the fields of a format: {expected}; found {record.names}."
        " data.columns names columns that hold them, as in [prompt=question, completion=answer]"
    )


def _holds_records(value: Any) -> bool:
    """Return whether a field's value is a list of objects, as in a file with one object around all
    records."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


SYSTEM = ("system", "system_prompt")
"""Columns that hold what stands before a conversation or a prompt."""


def system_text(record: Record) -> str:
    """Return the text that a record has before its conversation or its prompt; empty without.

    Raises:
        ValueError: two columns have different ones.
    """
    texts = [record.text(name) for name in SYSTEM if record.fields.get(name)]
    if len(set(texts)) > 1:
        raise ValueError(
            f"{record.place}: fields {SYSTEM[0]!r} and {SYSTEM[1]!r} say different things: give one"
        )
    return texts[0] if texts else ""


def in_turns(record: Record) -> bool:
    """Return whether prompt and completion are lists of turns, as in TRL's conversational data, and
    not texts.

    Raises:
        ValueError: one is a list of turns, and the other is none.
    """
    present = [name for name in COLUMNS[Format.COMPLETION] if name in record.fields]
    listed = [name for name in present if isinstance(record.fields[name], list)]
    if listed and (texts := [name for name in present if name not in listed]):
        raise ValueError(
            f"{record.place}: field {listed[0]!r} is a list of turns, and {texts[0]!r} is none:"
            " give both as texts, or both as lists of turns with 'role' and 'content'"
        )
    return bool(listed)


def learns_chats(record: Record, kind: str) -> bool:
    """Return whether records like this one are learnt as conversations, where the tokenizer has a
    chat template; ``kind``: the format, empty for the record's own."""
    form = Format(kind) if kind else detect_format(record)
    if form is Format.COMPLETION:
        return in_turns(record)
    return form in (Format.MESSAGES, Format.SHAREGPT, Format.ALPACA)


def alpaca_prompt(record: Record) -> str:
    """Return the instruction, and below it the input where there is one."""
    input_text = record.text("input") if record.fields.get("input") is not None else ""
    return "\n".join(part for part in (record.text(alpaca_columns(record)[0]), input_text) if part)


def alpaca_columns(record: Record) -> tuple[str, str]:
    """Return the columns of a record's instruction and output, whatever they are called."""
    standard = COLUMNS[Format.ALPACA]
    names = record.fields.keys()
    instruction, output = next(
        (pair for pair in (standard, *PAIRS) if names >= set(pair)), standard
    )
    return instruction, output


def answer_column(kind: Format, record: Record) -> str:
    """Return the column that holds what is learnt of a record with one answer.

    Raises:
        ValueError: records of the format have no such column.
    """
    if kind is Format.COMPLETION:
        return COLUMNS[kind][1]
    if kind is Format.ALPACA:
        return alpaca_columns(record)[1]
    raise ValueError(
        f"{record.place}: data.prompt is the text before an answer, and records of the format"
        f" {kind} have no column for one: leave data.prompt out, or give"
        f" {', '.join(map(repr, COLUMNS[Format.ALPACA]))} or"
        f" {', '.join(map(repr, COLUMNS[Format.COMPLETION]))} (data.columns)"
    )

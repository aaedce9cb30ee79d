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

Judged formats are those of an objective that compares or weighs answers (:data:`JUDGED`):

preference       chosen, rejected; prompt, or turns     both answers
unpaired         an answer of a format above, label     the answer
scored           an answer of a format above,           the answer
                 advantage (old_log_probabilities,
                 group)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from blockwalk.data.records import Record
from blockwalk.plan.objectives import OBJECTIVES, ObjectiveFacts


class Format(StrEnum):
    """The shape of a data set's records."""

    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    COMPLETION = "completion"
    CLASSIFICATION = "classification"
    TEXT = "text"
    PREFERENCE = "preference"
    UNPAIRED = "unpaired"
    SCORED = "scored"


_ALPACA = ("instruction", "output")
COLUMNS: dict[Format, tuple[str, ...]] = {
    Format.MESSAGES: ("messages",),
    Format.SHAREGPT: ("conversations",),
    Format.ALPACA: _ALPACA,
    Format.COMPLETION: ("prompt", "completion"),
    Format.TEXT: ("text",),
}
"""The columns that a format is known by, in the order in which formats are tried."""


PAIRS = (("question", "answer"), ("query", "response"))
"""Other data sets' names of ``instruction`` and ``output``."""


ANSWERS_ALONE = ObjectiveFacts()
"""The facts of an objective that reads answers alone, as ``sft`` does."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The facts of a judged format: what its records bring beside texts."""

    columns: tuple[tuple[str, ...], ...]
    """Columns that a record must have, each with its other names."""
    group: int = 1
    """Answers of a record, each a row."""
    numbers: tuple[str, ...] = ()
    """Names of the numbers that a record brings for each row."""
    optional: tuple[str, ...] = ()
    """Names of further numbers of a row, which a data set may lack."""
    token_numbers: tuple[str, ...] = ()
    """Names of numbers of each learnt token, which a data set may lack."""


LABELS = ("label", "kto_tag")
"""Columns that say whether an answer is wanted."""

JUDGED: dict[Format, Judgement] = {
    Format.PREFERENCE: Judgement((("chosen",), ("rejected",)), group=2),
    Format.UNPAIRED: Judgement((LABELS,), numbers=("desirable",)),
    Format.SCORED: Judgement(
        (("advantage",),),
        numbers=("advantages",),
        optional=("group",),
        token_numbers=("old_log_probabilities",),
    ),
}
"""The formats of objectives that compare or weigh answers."""


def judged_format(objective: ObjectiveFacts) -> Format | None:
    """Return the judged format whose records bring what an objective needs; None for an objective
    that reads answers alone.

    Raises:
        ValueError: no format brings it.
    """
    needs = {*objective.numbers, *objective.token_numbers}
    if objective.group == 1 and not needs:
        return None
    for kind, judgement in JUDGED.items():
        brought = {*judgement.numbers, *judgement.optional, *judgement.token_numbers}
        if judgement.group == objective.group and brought >= needs:
            return kind
    raise ValueError(
        f"no format of records has {objective.group} answers and the numbers"
        f" {', '.join(sorted(needs)) or 'none'}, which the objective needs"
    )


def name_of(objective: ObjectiveFacts) -> str:
    """Return the name of an objective's row, for a message."""
    implementation = objective.implementation
    names = (name for name, row in OBJECTIVES.items() if row.implementation == implementation)
    return next(names, "another one")


def format_of(
    record: Record, kind: Format | str | None, objective: ObjectiveFacts = ANSWERS_ALONE
) -> Format:
    """Return the format of a data set, from its first record and the objective that learns it.

    Args:
        kind: the format that the settings name; None or empty: the record's own.

    Raises:
        ValueError: records like this one lack what the objective needs, or have a judgement that
            it does not read.
    """
    judged = judged_format(objective)
    name = name_of(objective)
    if judged is None:
        form = Format(kind) if kind else detect_format(record)
        if form in JUDGED:
            raise ValueError(
                f"data.format is {form}, and objective is {name}, which reads no judgement of"
                f" an answer: set objective: {_objectives(form)}"
            )
        return form
    if kind and Format(kind) is not judged:
        raise ValueError(
            f"data.format is {kind}, and objective: {name} learns records of the format"
            f" {judged}: leave data.format out"
        )
    if lacks := missing_judgement(record, judged):
        raise ValueError(f"{lacks}; objective: {name} needs it")
    return judged


def missing_judgement(record: Record, kind: Format) -> str:
    """Return a sentence on the column of a judged format that a record lacks; empty where it has
    all."""
    for names in JUDGED[kind].columns:
        if not record.fields.keys() & set(names):
            return (
                f"{record.place}: no field {' or '.join(map(repr, names))}, which records of the"
                f" format {kind} have; it has {record.names} (data.columns: [{names[0]}=COLUMN]"
                " takes it from one of these)"
            )
    return ""


def _objectives(kind: Format) -> str:
    """Return the names of the objectives that learn a judged format, for a message."""
    names = [name for name, facts in OBJECTIVES.items() if judged_format(facts) is kind]
    return " or ".join(names)


def detect_format(record: Record) -> Format:
    """Return the format of a data set of which answers alone are read, from its first record.

    Raises:
        ValueError: none fits, or learning every answer would be a mistake; the settings that read
            the file are named.
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
            f"{record.place}: fields 'chosen' and 'rejected' are a pair to prefer one of, and"
            f" objective: sft learns one answer. Set objective: {_objectives(Format.PREFERENCE)};"
            f" {settings} learns the chosen one"
        )
    matching = next((kind for kind, names in COLUMNS.items() if fields.keys() >= set(names)), None)
    if matching not in (None, Format.TEXT):
        _refuse_judgement(record, matching)
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


def _refuse_judgement(record: Record, kind: Format | None) -> None:
    """Raise ValueError where a record with one answer says what this is worth."""
    fields = record.fields
    labels = [name for name in LABELS if isinstance(fields.get(name), bool)]
    scores = [
        name
        for (name,) in JUDGED[Format.SCORED].columns
        if isinstance(fields.get(name), int | float)
    ]
    for names, judged, meaning in (
        (labels, Format.UNPAIRED, "says whether an answer is wanted"),
        (scores, Format.SCORED, "says what an answer is worth"),
    ):
        if names:
            raise ValueError(
                f"{record.place}: field {names[0]!r} {meaning}, and objective: sft learns every"
                f" answer. Set objective: {_objectives(judged)}; data.format: {kind} learns every"
                " answer all the same"
            )


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


def judged_in_turns(record: Record) -> bool:
    """Return whether the answers of a judged record are a conversation's, where the tokenizer has a
    chat template."""
    fields = record.fields
    if fields.keys() & {"messages", "conversations", *(name for name, _ in (*PAIRS, _ALPACA))}:
        return True
    answers = (fields.get(name) for name in ("prompt", "completion", "chosen", "rejected"))
    return any(isinstance(answer, list | dict) for answer in answers)


def learns_chats(record: Record, kind: str, objective: ObjectiveFacts = ANSWERS_ALONE) -> bool:
    """Return whether records like this one are learnt as conversations, where the tokenizer has a
    chat template; ``kind``: the format, empty for the record's own."""
    form = format_of(record, kind, objective)
    if form in JUDGED:
        return judged_in_turns(record)
    if form is Format.COMPLETION:
        return in_turns(record)
    return form in (Format.MESSAGES, Format.SHAREGPT, Format.ALPACA)


def alpaca_prompt(record: Record, column: str = "") -> str:
    """Return the instruction, and below it the input where there is one; ``column``: the
    instruction's, empty where the record's answer tells it."""
    input_text = record.text("input") if record.fields.get("input") is not None else ""
    instruction = record.text(column or alpaca_columns(record)[0])
    return "\n".join(part for part in (instruction, input_text) if part)


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

"""Shapes of records: which fields each format has, and the turns or texts that they become.

A record is a plain dict with the place it came from, so that whatever is wrong with it can be named
by file, line and field. Nothing here knows of tokens.

    format            fields                                      what is learnt
    messages          messages (role, content)                    the assistant's turns
    sharegpt          conversations (from, value)                 the assistant's turns
    alpaca            instruction, input, output                  the output
    completion        prompt, completion: texts, or lists of      the completion; of turns, the assistant's in it
                      turns (role, content)
    classification    those of a Template, label                  the label word
    text              text                                        all of it
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from blockwalk.plan.parsing import fields_of


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
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "ai", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}
"""Other data sets' names of roles; any other name is the role's own."""
MARKS = {
    **dict.fromkeys(
        ("weight", "train", "training", "train_on_turn", "trainable", "learn", "loss"), True
    ),
    **dict.fromkeys(("mask", "masked"), False),
}
"""Fields by which a turn says whether it is learnt, and the value that says yes. None says
nothing."""
RECORD_MARKS = ("weight", "train")
"""Those of :data:`MARKS` that a conversation may have as a whole; the other names are common
columns of other meanings."""
LIKE_A_MARK = re.compile("train|learn|loss|mask|weight|ignore|exclude", re.IGNORECASE)
"""Names of a turn's fields that may say what is learnt in a way that is not read here."""


@dataclass(frozen=True, slots=True)
class Record:
    """One example as it was read: its fields, and where it stands ("reviews.jsonl line 7")."""

    fields: dict[str, Any]
    where: str

    @property
    def names(self) -> str:
        """The names of its fields, for an error's text."""
        return ", ".join(map(repr, self.fields)) or "none"

    def text(self, name: str) -> str:
        """Return the field ``name``, which must be there and be a string."""
        if name not in self.fields:
            raise ValueError(
                f"{self.where}: no field {name!r}; it has {self.names} (data.columns:"
                f" [{name}=COLUMN] takes it from one of these)"
            )
        value = self.fields[name]
        if not isinstance(value, str):
            raise ValueError(
                f"{self.where}: field {name!r} must be a string, not {type(value).__name__}"
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
    where: str = ""

    @staticmethod
    def asked(prompt: str, answers: Sequence[str], where: str) -> Question:
        """Return a question that is answered in a line of the model's own; the first answer is
        learnt, with the end of its line."""
        return Question(prompt, (f" {answers[0]}\n",), (0,), tuple(answers), where)

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
        """(literal, field) pairs up to the label."""
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
        return Question(self.prompt(record), words, (self.class_index(record),), where=record.where)

    def class_index(self, record: Record) -> int:
        """Return the class of a record, from a number or a label word."""
        if self.label_field not in record.fields:
            raise ValueError(
                f"{record.where}: no field {self.label_field!r}, which holds the class"
            )
        label = record.fields[self.label_field]
        if isinstance(label, str) and label in self.words:
            return self.words.index(label)
        if isinstance(label, str) and label.isdecimal():  # CSV has texts alone
            label = int(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.words):
            return label
        raise ValueError(
            f"{record.where}: field {self.label_field!r} is {label!r}; it must be one of"
            f" {list(self.words)} or a number from 0 to {len(self.words) - 1}"
        )


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
            f"{record.where}: fields 'chosen' and 'rejected' are a pair to prefer one of, and one"
            f" answer is learnt here; {settings} learns the chosen one"
        )
    matching = next((kind for kind, names in COLUMNS.items() if fields.keys() >= set(names)), None)
    if matching in (Format.MESSAGES, Format.SHAREGPT) and isinstance(fields.get("label"), bool):
        raise ValueError(
            f"{record.where}: field 'label' says whether an answer is wanted, and none is held back"
            f" here; data.format: {matching} learns every answer"
        )
    if matching is Format.TEXT and "label" in fields:
        raise ValueError(
            f"{record.where}: text with a label needs a template and label words (data.template,"
            " data.label_words), or data.format: text"
        )
    if matching is not None:
        return matching
    if any(fields.keys() >= set(pair) for pair in PAIRS):
        return Format.ALPACA
    partly = [kind for kind, names in COLUMNS.items() if fields.keys() & set(names)]
    if len(partly) == 1:
        return partly[0]  # whatever lacks of it is named where it is read
    expected = "; ".join(
        f"{', '.join(map(repr, names))} ({kind})" for kind, names in COLUMNS.items()
    )
    expected += "".join(
        f"; {question!r}, {answer!r} ({Format.ALPACA})" for question, answer in PAIRS
    )
    raise ValueError(
        f"{record.where}: expected the fields of a format: {expected}; found {record.names}."
        " data.columns names columns that hold them, as in [prompt=question, completion=answer]"
    )


def turns_of(record: Record, kind: Format) -> list[dict[str, Any]]:
    """Return the conversation of a record of any format of turns, as a chat template takes it.

    Raises:
        ValueError: no list of turns with a role and a text each, or none of the assistant.
    """
    if kind is Format.ALPACA:
        return _alpaca(record)
    turns: list[dict[str, Any]] = []
    for name in COLUMNS[kind]:
        listed = _listed(record, name)
        learnt = [
            _turn(turn, f"{record.where}: field {name!r}[{i}]") for i, turn in enumerate(listed)
        ]
        turns += learnt
    if not any(turn["role"] == "assistant" for turn in learnt):
        raise ValueError(
            f"{record.where}: field {name!r} has no assistant turn: there is nothing to learn"
        )
    return _with_system(record, turns)


def _listed(record: Record, name: str) -> list[Any]:
    """Return the turns that a field of a record lists, with the answer of a pair that is beside
    them.

    Raises:
        ValueError: no such field, or no list.
    """
    listed = record.fields.get(name)
    if name not in record.fields:
        record.text(name)  # refuses it, with the fields that are there
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{record.where}: field {name!r} must be a list of turns")
    chosen = record.fields.get("chosen")
    return (
        [*listed, chosen]
        if isinstance(chosen, dict) and name in ("messages", "conversations")
        else listed
    )


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
            f"{record.where}: field {listed[0]!r} is a list of turns, and {texts[0]!r} is none:"
            " give both as texts, or both as lists of turns with 'role' and 'content'"
        )
    return bool(listed)


def prompt_turns(record: Record, kind: Format, turns: Sequence[dict[str, Any]]) -> int:
    """Count a conversation's first turns that are a prompt, of which nothing is learnt."""
    return len(turns) - len(record.fields["completion"]) if kind is Format.COMPLETION else 0


def _turn(turn: Any, where: str) -> dict[str, Any]:
    """Return a turn with ``role`` and ``content``, or as ShareGPT names these, ``from`` and
    ``value``.

    The content becomes one text, and arguments of calls become objects, however the file holds
    them."""
    if isinstance(turn, dict) and "from" in turn and "role" not in turn:
        fields = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turn = {"role": turn["from"], "content": turn.get("value"), **fields}
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise ValueError(
            f"{where} must be an object with 'role' and 'content', or 'from' and 'value'"
        )
    content = _joined_text(turn.get("content"), where)
    calls = _read_text_as_json(turn.get("tool_calls"), f"{where}: 'tool_calls'")
    if turn["role"] == "function_call" and not calls:
        calls = [
            {
                "type": "function",
                "function": _read_text_as_json(content, f"{where}: a function_call"),
            }
        ]
        content = ""
    elif turn.get("function_call") and not calls:  # OpenAI's older name
        calls = [{"type": "function", "function": turn["function_call"]}]
    if content is None and not calls:
        raise ValueError(f"{where}: 'content' must be a string, not NoneType")
    is_learnt(turn, where)
    fields = {
        key: value for key, value in turn.items() if key not in ("tool_calls", "function_call")
    }
    normal = {**fields, "role": ROLES.get(turn["role"], turn["role"]), "content": content or ""}
    return {**normal, "tool_calls": _calls(calls, where)} if calls else normal


def _joined_text(content: Any, where: str) -> str | None:
    """Return a turn's content as one text: parts of the type ``text`` are joined; None stays
    None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: 'content' must be a string, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text" or not isinstance(text, str):
            raise ValueError(
                f"{where}: 'content'[{i}] is of the type {kind!r}; parts of the type 'text' with a"
                " 'text' are read, and no pictures or sounds"
            )
        if isinstance(part, dict) and not is_learnt(part, f"{where}: 'content'[{i}]"):
            raise ValueError(
                f"{where}: 'content'[{i}] is marked as not to be learnt; marks are read of whole"
                " turns alone"
            )
        texts.append(text)
    return "".join(texts)


def _read_text_as_json(value: Any, what: str) -> Any:
    """Return the value that JSON text holds; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON: {error}") from None


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return calls whose arguments are objects: JSON text is read, and null or no arguments are
    none."""
    normal = []
    for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
        place = f"{where}: 'tool_calls'[{i}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{place} must be an object with 'name' and 'arguments', or with these in"
                " 'function'"
            )
        arguments = _read_text_as_json(function.get("arguments") or {}, f"{place}: a call")
        if not isinstance(arguments or {}, dict):
            raise ValueError(
                f"{place}: 'arguments' must be an object, not {type(arguments).__name__}"
            )
        function = {**function, "arguments": arguments or {}}
        normal.append({**call, "function": function} if "function" in call else function)
    return normal


def is_marked(turn: dict[str, Any]) -> bool:
    """Return whether a turn has a mark that says yes, beside whatever its role says."""
    return is_learnt(turn, "") and any(turn.get(name) is not None for name in MARKS)


def is_learnt(turn: dict[str, Any], where: str) -> bool:
    """Return whether a turn's marks (:data:`MARKS`) let it be learnt.

    Raises:
        ValueError: a mark is neither yes nor no, such as a weight of one half, or is none that is
            read here.
    """
    unread = (
        name for name in turn if name not in MARKS and LIKE_A_MARK.search(name) and turn[name]
    )
    if name := next(unread, None):
        raise ValueError(
            f"{where}: {name!r} may say what is learnt of a turn, and is not read here; read are"
            f" {', '.join(MARKS)}"
        )
    for name, learnt in MARKS.items():
        value = turn.get(name)
        if value is None:
            continue
        said = value.strip().lower().removesuffix(".0") if isinstance(value, str) else value
        if said not in (True, False, "true", "false", "1", "0"):
            raise ValueError(
                f"{where}: {name!r} is {value!r}; a turn is learnt or it is not: give true or"
                " false, or 1 or 0"
            )
        if (said in (True, "true", "1")) != learnt:
            return False
    return True


def _alpaca(record: Record) -> list[dict[str, Any]]:
    """``history`` holds earlier pairs of instruction and output; ``input`` and ``system`` may be
    missing or empty."""
    turns: list[dict[str, Any]] = []
    history = record.fields.get("history") or []
    if not isinstance(history, list) or any(
        not isinstance(pair, list) or len(pair) != 2 for pair in history
    ):
        raise ValueError(
            f"{record.where}: field 'history' must be a list of [instruction, output] pairs"
        )
    for user, assistant in [
        *history,
        (alpaca_prompt(record), record.text(alpaca_columns(record)[1])),
    ]:
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return _with_system(record, turns)


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
        f"{record.where}: data.prompt is the text before an answer, and records of the format"
        f" {kind} have no column for one: leave data.prompt out, or give"
        f" {', '.join(map(repr, COLUMNS[Format.ALPACA]))} or"
        f" {', '.join(map(repr, COLUMNS[Format.COMPLETION]))} (data.columns)"
    )


def _with_system(record: Record, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = record.text("system") if record.fields.get("system") else ""
    if system and turns[0]["role"] == "system":
        if turns[0]["content"].strip() == system.strip():
            return turns
        raise ValueError(
            f"{record.where}: field 'system' stands beside a system turn that says something else:"
            " give one"
        )
    return [{"role": "system", "content": system}, *turns] if system else turns


def half_character(text: str) -> str:
    """Return the first lone surrogate of a text, half a character that no tokenizer reads; empty
    where there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""


def record_is_learnt(record: Record) -> bool:
    """Return whether a conversation's own marks (:data:`RECORD_MARKS`) let its turns be learnt.

    Raises:
        ValueError: a mark is neither yes nor no.
    """
    marks = {name: record.fields.get(name) for name in RECORD_MARKS}
    return is_learnt(marks, record.where)


def template_options(record: Record) -> dict[str, Any]:
    """Read the variables of a chat template beside the turns: ``tools``, and those of the field
    ``chat_template_kwargs``.

    Raises:
        ValueError: the variables are no object.
    """
    name = "chat_template_kwargs"
    variables = _read_text_as_json(record.fields.get(name) or {}, f"{record.where}: field {name!r}")
    if not isinstance(variables, dict) or "tools" in variables:
        raise ValueError(
            f"{record.where}: field {name!r} must be an object of variables, without 'tools'"
        )
    return {**variables, "tools": tools_of(record)}


def tools_of(record: Record) -> Any:
    """Return the tools that a conversation may call, for the chat template: a list, or JSON text of
    one; None without.

    Functions under OpenAI's older name ``functions`` become tools.
    """
    tools = record.fields.get("tools") or None
    functions = record.fields.get("functions")
    if (
        not tools
        and isinstance(functions, list)
        and all(isinstance(function, dict) for function in functions)
    ):
        return [{"type": "function", "function": function} for function in functions] or None
    try:
        listed = json.loads(tools) if isinstance(tools, str) else tools
        if not isinstance(listed, list):
            return listed or None
        return [json.loads(tool) if isinstance(tool, str) else tool for tool in listed] or None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{record.where}: field 'tools' must be a list, or JSON text of one: {error}"
        ) from None

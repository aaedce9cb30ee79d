"""Conversations of any format as turns with a role and a content, and which of them are learnt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from blockwalk.data.formats import COLUMNS, Format, alpaca_columns, alpaca_prompt, system_text
from blockwalk.data.records import Record

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
            turn_of(turn, f"{record.place}: field {name!r}[{i}]") for i, turn in enumerate(listed)
        ]
        turns += learnt
    if not any(turn["role"] == "assistant" for turn in learnt):
        raise ValueError(
            f"{record.place}: field {name!r} has no assistant turn: there is nothing to learn"
        )
    return with_system(record, turns)


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
        raise ValueError(f"{record.place}: field {name!r} must be a list of turns")
    chosen = record.fields.get("chosen")
    return (
        [*listed, chosen]
        if isinstance(chosen, dict) and name in ("messages", "conversations")
        else listed
    )


def prompt_turns(record: Record, kind: Format, turns: Sequence[dict[str, Any]]) -> int:
    """Count a conversation's first turns that are a prompt, of which nothing is learnt."""
    return len(turns) - len(record.fields["completion"]) if kind is Format.COMPLETION else 0


def turn_of(turn: Any, place: str) -> dict[str, Any]:
    """Return a turn with ``role`` and ``content``, or as ShareGPT names these, ``from`` and
    ``value``.

    The content becomes one text, and arguments of calls become objects, however the file holds
    them."""
    if isinstance(turn, dict) and "from" in turn and "role" not in turn:
        fields = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turn = {"role": turn["from"], "content": turn.get("value"), **fields}
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise ValueError(
            f"{place} must be an object with 'role' and 'content', or 'from' and 'value'"
        )
    content = _joined_text(turn.get("content"), place)
    calls = _read_text_as_json(turn.get("tool_calls"), f"{place}: 'tool_calls'")
    if turn["role"] == "function_call" and not calls:
        calls = [
            {
                "type": "function",
                "function": _read_text_as_json(content, f"{place}: a function_call"),
            }
        ]
        content = ""
    elif turn.get("function_call") and not calls:  # OpenAI's older name
        calls = [{"type": "function", "function": turn["function_call"]}]
    if content is None and not calls:
        raise ValueError(f"{place}: 'content' must be a string, not NoneType")
    is_learnt(turn, place)
    fields = {
        key: value for key, value in turn.items() if key not in ("tool_calls", "function_call")
    }
    normal = {**fields, "role": ROLES.get(turn["role"], turn["role"]), "content": content or ""}
    return {**normal, "tool_calls": _calls(calls, place)} if calls else normal


def _joined_text(content: Any, place: str) -> str | None:
    """Return a turn's content as one text: parts of the type ``text`` are joined; None stays
    None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place}: 'content' must be a string, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text" or not isinstance(text, str):
            raise ValueError(
                f"{place}: 'content'[{i}] is of the type {kind!r}; parts of the type 'text' with a"
                " 'text' are read, and no pictures or sounds"
            )
        if isinstance(part, dict) and not is_learnt(part, f"{place}: 'content'[{i}]"):
            raise ValueError(
                f"{place}: 'content'[{i}] is marked as not to be learnt; marks are read of whole"
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


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return calls whose arguments are objects: JSON text is read, and null or no arguments are
    none."""
    normal = []
    for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
        call_place = f"{place}: 'tool_calls'[{i}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{call_place} must be an object with 'name' and 'arguments', or with these in"
                " 'function'"
            )
        arguments = _read_text_as_json(function.get("arguments") or {}, f"{call_place}: a call")
        if not isinstance(arguments or {}, dict):
            raise ValueError(
                f"{call_place}: 'arguments' must be an object, not {type(arguments).__name__}"
            )
        function = {**function, "arguments": arguments or {}}
        normal.append({**call, "function": function} if "function" in call else function)
    return normal


def is_marked(turn: dict[str, Any]) -> bool:
    """Return whether a turn has a mark that says yes, beside whatever its role says."""
    return is_learnt(turn, "") and any(turn.get(name) is not None for name in MARKS)


def is_learnt(turn: dict[str, Any], place: str) -> bool:
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
            f"{place}: {name!r} may say what is learnt of a turn, and is not read here; read are"
            f" {', '.join(MARKS)}"
        )
    for name, learnt in MARKS.items():
        value = turn.get(name)
        if value is None:
            continue
        said = value.strip().lower().removesuffix(".0") if isinstance(value, str) else value
        if said not in (True, False, "true", "false", "1", "0"):
            raise ValueError(
                f"{place}: {name!r} is {value!r}; a turn is learnt or it is not: give true or"
                " false, or 1 or 0"
            )
        if (said in (True, "true", "1")) != learnt:
            return False
    return True


def record_is_learnt(record: Record) -> bool:
    """Return whether a conversation's own marks (:data:`RECORD_MARKS`) let its turns be learnt.

    Raises:
        ValueError: a mark is neither yes nor no.
    """
    marks = {name: record.fields.get(name) for name in RECORD_MARKS}
    return is_learnt(marks, record.place)


def _alpaca(record: Record) -> list[dict[str, Any]]:
    """Return an instruction and its output as turns; ``history`` holds earlier pairs of instruction
    and output; ``input`` and ``system`` may be missing or empty."""
    turns = history_of(record)
    turns.append({"role": "user", "content": alpaca_prompt(record)})
    answer = record.text(alpaca_columns(record)[1])
    turns.append({"role": "assistant", "content": answer})
    return with_system(record, turns)


def history_of(record: Record) -> list[dict[str, Any]]:
    """Return the turns before an instruction: those of the field ``history``, pairs of instruction
    and output.

    Raises:
        ValueError: the field is no list of pairs.
    """
    turns: list[dict[str, Any]] = []
    history = record.fields.get("history") or []
    if not isinstance(history, list) or any(
        not isinstance(pair, list) or len(pair) != 2 for pair in history
    ):
        raise ValueError(
            f"{record.place}: field 'history' must be a list of [instruction, output] pairs"
        )
    for user, assistant in history:
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return turns


def with_system(record: Record, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation below the text that its record has before it.

    Raises:
        ValueError: the conversation begins with another one.
    """
    system = system_text(record)
    if system and turns[0]["role"] == "system":
        if turns[0]["content"].strip() == system.strip():
            return turns
        raise ValueError(
            f"{record.place}: field 'system' stands beside a system turn that says something else:"
            " give one"
        )
    return [{"role": "system", "content": system}, *turns] if system else turns


def template_options(record: Record) -> dict[str, Any]:
    """Read the variables of a chat template beside the turns: ``tools``, and those of the field
    ``chat_template_kwargs``.

    Raises:
        ValueError: the variables are no object.
    """
    name = "chat_template_kwargs"
    variables = _read_text_as_json(record.fields.get(name) or {}, f"{record.place}: field {name!r}")
    if not isinstance(variables, dict) or "tools" in variables:
        raise ValueError(
            f"{record.place}: field {name!r} must be an object of variables, without 'tools'"
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
            f"{record.place}: field 'tools' must be a list, or JSON text of one: {error}"
        ) from None

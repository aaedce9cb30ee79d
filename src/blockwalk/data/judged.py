"""Records of judged answers as texts: a prompt, the prompt with each answer, and the numbers that
say what an answer is worth; nothing here knows of tokens.

format       prompt                                   answers
preference   prompt, or what both answers begin with; chosen, rejected: texts, turns, or a turn
             messages or conversations;
             instruction or question (input, history)
unpaired     as below                                 wanted or not: label, or kto_tag
scored       prompt; all turns but the last of        completion; the last turn of messages or
             messages or conversations; instruction   conversations; output
             or question

Texts are written as they stand, turns through the chat template. A text beside turns becomes a
turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from blockwalk.data.chat_template import chat_bounds
from blockwalk.data.conversation import Turn, render_answers
from blockwalk.data.formats import (
    LABELS,
    PAIRS,
    Format,
    alpaca_columns,
    alpaca_prompt,
    missing_judgement,
    system_text,
)
from blockwalk.data.records import Record
from blockwalk.data.render import below, filled_prompt, needs_template
from blockwalk.data.rendered import Tokenizer
from blockwalk.data.turns import history_of, turn_of, with_system

Texts = str | list[Turn]
"""A prompt or an answer: one text, or turns."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One record: a prompt, and the prompt with each answer, as texts."""

    prompt: str
    """The text before an answer, as far as the answer begins."""
    texts: tuple[str, ...]
    """The prompt with each answer: the chosen one first."""
    place: str
    framed: bool = True
    """True where the tokenizer's tokens around a text are added; a chat template writes its own."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the record, each with its name."""
    token_numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers of the answer's tokens, by name."""
    unwritten: tuple[str, ...] = ()
    """Roles of turns whose content the chat template dropped."""


class _Parts(NamedTuple):
    """A record's prompt and its answers, each with the name of its column."""

    prompt: Texts
    answers: dict[str, Texts]


def judged(
    record: Record,
    kind: Format,
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    prompts: Sequence[str] = (),
) -> Judged:
    """Return the texts and numbers of a record of a judged format.

    Args:
        stops: texts of the tokens that generation stops at.
        prompts: texts with columns in braces (``data.prompt``), of which one is the prompt.

    Raises:
        ValueError: it lacks what its format needs, or its judgement says nothing: answers are equal
            or empty, prompts differ, or a number is not finite.
    """
    if lacks := missing_judgement(record, kind):
        raise ValueError(lacks)
    parts = _PARTS[kind](record)
    if prompts:
        prompt: Texts = filled_prompt(prompts, record, parts.answers)
        parts = _Parts(prompt, {name: record.text(name) for name in parts.answers})
    elif not isinstance(parts.prompt, str) and not getattr(tokenizer, "chat_template", None):
        parts = _without_template(record, kind, parts)
    _require_answers(record, kind, parts)
    result = _written(record, parts, tokenizer)
    _require_unlike(record, result.texts, parts.answers)
    numbers, token_numbers = _NUMBERS[kind](record)
    if kind is Format.SCORED and not result.framed:
        # another program's answer ends with its last token, and no line end follows
        result = replace(result, texts=tuple(_until_stop(text, stops) for text in result.texts))
    return replace(result, numbers=numbers, token_numbers=token_numbers)


def _written(record: Record, parts: _Parts, tokenizer: Tokenizer) -> Judged:
    """Return a record's texts without its numbers."""
    if isinstance(parts.prompt, str):
        texts = tuple(parts.prompt + str(answer) for answer in parts.answers.values())
        return Judged(parts.prompt, texts, record.place)
    answers = [answer for answer in parts.answers.values() if not isinstance(answer, str)]
    with chat_bounds(tokenizer, record.fields):
        written = render_answers(record, parts.prompt, answers, tokenizer)
    return Judged(
        written.prompt,
        written.texts,
        record.place,
        framed=False,
        unwritten=written.unwritten,
    )


def _until_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text without the blanks behind the token that ends it."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(tuple(stops)) else text


def _preference(record: Record) -> _Parts:
    """Return the prompt and both answers of a pair."""
    answers = {name: _answer(record, name) for name in ("chosen", "rejected")}
    _require_unlike(record, list(answers.values()), answers)
    prompt = _prompt(record)
    if prompt is None:
        return _common(record, answers)
    if not isinstance(prompt, str) or not all(map(_begins_with_prompt, answers.values())):
        return _alike(record, prompt, answers)
    # whole conversations, beside the text of their first turn
    parts = _common(record, answers)
    contents = [turn["content"].strip() for turn in parts.prompt if not isinstance(turn, str)]
    if prompt.strip() not in contents:
        raise ValueError(
            f"{record.place}: the prompts differ: field 'prompt' is no turn that 'chosen' and"
            " 'rejected' both begin with"
        )
    return parts


def _begins_with_prompt(answer: Texts) -> bool:
    """Return whether an answer is a conversation that begins with its prompt."""
    return not isinstance(answer, str) and answer[0]["role"] in ("system", "user")


def _require_unlike(record: Record, answers: Sequence[Any], names: Iterable[str]) -> None:
    """Raise ValueError where two answers are the same."""
    if any(answer == answers[0] for answer in answers[1:]):
        raise ValueError(
            f"{record.place}: fields {' and '.join(map(repr, names))} are the same answer, and none"
            " of them is better: leave the record out"
        )


def _single(record: Record) -> _Parts:
    """Return the prompt and the answer of a record with one answer."""
    for name in ("messages", "conversations"):
        if name in record.fields:
            turns = _turns(record, name)
            return _alike(record, turns[:-1], {name: turns[-1:]})
    prompt = _prompt(record)
    if prompt is None:
        return _Parts(record.text("prompt"), {})  # refused, with the fields that are there
    plain = record.fields.keys() & {"prompt", "completion"}
    name = "completion" if plain else alpaca_columns(record)[1]
    return _alike(record, prompt, {name: _answer(record, name)})


def _answer(record: Record, name: str) -> Texts:
    """Return an answer: its text, or its turns."""
    value = record.fields.get(name)
    return _turns(record, name) if isinstance(value, list | dict) else record.text(name)


def _turns(record: Record, name: str) -> list[Turn]:
    """Return the turns of a column: a list of them, or one.

    Raises:
        ValueError: it holds none.
    """
    value = record.fields[name]
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{record.place}: field {name!r} must be a list of turns")
    return [turn_of(turn, f"{record.place}: field {name!r}[{i}]") for i, turn in enumerate(listed)]


def _prompt(record: Record) -> Texts | None:
    """Return the prompt of a record, whatever its column is called; None where it has none."""
    fields = record.fields
    for name in ("messages", "conversations"):
        if name in fields:
            return _turns(record, name)
    if "prompt" in fields:
        return _answer(record, "prompt")
    questions = ("instruction", *(question for question, _ in PAIRS))
    if question := next((name for name in questions if name in fields), ""):
        turn = {"role": "user", "content": alpaca_prompt(record, question)}
        return [*history_of(record), turn]
    return None


def _common(record: Record, answers: dict[str, Texts]) -> _Parts:
    """Return the parts of a pair whose answers begin with their prompt: what both begin with, as
    TRL takes it. One answer at least keeps a character, or a turn, where it begins the other."""
    chosen, rejected = answers.values()
    if isinstance(chosen, str) != isinstance(rejected, str):
        chosen = _as_turns(chosen, "assistant")
        rejected = _as_turns(rejected, "assistant")
    shortest = min(len(chosen), len(rejected))
    length = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest - 1)
    if length > 0 and chosen[length - 1] == " ":
        length -= 1  # a blank belongs to the answer's first token
    prompt = chosen[:length]
    if not prompt:
        raise ValueError(
            f"{record.place}: the prompts of 'chosen' and 'rejected' differ from their beginning"
            " on: give what both answer as 'prompt'"
        )
    return _alike(record, prompt, {"chosen": chosen[length:], "rejected": rejected[length:]})


def _alike(record: Record, prompt: Texts, answers: dict[str, Texts]) -> _Parts:
    """Return parts of one kind: turns where any of them is turns, else texts."""
    system = system_text(record)
    if all(isinstance(part, str) for part in (prompt, *answers.values())):
        return _Parts(below(system, str(prompt)), answers)
    turns = _as_turns(prompt, "user")
    return _Parts(
        with_system(record, turns) if turns else turns,
        {name: _as_turns(answer, "assistant") for name, answer in answers.items()},
    )


def _as_turns(part: Texts, role: str) -> list[Turn]:
    return [{"role": role, "content": part}] if isinstance(part, str) else part


def _without_template(record: Record, kind: Format, parts: _Parts) -> _Parts:
    """Return the parts of an instruction as texts, for a tokenizer without a chat template.

    Raises:
        ValueError: they are turns of a conversation.
    """
    names = ("messages", "conversations", "prompt", "history", *parts.answers)
    if any(record.fields.get(name) and not isinstance(record.fields[name], str) for name in names):
        raise needs_template(record, kind)
    instruction = parts.prompt if isinstance(parts.prompt, str) else parts.prompt[-1]["content"]
    prompt = below(system_text(record), instruction) + "\n"
    return _Parts(prompt, {name: record.text(name) for name in parts.answers})


def _require_answers(record: Record, kind: Format, parts: _Parts) -> None:
    """Raise ValueError where an answer is empty, or none to the prompt."""
    if not parts.prompt:
        raise ValueError(f"{record.place}: there is no prompt before the answer: give 'prompt'")
    for name, answer in parts.answers.items():
        if not isinstance(answer, str):
            if answer[0]["role"] != "assistant":
                pair = "the prompts of 'chosen' and 'rejected' differ: " * (len(parts.answers) > 1)
                raise ValueError(
                    f"{record.place}: {pair}field {name!r} has a turn of the {answer[0]['role']}"
                    " where the answer begins: an answer is the assistant's"
                )
            empty = not any(turn["content"].strip() or turn.get("tool_calls") for turn in answer)
        else:
            empty = not answer.strip()
        if empty and kind is not Format.SCORED:
            raise ValueError(
                f"{record.place}: the answer in field {name!r} is empty: leave the record out"
            )


def _no_numbers(_: Record) -> tuple[dict[str, float], dict[str, list[float]]]:
    return {}, {}


def _desirable(record: Record) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return whether an answer is wanted, as a number.

    Raises:
        ValueError: its label is neither yes nor no.
    """
    name = next(name for name in LABELS if name in record.fields)
    label = record.fields[name]
    said = label.strip().lower() if isinstance(label, str) else label
    words = {True: 1.0, False: 0.0, "true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}
    if not isinstance(said, bool | int | str) or said not in words:
        raise ValueError(
            f"{record.place}: field {name!r} is {label!r}; it says whether the answer is wanted:"
            " true or false"
        )
    return {"desirable": words[said]}, {}


def _score(record: Record) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the advantage of an answer, and what else its record has.

    Raises:
        ValueError: one of them is no finite number.
    """
    numbers = {"advantages": _number(record, "advantage", record.fields["advantage"])}
    if record.fields.get("group") is not None:
        numbers["group"] = _number(record, "group", record.fields["group"])
        if numbers["group"] != int(numbers["group"]):
            raise ValueError(
                f"{record.place}: field 'group' is {numbers['group']}; a group has a whole number"
            )
    listed = record.fields.get("old_log_probabilities")
    if listed is None:
        return numbers, {}
    if not isinstance(listed, list):
        raise ValueError(
            f"{record.place}: field 'old_log_probabilities' must be a list of numbers, one a token"
            " of the answer"
        )
    return numbers, {
        "old_log_probabilities": [
            _number(record, f"old_log_probabilities[{i}]", value) for i, value in enumerate(listed)
        ]
    }


def _number(record: Record, name: str, value: Any) -> float:
    """Return a number of a record.

    Raises:
        ValueError: it is none, or not finite.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{record.place}: field {name!r} is {value!r}; it must be a finite number")
    return number


_PARTS: dict[Format, Callable[[Record], _Parts]] = {
    Format.PREFERENCE: _preference,
    Format.UNPAIRED: _single,
    Format.SCORED: _single,
}
"""The functions that take a record of a judged format apart."""

_NUMBERS: dict[Format, Callable[[Record], tuple[dict[str, float], dict[str, list[float]]]]] = {
    Format.PREFERENCE: _no_numbers,
    Format.UNPAIRED: _desirable,
    Format.SCORED: _score,
}
"""The functions that read the numbers of a record of a judged format."""

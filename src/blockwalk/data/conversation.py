"""A conversation as the chat template writes it, and which of its characters each turn teaches."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockwalk.data.chat_template import render_chat, reserved
from blockwalk.data.formats import Format
from blockwalk.data.records import Record
from blockwalk.data.rendered import Rendered, Tokenizer
from blockwalk.data.turns import (
    MARKS,
    ROLES,
    is_learnt,
    is_marked,
    prompt_turns,
    record_is_learnt,
    template_options,
    turns_of,
)

Turn = dict[str, Any]
"""A turn with ``role`` and ``content``, as templates take it."""


def render_turns(
    record: Record, kind: Format, tokenizer: Tokenizer, stops: Sequence[str]
) -> Rendered:
    """Return the conversation as the chat template writes it; an assistant turn is what its own
    text adds to the turns before.

    A template may write a turn differently once others follow (Qwen3 drops earlier reasoning). Such
    a turn is left out of the loss and counted, since the model would never be asked to write it
    that way. So is one that opens the conversation, since what the model would be given before it
    cannot be known. Reasoning that the template drops from a turn is not learnt."""
    turns = turns_of(record, kind)
    options = _options(record, tokenizer)
    messages = _as_the_template_takes(turns, options, tokenizer, record.place)

    def write(messages: Sequence[Turn], *, ask: bool = False) -> str:
        return _written(list(messages), options, tokenizer, record.place, ask=ask)

    conversation = _Conversation(messages, write, stops, tokenizer.get_added_vocab())
    prompt_count = prompt_turns(record, kind, turns)
    learns_record = record_is_learnt(record)
    spans: list[tuple[int, int]] = []
    dropped: list[Turn] = []
    roles_without_reasoning: list[str] = []
    left_out = 0
    marked = 0
    of_other_roles = 0
    for i, turn in enumerate(turns):
        if messages[i]["role"] != "assistant":
            of_other_roles += is_marked(turn)
        elif i < prompt_count:
            continue
        elif not learns_record or not is_learnt(turn, record.place):
            marked += 1
        elif conversation.drops_calls(i):
            dropped.append(turn)
            left_out += 1
        elif span := conversation.learnt_span(i, turn):
            spans.append(span)
            if _reasoning(turn) not in conversation.text[slice(*span)]:
                roles_without_reasoning.append("assistant")
        else:
            left_out += 1
    missing = [turn for turn in _unwritten(turns, conversation.text) if turn not in dropped]
    return Rendered(
        conversation.text,
        spans,
        record.place,
        begin=False,
        end=False,
        turns_left_out=left_out,
        turns_marked=marked,
        turns_of_others=of_other_roles,
        unwritten=(*(turn["role"] for turn in (*missing, *dropped)), *roles_without_reasoning),
    )


@dataclass(frozen=True, slots=True)
class WrittenAnswers:
    """A prompt and each answer to it, as the chat template writes them."""

    prompt: str
    """The prompt, as far as the assistant's turn."""
    texts: tuple[str, ...]
    """The prompt with each answer, whole conversations."""
    unwritten: tuple[str, ...]
    """Roles of turns whose content is not in a text: the template dropped it."""


def render_answers(
    record: Record, prompt: list[Turn], answers: Sequence[list[Turn]], tokenizer: Tokenizer
) -> WrittenAnswers:
    """Return a prompt and each answer to it as the chat template writes them; turns as
    :func:`blockwalk.data.turns.turn_of` gives them.

    Raises:
        ValueError: the template refuses the conversation.
    """
    options = _options(record, tokenizer)
    texts: list[str] = []
    unwritten: list[str] = []
    written_prompt = ""
    for answer in answers:
        turns = [*prompt, *answer]
        messages = _as_the_template_takes(turns, options, tokenizer, record.place)
        text = _written(messages, options, tokenizer, record.place, ask=False)
        unwritten += [turn["role"] for turn in _unwritten(turns, text)]
        texts.append(text)
        if not written_prompt:
            prompt_messages = messages[: len(prompt)]
            written_prompt = _written(prompt_messages, options, tokenizer, record.place, ask=True)
    return WrittenAnswers(written_prompt, tuple(texts), tuple(unwritten))


def _options(record: Record, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the variables of the chat template that a record sets.

    Raises:
        ValueError: one of them is the template's own.
    """
    options = template_options(record)
    if name := next((name for name in options if name in reserved(tokenizer)), None):
        raise ValueError(f"{record.place}: field 'chat_template_kwargs' may not set {name!r}")
    return options


@dataclass(slots=True)
class _Conversation:
    """The text of a conversation, and the ways to write it as far as each of its turns."""

    messages: list[Turn]
    """Turns in the shape that the template takes."""
    write: Callable[..., str]
    """The template's text of some messages; with ``ask`` as far as the assistant's next turn."""
    stops: Sequence[str]
    """Texts of the tokens that generation stops at."""
    added_tokens: Collection[str]
    """Texts of the tokenizer's added tokens, which are learnt whole or not at all."""
    text: str = field(init=False)
    head: str = field(init=False)
    """The text before the first turn's content, in which turns are opened and none is ended."""
    header: str = field(init=False, default="")
    """Text by which the template asks for an assistant's turn."""

    def __post_init__(self) -> None:
        self.text = self.write(self.messages)
        self.head = self.text[: self.text.find(_text_of(self.messages[0]).strip())]

    def drops_calls(self, index: int) -> bool:
        """Return whether the template writes the same conversation where turn ``index`` has no
        calls."""
        if "tool_calls" not in self.messages[index]:
            return False
        shown = list(self.messages)
        shown[index] = {name: value for name, value in shown[index].items() if name != "tool_calls"}
        try:
            return self.write(shown) == self.text
        except ValueError:
            return False

    def learnt_span(self, index: int, turn: Turn) -> tuple[int, int] | None:
        """Return begin and end of the characters that an assistant's turn teaches; None where the
        model would never be asked to write the turn so.

        Where the generation prompt opens a reasoning section that the template does not write into
        a turn (DeepSeek-R1), the turn begins where the two part."""
        is_last = index + 1 == len(self.messages)
        preceding = self.messages[:index]
        prompt = self.write(preceding, ask=True) if index else ""
        start = _common_prefix(prompt, self.text)
        follows = start == len(prompt) or start >= _common_prefix(prompt, self.write(preceding))
        if index and not self.header and not is_last:
            self.header = prompt[_common_prefix(prompt, self.write(preceding)) :]
        # after a tool's turn, a prompt may come without it
        if self.header and self.text.startswith(self.header, start):
            start += len(self.header)
        text_so_far = self.text if is_last else self.write(self.messages[: index + 1])
        same = _common_prefix(text_so_far, self.text)
        texts = _texts_to_learn(turn, text_so_far[start:])
        content_ends = (self.text.rfind(text, start, same) + len(text) for text in texts if text)
        stop = self._end_of_turn(index, max([start, *content_ends]), same)
        if not index or not follows or any(text not in self.text[start:stop] for text in texts):
            return None
        return start, len(self.text[:stop].rstrip())

    def _end_of_turn(self, index: int, content_end: int, same: int) -> int:
        """Return the position behind the last character that a turn teaches.

        Generation stops at the first of ``stops`` behind the turn's content: it is learnt, even
        where it opens the next turn (GLM-4), and nothing behind it is. Where none follows, the turn
        ends before what the next turn writes of itself.

        Args:
            index: the turn's.
            content_end: the position behind the turn's answer and calls.
            same: the position up to which the text is the same without the turns that follow.
        """
        positions = ((self.text.find(stop, content_end), stop) for stop in self.stops)
        stop_spans = ((begin, begin + len(stop)) for begin, stop in positions if begin >= 0)
        stop_begin, stop_end = min(stop_spans, default=(-1, -1))
        if stop_begin >= 0 and not self.text[same:stop_begin].strip():
            return stop_end
        if index + 1 == len(self.messages):
            return same
        begin_of_token, end_of_token = _token_at(self.text, same, self.added_tokens)
        opening = self._opening_of_next(index)
        begin = (
            self.text.rfind(opening, content_end, end_of_token + len(opening)) if opening else -1
        )
        if begin >= 0:
            return min(begin, end_of_token)
        opens = self.text[begin_of_token:end_of_token] in self.head
        return begin_of_token if opens else end_of_token

    def _opening_of_next(self, index: int) -> str:
        """Return the text with which the turn behind ``index`` opens, before its content: what it
        adds where it stands twice.

        Empty where the template refuses the same turn twice, or does not write its content as it
        is."""
        once = self.messages[: index + 2]
        content = _text_of(once[-1]).strip()
        try:
            twice = self.write([*once, once[-1]])
        except ValueError:
            return ""
        begin, _ = _token_at(twice, _common_prefix(self.write(once), twice), self.added_tokens)
        stop = twice.find(content, begin) if content else -1
        return twice[begin:stop] if stop >= 0 else ""


def _reasoning(turn: Turn) -> str:
    """Return the reasoning of a turn, in a field of its own or before the end of a section
    ``<think>``; empty without."""
    named = (turn.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    field = next((text for text in named if isinstance(text, str)), "")
    return (
        field.strip() or turn["content"].rpartition("</think>")[0].rpartition("<think>")[2].strip()
    )


def _text_of(message: Turn) -> str:
    """Return a message's content as text, which its template may take as a list of one part."""
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]


def _texts_to_learn(turn: Turn, text: str) -> list[str]:
    """Return the texts that an assistant's turn must hold to be learnt: its answer, and the names
    of its calls as far as ``text`` has them."""
    names = [call.get("function", call)["name"] for call in turn.get("tool_calls", ())]
    return [
        turn["content"].rpartition("</think>")[2].strip(),
        *(name for name in names if name in text),
    ]


def _written(
    messages: list[Turn],
    options: Turn,
    tokenizer: Tokenizer,
    place: str,
    *,
    ask: bool,
) -> str:
    """Return the text that the chat template makes of turns; with ``ask`` as far as the assistant's
    next turn."""
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=ask, **options)
    except Exception as error:
        raise ValueError(f"{place}: the chat template refused the conversation: {error}") from error


KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")


def _as_the_template_takes(
    turns: list[Turn], options: Turn, tokenizer: Tokenizer, place: str
) -> list[Turn]:
    """Return the turns in the first shape of which the template writes everything, else in the
    first that it takes.

    Some templates want content as a list of parts, and some the arguments of a call as JSON text.

    Raises:
        ValueError: a role that neither the field nor the template knows, or no shape that the
            template takes.
    """
    template = str(tokenizer.chat_template)
    roles = dict.fromkeys(turn["role"] for turn in turns if turn["role"] not in KNOWN_ROLES)
    unknown = [role for role in roles if not re.search(rf"""['"]{re.escape(role)}['"]""", template)]
    if unknown:
        named = f"a turn has the role {unknown[0]!r}"
        if unknown[1:]:
            named = f"turns have the roles {', '.join(map(repr, unknown))}"
        raise ValueError(
            f"{place}: {named}, which the chat template does not know; known are"
            f" {', '.join(KNOWN_ROLES)}, and by other data sets' names {', '.join(ROLES)}"
        )
    accepted: list[Turn] | None = None
    refusal: ValueError | None = None
    for messages in _shapes(turns):
        try:
            text = _written(messages, options, tokenizer, place, ask=False)
        except ValueError as error:
            refusal = refusal or error
            continue
        if not _unwritten(turns, text) and not _written_as_python(messages, text):
            return messages
        accepted = accepted or messages
    if accepted is None:
        assert refusal is not None
        raise refusal
    return accepted


def _shapes(turns: list[Turn]) -> Iterator[list[Turn]]:
    """Yield the conversation without its marks: content as text or in parts, arguments of calls as
    objects or as JSON text."""
    plain = [{name: value for name, value in turn.items() if name not in MARKS} for turn in turns]
    called = any("tool_calls" in turn for turn in plain)
    for in_parts, as_text in itertools.product(
        (False, True), (False, True) if called else (False,)
    ):
        shaped = []
        for turn in plain:
            content = [{"type": "text", "text": turn["content"]}] if in_parts else turn["content"]
            calls = [
                _with_text_arguments(call) if as_text else call
                for call in turn.get("tool_calls", ())
            ]
            shaped.append({**turn, "content": content, **({"tool_calls": calls} if calls else {})})
        yield shaped


def _with_text_arguments(call: Turn) -> Turn:
    function = call.get("function", call)
    function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": function} if "function" in call else function


def _written_as_python(messages: list[Turn], text: str) -> bool:
    """Return whether the template wrote a list of parts, or a call's arguments, as Python does: it
    wants them as text."""
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    if any(str(parts) in text for parts in lists):
        return True
    calls = [
        call.get("function", call) for message in messages for call in message.get("tool_calls", ())
    ]
    values = [call["arguments"] for call in calls if call["arguments"]]
    return any(str(value) in text for value in values if isinstance(value, dict))


def _unwritten(turns: list[Turn], text: str) -> list[Turn]:
    """Return the turns whose content is not in the text, as it stands or as JSON writes it;
    reasoning is not looked for."""
    missing = []
    for turn in turns:
        content = turn["content"].rpartition("</think>")[2].strip()
        escaped = (json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        if (
            content not in text
            and not any(part in text for part in escaped)
            and not _same_json(content, text)
        ):
            missing.append(turn)
    return missing


def _same_json(content: str, text: str) -> bool:
    """Return whether a content that is JSON stands in the text in another spacing: templates write
    results of tools anew."""
    squeezed = re.sub(r"\s", "", content)
    return content[:1] in ("{", "[") and squeezed in re.sub(r"\s", "", text)


def _token_at(text: str, position: int, added: Collection[str]) -> tuple[int, int]:
    """Return the begin and end of the added token that a position cuts; the position twice where it
    cuts none."""
    for token in added:
        begin = text.find(token, max(0, position - len(token) + 1), position + len(token) - 1)
        if 0 <= begin < position < begin + len(token):
            return begin, begin + len(token)
    return position, position


def _common_prefix(a: str, b: str) -> int:
    """Return length of the longest common beginning."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)

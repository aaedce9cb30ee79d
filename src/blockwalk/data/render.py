"""A record as one text, and which of its characters are learnt; nothing here knows of tokens.

format            begin, end added   learnt                              too long
messages          by the template    each assistant turn with its end    cut on the right
sharegpt, alpaca  as messages; an alpaca record without history is a completion where there is no template
completion        yes, yes           the completion and the end          prompt cut on the left, then right
classification    yes, no            the label word                      prompt cut on the left
text              yes, yes           all of it                           cut on the right
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blockwalk.data.chat_template import chat_bounds, render_chat
from blockwalk.data.formats import (
    MARKS,
    Format,
    Record,
    alpaca_prompt,
    is_learnt,
    record_is_learnt,
    template_options,
    turns_of,
)

Tokenizer = Any
"""A fast tokenizer of transformers (``PreTrainedTokenizerFast``); named so that importing this stays light."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A record as text. ``spans`` are the learnt characters, ``prompt_end`` those that may be cut on the left."""

    text: str
    spans: list[tuple[int, int]]
    where: str
    prompt_end: int = 0
    begin: bool = True
    end: bool = True
    turns_left_out: int = 0
    turns_marked: int = 0
    """Assistant turns that the record marks as not to be learnt."""
    unwritten: tuple[str, ...] = ()
    """Roles of turns whose content, or learnt turns whose reasoning, is not in the text: the template dropped it."""


def render(record: Record, kind: Format, tokenizer: Tokenizer) -> Rendered:
    """A record of any format but classification, of which the template says what it becomes.

    Raises:
        ValueError: it lacks what its format needs, or needs a chat template that the tokenizer has not.
    """
    if kind is Format.TEXT:
        return render_pair("", record.text("text"), record.where)
    if kind is Format.COMPLETION:
        return render_pair(record.text("prompt"), record.text("completion"), record.where)
    if not getattr(tokenizer, "chat_template", None):
        if kind is Format.ALPACA:
            return render_pair(alpaca_prompt(record) + "\n", record.text("output"), record.where)
        raise ValueError(
            f"{record.where}: format {kind} needs a chat template, and the tokenizer has none: give records with"
            " 'prompt' and 'completion', or 'text', instead"
        )
    with chat_bounds(tokenizer, record.fields):
        return _render_turns(record, kind, tokenizer)


def render_pair(prompt: str, completion: str, where: str, *, end: bool = True) -> Rendered:
    """A prompt with what is learnt after it."""
    text = prompt + completion
    return Rendered(text, [(len(prompt), len(text))] if completion else [], where, prompt_end=len(prompt), end=end)


def _render_turns(record: Record, kind: Format, tokenizer: Tokenizer) -> Rendered:
    """The conversation as the chat template writes it; an assistant turn is what its own text adds to the turns before.

    A template may write a turn differently once others follow (Qwen3 drops earlier reasoning). Such a turn is left out
    of the loss and counted, since the model would never be asked to write it that way; so is one that opens the
    conversation, since what the model would be given before it cannot be known. Where the generation prompt opens a
    reasoning section that the template does not write into a turn (DeepSeek-R1), the turn begins where the two part; reasoning
    that the template drops from a turn is not learnt.
    """
    turns = turns_of(record, kind)
    options = template_options(record)
    if reserved := next((name for name in options if name in _taken(tokenizer)), None):
        raise ValueError(f"{record.where}: field 'chat_template_kwargs' may not set {reserved!r}")
    messages = _as_the_template_takes(turns, options, tokenizer, record.where)

    def render(count: int, *, ask: bool) -> str:
        return _written(messages[:count], options, tokenizer, record.where, ask=ask)

    whole = render(len(messages), ask=False)
    learnt = record_is_learnt(record)
    spans, left_out, marked = [], 0, 0
    unreasoned = []
    for i, (turn, message) in enumerate(zip(turns, messages, strict=True)):
        if message["role"] != "assistant":
            continue
        if not learnt or not is_learnt(turn, record.where):
            marked += 1
            continue
        asked = render(i, ask=True) if i else ""
        start = _common_prefix(asked, whole)
        follows = start == len(asked) or start >= _common_prefix(asked, render(i, ask=False))
        after = render(i + 1, ask=False) if i + 1 < len(messages) else whole
        stop = _common_prefix(after, whole)
        if i + 1 < len(messages):
            stop = _without_part_of_token(whole, stop, tokenizer, messages[i + 1]["role"])
        answer = turn["content"].rpartition("</think>")[2].strip()
        named = (call.get("function", call)["name"] for call in turn.get("tool_calls", ()))
        calls = [name for name in named if name in after[start:]]
        written = whole[start:stop]
        if i and follows and all(part in written for part in (answer, *calls)):
            spans.append((start, len(whole[:stop].rstrip())))
            if _reasoning(turn) not in written:
                unreasoned.append("assistant")
        else:
            left_out += 1
    unwritten = (*(turn["role"] for turn in _unwritten(turns, whole)), *unreasoned)
    return Rendered(
        whole,
        spans,
        record.where,
        begin=False,
        end=False,
        turns_left_out=left_out,
        turns_marked=marked,
        unwritten=unwritten,
    )


def _taken(tokenizer: Tokenizer) -> set[str]:
    """Names of the arguments of a rendering that are not the record's to set."""
    named = inspect.signature(tokenizer.apply_chat_template).parameters
    return {*named, "tokenizer", "messages"} - {"tools"}


def _reasoning(turn: dict[str, Any]) -> str:
    """The reasoning of a turn, in a field of its own or before the end of a section ``<think>``; empty without."""
    named = (turn.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    field = next((text for text in named if isinstance(text, str)), "")
    return field.strip() or turn["content"].rpartition("</think>")[0].rpartition("<think>")[2].strip()


def _written(
    messages: list[dict[str, Any]], options: dict[str, Any], tokenizer: Tokenizer, where: str, *, ask: bool
) -> str:
    """The text that the chat template makes of turns; with ``ask`` as far as the assistant's next turn."""
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=ask, **options)
    except Exception as error:
        raise ValueError(f"{where}: the chat template refused the conversation: {error}") from error


KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")


def _as_the_template_takes(
    turns: list[dict[str, Any]], options: dict[str, Any], tokenizer: Tokenizer, where: str
) -> list[dict[str, Any]]:
    """The turns in the first shape of which the template writes everything, else in the first that it takes.

    Some templates want content as a list of parts, and some the arguments of a call as JSON text.

    Raises:
        ValueError: a role that neither the field nor the template knows, or no shape that the template takes.
    """
    template = str(tokenizer.chat_template)
    for turn in turns:
        role = turn["role"]
        if role not in KNOWN_ROLES and not re.search(rf"""['"]{re.escape(role)}['"]""", template):
            raise ValueError(
                f"{where}: a turn has the role {role!r}, which the chat template does not know; known are"
                f" {', '.join(KNOWN_ROLES)}"
            )
    first: list[dict[str, Any]] | None = None
    refusal: ValueError | None = None
    for messages in _shapes(turns):
        try:
            text = _written(messages, options, tokenizer, where, ask=False)
        except ValueError as error:
            refusal = refusal or error
            continue
        if not _unwritten(turns, text) and not _written_as_python(messages, text):
            return messages
        first = first or messages
    if first is None:
        assert refusal is not None
        raise refusal
    return first


def _shapes(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation without its marks: content as text or in parts, arguments of calls as objects or as JSON text."""
    plain = [{name: value for name, value in turn.items() if name not in MARKS} for turn in turns]
    called = any("tool_calls" in turn for turn in plain)
    for in_parts, as_text in itertools.product((False, True), (False, True) if called else (False,)):
        shaped = []
        for turn in plain:
            content = [{"type": "text", "text": turn["content"]}] if in_parts else turn["content"]
            calls = [_with_text_arguments(call) if as_text else call for call in turn.get("tool_calls", ())]
            shaped.append({**turn, "content": content, **({"tool_calls": calls} if calls else {})})
        yield shaped


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": function} if "function" in call else function


def _written_as_python(messages: list[dict[str, Any]], text: str) -> bool:
    """Whether the template wrote a list of parts, or a call's arguments, as Python does: it wants them as text."""
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    if any(str(parts) in text for parts in lists):
        return True
    calls = [call.get("function", call) for message in messages for call in message.get("tool_calls", ())]
    values = [call["arguments"] for call in calls if call["arguments"]]
    return any(str(value) in text for value in values if isinstance(value, dict))


def _unwritten(turns: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The turns whose content is not in the text, as it stands or as JSON writes it; reasoning is not looked for."""
    missing = []
    for turn in turns:
        content = turn["content"].rpartition("</think>")[2].strip()
        escaped = (json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        if content not in text and not any(part in text for part in escaped) and not _same_json(content, text):
            missing.append(turn)
    return missing


def _same_json(content: str, text: str) -> bool:
    """Whether a content that is JSON stands in the text in another spacing: templates write results of tools anew."""
    squeezed = re.sub(r"\s", "", content)
    return content[:1] in ("{", "[") and squeezed in re.sub(r"\s", "", text)


def _without_part_of_token(text: str, stop: int, tokenizer: Tokenizer, next_role: str) -> int:
    """``stop`` moved to the end of the added token that it cuts; to its beginning where that token opens the next turn."""
    for token in tokenizer.get_added_vocab():
        at = text.find(token, max(0, stop - len(token) + 1), stop + len(token) - 1)
        if 0 <= at < stop < at + len(token):
            return at if next_role in token.lower() else at + len(token)
    return stop


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)

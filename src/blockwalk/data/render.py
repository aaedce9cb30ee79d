"""A record as one text, and which of its characters are learnt; nothing here knows of tokens.

format            begin, end added   learnt                              too long
messages          by the template    each assistant turn with its end    cut on the right
sharegpt, alpaca  as messages; an alpaca record without history is a completion where there is no template
completion        yes, yes           the completion and the end          prompt cut on the left, then right
                  of turns, as messages; learnt are the assistant's turns in the completion
classification    yes, no            the label word                      prompt cut on the left
text              yes, yes           all of it                           cut on the right
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import string
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blockwalk.data.chat_template import chat_bounds, render_chat, reserved
from blockwalk.data.formats import (
    MARKS,
    ROLES,
    Format,
    Record,
    alpaca_columns,
    alpaca_prompt,
    answer_column,
    in_turns,
    is_learnt,
    is_marked,
    prompt_turns,
    record_is_learnt,
    template_options,
    turns_of,
)
from blockwalk.data.named_templates import TEMPLATES
from blockwalk.plan.parsing import fields_of

Tokenizer = Any
"""A fast tokenizer of transformers (``PreTrainedTokenizerFast``); named so that importing this
stays light."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A record as text. ``spans`` are the learnt characters, ``prompt_end`` those that may be cut
    on the left."""

    text: str
    spans: list[tuple[int, int]]
    where: str
    prompt_end: int = 0
    begin: bool = True
    end: bool = True
    turns_left_out: int = 0
    turns_marked: int = 0
    """Assistant turns that the record marks as not to be learnt."""
    turns_of_others: int = 0
    """Turns of other roles that the record marks as to be learnt, and which are not."""
    unwritten: tuple[str, ...] = ()
    """Roles of turns whose content, or learnt turns whose reasoning, is not in the text: the
    template dropped it."""


def render(
    record: Record,
    kind: Format,
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    prompts: Sequence[str] = (),
) -> Rendered:
    """Return a record of any format but classification, of which the template says what it becomes.

    ``prompts`` are texts with columns in braces (``data.prompt``), of which one stands before the
    answer. ``stops`` are the texts of the tokens that generation stops at: a turn is learnt as far
    as the first of them.

    Raises:
        ValueError: it lacks what its format needs, or needs a chat template that the tokenizer has
            not.
    """
    if prompts:
        answer = answer_column(kind, record)
        return render_pair(_filled(prompts, record, answer), record.text(answer), record.where)
    if kind is Format.TEXT:
        return render_pair("", record.text("text"), record.where)
    if kind is Format.COMPLETION and not in_turns(record):
        return render_pair(record.text("prompt"), record.text("completion"), record.where)
    if not getattr(tokenizer, "chat_template", None):
        if kind is Format.ALPACA:
            return render_pair(
                alpaca_prompt(record) + "\n", record.text(alpaca_columns(record)[1]), record.where
            )
        raise ValueError(
            f"{record.where}: format {kind} {'of turns ' * (kind is Format.COMPLETION)}needs a chat"
            " template, and the tokenizer has none: set data.chat_template to one of"
            f" {', '.join(TEMPLATES)} or to a file, or give records with 'prompt' and 'completion',"
            " or 'text'"
        )
    with chat_bounds(tokenizer, record.fields):
        return _render_turns(record, kind, tokenizer, stops)


def _filled(prompts: Sequence[str], record: Record, answer: str) -> str:
    """Return the first of the prompts whose columns the record fills, with its values; the last one
    where none is.

    Raises:
        ValueError: a column is missing, or is the answer itself.
    """
    for prompt in prompts:
        names = fields_of(prompt, "data.prompt")
        if answer in names:
            raise ValueError(
                f"{record.where}: data.prompt names {{{answer}}}, which is the answer that is"
                " learnt"
            )
        if prompt == prompts[-1] or all(record.fields.get(name) for name in names):
            break
    if missing := [name for name in names if name not in record.fields]:
        raise ValueError(
            f"{record.where}: data.prompt names {', '.join(map(repr, missing))}, and the record has"
            f" {record.names}"
        )
    values = {name: "" if record.fields[name] is None else record.text(name) for name in names}
    parts = string.Formatter().parse(prompt)
    return "".join(
        literal + (values[name] if name is not None else "") for literal, name, _, _ in parts
    )


def render_pair(prompt: str, completion: str, where: str, *, end: bool = True) -> Rendered:
    """Return a prompt with what is learnt after it; an empty completion leaves its end alone to
    learn, as an empty turn does."""
    text = prompt + completion
    learnt = completion or prompt
    return Rendered(
        text, [(len(prompt), len(text))] if learnt else [], where, prompt_end=len(prompt), end=end
    )


def _render_turns(
    record: Record, kind: Format, tokenizer: Tokenizer, stops: Sequence[str]
) -> Rendered:
    """Return the conversation as the chat template writes it; an assistant turn is what its own
    text adds to the turns before.

    A template may write a turn differently once others follow (Qwen3 drops earlier reasoning). Such
    a turn is left out of the loss and counted, since the model would never be asked to write it
    that way; so is one that opens the conversation, since what the model would be given before it
    cannot be known. Where the generation prompt opens a reasoning section that the template does
    not write into a turn (DeepSeek-R1), the turn begins where the two part; reasoning that the
    template drops from a turn is not learnt. :func:`_end_of_turn` says where a turn ends."""
    turns = turns_of(record, kind)
    options = template_options(record)
    if taken := next((name for name in options if name in reserved(tokenizer)), None):
        raise ValueError(f"{record.where}: field 'chat_template_kwargs' may not set {taken!r}")
    messages = _as_the_template_takes(turns, options, tokenizer, record.where)

    def render(shown: Sequence[dict[str, Any]], *, ask: bool = False) -> str:
        return _written(list(shown), options, tokenizer, record.where, ask=ask)

    conversation = render(messages)
    head = conversation[: conversation.find(_text_of(messages[0]).strip())]
    added = tokenizer.get_added_vocab()
    learnt = record_is_learnt(record)
    spans: list[tuple[int, int]] = []
    header = ""
    dropped: list[dict[str, Any]] = []
    unreasoned: list[str] = []
    left_out = 0
    marked = 0
    others = 0
    asked = prompt_turns(record, kind, turns)
    for i, (turn, message) in enumerate(zip(turns, messages, strict=True)):
        if message["role"] != "assistant":
            others += is_marked(turn)
            continue
        if i < asked:
            continue
        if not learnt or not is_learnt(turn, record.where):
            marked += 1
            continue
        if _drops_calls(conversation, messages, i, render):
            dropped.append(turn)
            left_out += 1
            continue
        last = i + 1 == len(messages)
        prompt = render(messages[:i], ask=True) if i else ""
        start = _common_prefix(prompt, conversation)
        follows = start == len(prompt) or start >= _common_prefix(prompt, render(messages[:i]))
        if i and not header and not last:
            header = prompt[_common_prefix(prompt, render(messages[:i])) :]
        if header and conversation.startswith(
            header, start
        ):  # after a tool's turn, a prompt may come without it
            start += len(header)
        after = conversation if last else render(messages[: i + 1])
        same = _common_prefix(after, conversation)
        texts = _texts_to_learn(turn, after[start:])
        content_end = max(
            [start, *(conversation.rfind(text, start, same) + len(text) for text in texts if text)]
        )
        opening = None if last else functools.partial(_opening_of_next, messages, i, render, added)
        stop = _end_of_turn(conversation, content_end, same, stops, added, opening, head)
        if i and follows and all(text in conversation[start:stop] for text in texts):
            spans.append((start, len(conversation[:stop].rstrip())))
            if _reasoning(turn) not in conversation[start:stop]:
                unreasoned.append("assistant")
        else:
            left_out += 1
    missing = [turn for turn in _unwritten(turns, conversation) if turn not in dropped]
    unwritten = (*(turn["role"] for turn in (*missing, *dropped)), *unreasoned)
    return Rendered(
        conversation,
        spans,
        record.where,
        begin=False,
        end=False,
        turns_left_out=left_out,
        turns_marked=marked,
        turns_of_others=others,
        unwritten=unwritten,
    )


def _reasoning(turn: dict[str, Any]) -> str:
    """Return the reasoning of a turn, in a field of its own or before the end of a section
    ``<think>``; empty without."""
    named = (turn.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    field = next((text for text in named if isinstance(text, str)), "")
    return (
        field.strip() or turn["content"].rpartition("</think>")[0].rpartition("<think>")[2].strip()
    )


def _text_of(message: dict[str, Any]) -> str:
    """Return a message's content as text, which its template may take as a list of one part."""
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]


def _texts_to_learn(turn: dict[str, Any], text: str) -> list[str]:
    """Return the texts that an assistant's turn must hold to be learnt: its answer, and the names
    of its calls as far as ``text`` has them."""
    names = [call.get("function", call)["name"] for call in turn.get("tool_calls", ())]
    return [
        turn["content"].rpartition("</think>")[2].strip(),
        *(name for name in names if name in text),
    ]


def _drops_calls(
    conversation: str,
    messages: Sequence[dict[str, Any]],
    index: int,
    render: Callable[[Sequence[dict[str, Any]]], str],
) -> bool:
    """Whether a template writes the same conversation where turn ``index`` has no calls."""
    if "tool_calls" not in messages[index]:
        return False
    shown = list(messages)
    shown[index] = {name: value for name, value in shown[index].items() if name != "tool_calls"}
    try:
        return render(shown) == conversation
    except ValueError:
        return False


def _end_of_turn(
    conversation: str,
    content_end: int,
    same: int,
    stops: Sequence[str],
    added: Collection[str],
    opening_of_next: Callable[[], str] | None,
    head: str,
) -> int:
    """Return the position in a conversation's text behind the last character that a turn teaches.

    Generation stops at the first of ``stops`` behind the turn's content: it is learnt, even where
    it opens the next turn (GLM-4), and nothing behind it is. Where none follows, the turn ends
    before what the next turn writes of itself.

    Args:
        conversation: its text.
        content_end: the position behind the turn's answer and calls.
        same: the position up to which the text is the same without the turns that follow.
        stops: the texts of the tokens that generation stops at.
        added: the texts of the tokenizer's added tokens, which are learnt whole or not at all.
        opening_of_next: answers the text that the next turn opens with, or nothing; None: no turn
            follows.
        head: the text before the first turn's content, in which turns are opened and none is ended.
    """
    at, end = min(
        (
            (at, at + len(stop))
            for stop in stops
            if (at := conversation.find(stop, content_end)) >= 0
        ),
        default=(-1, -1),
    )
    if at >= 0 and not conversation[same:at].strip():
        return end
    if opening_of_next is None:
        return same
    begin_of_token, end_of_token = _token_at(conversation, same, added)
    opening = opening_of_next()
    begin = conversation.rfind(opening, content_end, end_of_token + len(opening)) if opening else -1
    if begin >= 0:
        return min(begin, end_of_token)
    return begin_of_token if conversation[begin_of_token:end_of_token] in head else end_of_token


def _opening_of_next(
    messages: Sequence[dict[str, Any]],
    index: int,
    render: Callable[[Sequence[dict[str, Any]]], str],
    added: Collection[str],
) -> str:
    """Return the text with which the turn behind ``index`` opens, before its content: what it adds
    where it stands twice.

    Empty where the template refuses the same turn twice, or does not write its content as it is.
    """
    once = messages[: index + 2]
    content = _text_of(once[-1]).strip()
    try:
        twice = render([*once, once[-1]])
    except ValueError:
        return ""
    begin, _ = _token_at(twice, _common_prefix(render(once), twice), added)
    stop = twice.find(content, begin) if content else -1
    return twice[begin:stop] if stop >= 0 else ""


def _written(
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    tokenizer: Tokenizer,
    where: str,
    *,
    ask: bool,
) -> str:
    """Return the text that the chat template makes of turns; with ``ask`` as far as the assistant's
    next turn."""
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=ask, **options)
    except Exception as error:
        raise ValueError(f"{where}: the chat template refused the conversation: {error}") from error


KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")


def _as_the_template_takes(
    turns: list[dict[str, Any]], options: dict[str, Any], tokenizer: Tokenizer, where: str
) -> list[dict[str, Any]]:
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
            f"{where}: {named}, which the chat template does not know; known are"
            f" {', '.join(KNOWN_ROLES)}, and by other data sets' names {', '.join(ROLES)}"
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


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": function} if "function" in call else function


def _written_as_python(messages: list[dict[str, Any]], text: str) -> bool:
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


def _unwritten(turns: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
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

"""A record as one text, and which of its characters are learnt; nothing here knows of tokens.

format            begin, end added   learnt                              too long
messages          by the template    each assistant turn with its end    cut on the right
sharegpt, alpaca  as messages; an alpaca record without history is a completion where there is no template
completion        yes, yes           the completion and the end          prompt cut on the left, then right
classification    yes, no            the label word                      prompt cut on the left
text              yes, yes           all of it                           cut on the right
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockwalk.data.chat_template import chat_bounds, render_chat
from blockwalk.data.formats import Format, Record, alpaca_prompt, tools_of, turns_of

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
    messages = turns_of(record, kind)
    tools = tools_of(record)

    def render(count: int, *, ask: bool) -> str:
        try:
            some = messages[:count]
            text = render_chat(tokenizer, some, tools=tools, add_generation_prompt=ask)
        except Exception as error:
            raise ValueError(f"{record.where}: the chat template refused the conversation: {error}") from error
        return text

    whole = render(len(messages), ask=False)
    spans, left_out = [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = render(i, ask=True) if i else ""
        start = _common_prefix(asked, whole)
        follows = start == len(asked) or start >= _common_prefix(asked, render(i, ask=False))
        after = render(i + 1, ask=False) if i + 1 < len(messages) else whole
        stop = _common_prefix(after, whole)
        answer = (message.get("content") or "").rpartition("</think>")[2].strip()
        if i and follows and answer in whole[start:stop]:
            spans.append((start, len(whole[:stop].rstrip())))
        else:
            left_out += 1
    return Rendered(whole, spans, record.where, begin=False, end=False, turns_left_out=left_out)


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)

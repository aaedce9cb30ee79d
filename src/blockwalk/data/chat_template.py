"""Chat templates, which others wrote: rendered within bounds of memory, text and time.

transformers' sandbox bounds what a template reaches, not what it multiplies: ``{{ 'a' * 6000000000
}}`` is 25 bytes of text. The kernel's limit on the address space holds for every operation of a
template alike, so no list of operations has to be kept."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from blockwalk.system.bounds import Endless, bounded

LEAST_BOUND = 64 << 20
"""Characters that a template may always write."""
TIMES = 1000
"""Characters that a template may write for each of the record's and of its own, where that is
more."""
SECONDS = 60.0
"""Seconds after which a template counts as one without an end."""
COPIES = 4
"""Copies of a text that are held while it is joined, and room for what else the interpreter needs
meanwhile."""

ARGUMENTS = "chat_template_arguments"
"""The attribute of a tokenizer that holds the arguments of ``data.chat_template_arguments``, with
which each conversation is written unless its record sets them."""


_bound: ContextVar[tuple[int, str] | None] = ContextVar("bound", default=None)
"""The characters that a template may write here, and the words that say why."""


@contextmanager
def chat_bounds(tokenizer: Any, record: Any) -> Iterator[None]:
    """Bound all renderings of one ``record``, any value of JSON: to set them takes a quarter
    of what one rendering does.

    Memory and time are bounded in the main thread of a system with signals (not Windows), and
    memory where there is a ``/proc``: a limit is the whole process's, and another thread's work is
    not to fail by it. The text is bounded everywhere."""
    characters = len(json.dumps(record, ensure_ascii=False, default=str))
    bound = max(LEAST_BOUND, TIMES * (characters + len(str(tokenizer.chat_template))))
    token = _bound.set(
        (bound, f"for {characters:,} characters of a record; its bound is {bound:,} characters")
    )
    try:
        with bounded(SECONDS, COPIES * bound):
            yield
    finally:
        _bound.reset(token)


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """Return the conversation as the tokenizer's chat template writes it, within its
    :func:`chat_bounds`; ``options`` are those of ``apply_chat_template``.

    Raises:
        ValueError: the template wants more than its bounds.
        Exception: whatever the template raises.
    """
    if (bounds := _bound.get()) is None:
        with chat_bounds(tokenizer, [messages, options.get("tools")]):
            return render_chat(tokenizer, messages, **options)
    bound, of_what = bounds
    try:
        arguments = {**getattr(tokenizer, ARGUMENTS, {}), **options}
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    except MemoryError:
        raise ValueError(
            f"the chat template takes more memory than {COPIES * bound / 1e6:,.0f} MB {of_what}"
        ) from None
    except Endless:
        raise ValueError(
            f"the chat template does not come to an end within {SECONDS:g} s {of_what}"
        ) from None
    if len(text) > bound:
        raise ValueError(f"the chat template writes {len(text):,} characters {of_what}")
    return text


def reserved(tokenizer: Any) -> set[str]:
    """Return names of the arguments of a rendering that neither a record nor a setting may set."""
    named = inspect.signature(tokenizer.apply_chat_template).parameters
    return {*named, "tokenizer", "messages"} - {"tools"}

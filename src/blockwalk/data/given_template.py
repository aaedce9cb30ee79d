"""The chat template that a run's settings give its tokenizer: of a file, or by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockwalk.data.chat_template import ARGUMENTS, reserved
from blockwalk.data.named_templates import TEMPLATES
from blockwalk.models.saved_template import read_template
from blockwalk.plan.parsing import did_you_mean


def set_template(tokenizer: Any, template: str, arguments: Mapping[str, Any]) -> None:
    """Give a tokenizer a chat template (a file, or a name of :data:`TEMPLATES`; empty: its own),
    and the arguments that every conversation is written with.

    Raises:
        ValueError: no such template, or an argument that is not the user's to set.
    """
    if template:
        tokenizer.chat_template = (
            _named(template, tokenizer) if template in TEMPLATES else _of_file(template)
        )
    if refused := next(
        (name for name in arguments if name in {*reserved(tokenizer), "tools"}), None
    ):
        raise ValueError(
            f"data.chat_template_arguments may not set {refused!r}: it is set for each conversation"
        )
    setattr(tokenizer, ARGUMENTS, dict(arguments))


def _named(name: str, tokenizer: Any) -> str:
    """Return the text of a named template; where the tokenizer does not have the mark that ends a
    turn as one token, its own end of text takes that place, since generation stops at one token."""
    template = TEMPLATES[name]
    end = tokenizer.eos_token
    lacks = template.end and template.end not in tokenizer.get_vocab()
    return template.text.replace(template.end, end) if lacks and end else template.text


def missing_marks(name: str, tokenizer: Any) -> str:
    """Return a sentence on the marks of a named template that the tokenizer does not have as
    tokens; empty where it has all."""
    if name not in TEMPLATES:
        return ""
    vocabulary = tokenizer.get_vocab()
    missing = [mark for mark in TEMPLATES[name].marks if mark not in vocabulary]
    if not missing:
        return ""
    end = TEMPLATES[name].end
    stops = (
        f"; {tokenizer.eos_token!r} ends a turn in place of {end!r}"
        if end in missing and tokenizer.eos_token
        else ""
    )
    plain = [mark for mark in missing if mark != end or not stops]
    as_text = (
        f"the tokenizer writes {', '.join(map(repr, plain))} as plain text of several tokens"
        if plain
        else ""
    )
    return f"data.chat_template: {name}: {as_text or 'the tokenizer lacks one mark'}{stops}"


def _of_file(name: str) -> str:
    """Return the text of a template's file."""
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        hint = did_you_mean(name, list(TEMPLATES))
        raise ValueError(
            f"data.chat_template is {name!r}: no such file{hint}; by name: {', '.join(TEMPLATES)}"
        )
    return read_template(path)

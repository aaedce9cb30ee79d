"""A record as one text, and which of its characters are learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tokenizer = Any
"""A fast tokenizer of transformers (``PreTrainedTokenizerFast``); named so that importing this
stays light."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A record as text. ``spans`` are the learnt characters, ``prompt_end`` those that may be cut
    on the left."""

    text: str
    spans: list[tuple[int, int]]
    place: str
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


def render_pair(prompt: str, completion: str, place: str, *, end: bool = True) -> Rendered:
    """Return a prompt with what is learnt after it; an empty completion leaves its end alone to
    learn, as an empty turn does."""
    text = prompt + completion
    learnt = completion or prompt
    return Rendered(
        text, [(len(prompt), len(text))] if learnt else [], place, prompt_end=len(prompt), end=end
    )

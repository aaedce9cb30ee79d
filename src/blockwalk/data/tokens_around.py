"""The tokens that a tokenizer puts around a text, as training and generation both add them.

Some begin a text with one token (``<s>``), some with two (GLM-4: ``[gMASK]<sop>``), some end it
with a language code or an end of their own. A text that is learnt has all of them, and an end of
text; a prompt that is continued has those before it alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockwalk.data.rendered import Tokenizer


@dataclass(frozen=True, slots=True)
class TokensAround:
    """Token ids before and behind every text.

    ``suffix`` has the end of text, also where the tokenizer itself adds none."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    def prefixed(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Return a text's tokens behind the prefix, and how many were added. Where the text itself
        begins with tokens of the prefix, they are not doubled."""
        overlap = _longest(
            count for count in range(len(self.prefix) + 1) if _begins(ids, self.prefix[:count])
        )
        return [*self.prefix, *ids[overlap:]], len(self.prefix) - overlap

    def missing_end(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens of the suffix that a text does not end with yet."""
        overlap = _longest(
            count
            for count in range(len(self.suffix) + 1)
            if tuple(ids[len(ids) - count :]) == self.suffix[:count]
        )
        return list(self.suffix[overlap:])


def tokens_around(tokenizer: Tokenizer) -> TokensAround:
    """Return what a tokenizer puts around a text: the difference that ``add_special_tokens``
    makes."""
    end = tokenizer.eos_token_id
    prefix: list[int] = []
    suffix: list[int] = []
    for text in _probes(tokenizer):
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not plain:  # an entry that stands within words alone need not be a text
            continue
        framed = tokenizer(text)["input_ids"]
        start = next(i for i in range(len(framed)) if _begins(framed[i:], plain))
        prefix = framed[:start]
        suffix = framed[start + len(plain) :]
        break
    if end is not None and end not in suffix:
        suffix = [*suffix, end]
    return TokensAround(tuple(map(int, prefix)), tuple(map(int, suffix)))


def _probes(tokenizer: Tokenizer) -> Iterable[str]:
    """Yield texts of the vocabulary's own entries: a tokenizer of words knows no others."""
    added = set(tokenizer.get_added_vocab().values())
    plain_ids = (number for number in range(len(tokenizer)) if number not in added)
    yield from map(tokenizer.convert_ids_to_tokens, itertools.islice(plain_ids, 64))


def _begins(ids: Sequence[int], beginning: Sequence[int]) -> bool:
    return list(ids[: len(beginning)]) == list(beginning)


def _longest(counts: Iterable[int]) -> int:
    return max(counts)

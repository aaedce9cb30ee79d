"""Judged answers as rows of tokens: the prompt's tokens, the same in every row of a record, and
what follows them.

An answer begins where the tokens of the prompt by itself and those of prompt and answer part, as
TRL takes it: the end of a prompt may melt into an answer's first token, or a template may write it
otherwise once an answer follows. All that follows is learnt, with the answer's end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockwalk.data.dataset import Ids, Mask
from blockwalk.data.encode_report import EncodeReport
from blockwalk.data.judged import Judged
from blockwalk.data.tokens_around import TokensAround

CHUNK = 64
CHUNK_CHARACTERS = 1 << 19
"""The most records whose texts are tokenised in one call, and the most characters in these."""

TokenIds = Callable[[list[str]], list[list[int]]]
"""The token ids of texts, without those around a text."""


class EncodedRow(NamedTuple):
    """A row of an example, as :class:`blockwalk.data.dataset.RowWriter` takes it."""

    token_ids: Ids
    in_loss: Mask
    numbers: Mapping[str, float] = {}
    token_numbers: Mapping[str, npt.NDArray[np.float64]] = {}


def judged_examples(
    records: Iterable[Judged],
    token_ids: TokenIds,
    is_blank: Callable[[int], bool],
    around: TokensAround,
    report: EncodeReport,
) -> Iterator[list[EncodedRow]]:
    """Yield the rows of each record, cut on the right to ``report.max_length`` tokens: a row whose
    answer is cut away as a whole learns nothing.

    Args:
        is_blank: whether a token is blanks alone.

    Raises:
        ValueError: numbers of tokens are not as many as the answer's tokens.
    """
    names: dict[str, str] | None = None
    for chunk in _chunks(records):
        texts = [text for record in chunk for text in (record.prompt, *record.texts)]
        ids = iter(token_ids(texts))
        for record in chunk:
            prompt_ids = next(ids)
            rows = [next(ids) for _ in record.texts]
            brought = dict.fromkeys((*record.numbers, *record.token_numbers), record.place)
            if names is None:
                names = brought
            if lacking := names.keys() ^ brought.keys():
                raise ValueError(
                    f"{record.place}: {', '.join(sorted(lacking))} is given in some records and not"
                    f" in others ({next(iter(names.values()), '')}): give it in all, or in none"
                )
            yield _rows(record, prompt_ids, rows, is_blank, around, report)


def _chunks(records: Iterable[Judged]) -> Iterator[list[Judged]]:
    chunk: list[Judged] = []
    characters = 0
    for record in records:
        chunk.append(record)
        characters += sum(map(len, record.texts))
        if len(chunk) == CHUNK or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk


def _rows(
    record: Judged,
    prompt_ids: list[int],
    rows: list[list[int]],
    is_blank: Callable[[int], bool],
    around: TokensAround,
    report: EncodeReport,
) -> list[EncodedRow]:
    """Return the rows of a record, and count it."""
    if record.framed:
        prompt_ids = around.prefixed(prompt_ids)[0]
        framed = (around.prefixed(ids)[0] for ids in rows)
        rows = [ids + around.missing_end(ids) for ids in framed]
    prompt_tokens = min(_common_prefix(prompt_ids, ids) for ids in rows)
    report.records += 1
    report.prompts_melted += prompt_tokens < len(prompt_ids)
    report.note_unwritten(record.place, record.unwritten)
    longest = max(map(len, rows))
    report.longest = max(report.longest, longest)
    for ids in rows:
        if not record.framed:
            report.turn_ends[_end_of(ids, is_blank)] += 1
        report.largest = max(report.largest, (max(ids), record.place))
    for name, values in record.token_numbers.items():
        if len(values) != len(rows[0]) - prompt_tokens:
            raise ValueError(
                f"{record.place}: field {name!r} has {len(values)} numbers, and its answer has"
                f" {len(rows[0]) - prompt_tokens} tokens, the one that ends it included: give one"
                " for each token"
            )
    limit = longest if report.max_length is None else report.max_length
    if longest > limit:
        report.truncated += 1
        report.answers_cut += 1
    return [_row(record, ids[:limit], prompt_tokens) for ids in rows]


def _row(record: Judged, ids: list[int], prompt_tokens: int) -> EncodedRow:
    in_loss = np.arange(len(ids)) >= max(prompt_tokens, 1)
    token_numbers = {}
    for name, values in record.token_numbers.items():
        aligned = np.zeros(len(ids))
        aligned[prompt_tokens:] = values[: len(ids) - prompt_tokens]
        token_numbers[name] = aligned
    return EncodedRow(np.asarray(ids, dtype=np.int32), in_loss, record.numbers, token_numbers)


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _end_of(ids: Sequence[int], is_blank: Callable[[int], bool]) -> int:
    """Return the last token of an answer that is no blank: a template may write a line end behind
    it."""
    return next((token for token in reversed(ids) if not is_blank(token)), ids[-1])

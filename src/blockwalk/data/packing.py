"""Rows without padding: documents of a data set, or examples of a batch, one after the other."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from blockwalk.data.batch import Batch, is_of_objective, micro_batches, without_numbers
from blockwalk.data.dataset import Encoded, Integers
from blockwalk.plan.losses import IGNORE
from blockwalk.plan.sizes import LONG_ROW, ROW_TILE

WINDOW = 1 << 17
"""Documents that are packed together: what is known of them takes some 200 bytes each."""


def pack(dataset: Encoded, length: int) -> Encoded:
    """Return documents side by side in rows of at most ``length`` tokens: each by itself, for
    positions restart at its beginning and attention does not cross it; and each whole.

    A document that is longer than a row becomes several, of which each begins with the last token
    of the one before, so that every token is learnt once; a part with nothing to learn is left out.
    The longest go first, each into the fullest row that has room (best fit, decreasing: Ding et
    al., "Fewer Truncations Improve Language Modeling", 2024, section 3). Documents of a row, and
    rows by their first, stay in the data set's order. Of more than :data:`WINDOW` documents so many
    are packed at a time."""
    if length < 2:
        raise ValueError(f"packed rows must hold at least 2 tokens, not {length}")
    starts = range(0, len(dataset), WINDOW)
    rows = itertools.chain.from_iterable(
        _packed(dataset, length, dataset.starts[start : start + WINDOW + 1]) for start in starts
    )
    return dataset.cut(rows, borders=True)


def _packed(dataset: Encoded, length: int, starts: Integers) -> Iterator[list[tuple[int, int]]]:
    """Yield rows of spans of the documents between some offsets."""
    spans: list[tuple[int, int]] = []
    for begin, end in itertools.pairwise(starts.tolist()):
        parts = [(start, min(start + length, end)) for start in range(begin, end - 1, length - 1)]
        spans += [(start, stop) for start, stop in parts if dataset.in_loss[start + 1 : stop].any()]
    rows: list[list[int]] = []
    rooms: list[int] = []  # of rows that are not full, each once, sorted
    rows_by_room: dict[int, list[int]] = defaultdict(list)
    for number in sorted(range(len(spans)), key=lambda i: spans[i][0] - spans[i][1]):
        size = spans[number][1] - spans[number][0]
        index = bisect_left(rooms, size)
        if index < len(rooms):
            room = rooms[index]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rooms[index]
        else:
            room = length
            row = len(rows)
            rows.append([])
        rows[row].append(number)
        if spare := room - size:
            if not rows_by_room[spare]:
                insort(rooms, spare)
            rows_by_room[spare].append(row)
    for numbers in sorted(rows, key=min):
        yield [spans[number] for number in sorted(numbers)]


def row_length(tokens: Any, padded: Any) -> Integers:
    """Return tokens of the row that examples of so many ``tokens`` in all are laid in, one after
    the other. ``padded``, their tokens with padding, where nothing is gained."""
    filled = -(-np.asarray(tokens) // ROW_TILE) * ROW_TILE
    return np.where(filled >= padded, padded, filled)


def packed_tokens(batch: Batch, groups: int) -> int:
    """Return tokens, without padding, of the fullest of ``groups`` equal parts of a batch; 0 where
    its rows cannot be laid side by side: it has other tensors than input_ids, attention_mask and
    labels, its mask hides anything but the right end of its rows, or something hidden is learnt."""
    plain = without_numbers(batch).keys() == {"input_ids", "attention_mask", "labels"}
    if not plain or len(batch["input_ids"]) % groups:
        return 0
    real_BS = batch["attention_mask"] != 0
    places_S = torch.arange(batch["input_ids"].shape[1])
    learnt_beyond = bool(((batch["labels"] != IGNORE) & ~real_BS)[:, 1:].any())
    if learnt_beyond or not torch.equal(real_BS, places_S < real_BS.sum(1, keepdim=True)):
        return 0
    return int(real_BS.view(groups, -1).sum(1).max())


def pack_parts(
    batch: Batch, groups: int, *, tokens: int | None = None, group: int = 1
) -> list[Batch]:
    """Return ``groups`` equal parts of a batch without their padding, tensors [1, N]: a row holds
    the examples of a part, one after the other, filled up to whole tiles. Parts that hold fewer
    tokens are shorter. ``group`` rows are one example.

    The parts come as :func:`~blockwalk.data.batch.micro_batches` cuts them where
    :func:`row_length` says so of the fullest, and where the batch has no :func:`packed_tokens`.
    ``tokens`` are these over all ranks, where each rank has rows of its own.

    Raises:
        ValueError: as ``micro_batches``.
    """
    parts = micro_batches(batch, groups, group=group)
    if tokens is None:
        tokens = packed_tokens(batch, groups)
    padded = parts[0]["input_ids"].numel()
    if not tokens or row_length(tokens, padded) == padded:
        return parts
    return [_side_by_side(part) for part in parts]


def _side_by_side(batch: Batch) -> Batch:
    """Return a batch as one row, [1, N], of its examples."""
    real_BS = batch["attention_mask"] != 0
    places_BS = torch.arange(real_BS.shape[1]).expand_as(real_BS)
    tokens = int(real_BS.sum())
    length = max(1, -(-tokens // ROW_TILE)) * ROW_TILE
    # nothing predicts a document's first token
    labels_BS = batch["labels"].masked_fill(places_BS == 0, IGNORE)
    sources = {
        "input_ids": (batch["input_ids"], 0),
        "position_ids": (places_BS, 0),
        "labels": (labels_BS, IGNORE),
    }
    numbers = {name: tensor for name, tensor in batch.items() if is_of_objective(name)}
    sources |= {name: (tensor, 0) for name, tensor in numbers.items() if tensor.dim() > 1}
    of_rows = {name: tensor for name, tensor in numbers.items() if tensor.dim() == 1}
    packed = {
        name: torch.nn.functional.pad(source_BS[real_BS], (0, length - tokens), value=fill)[None]
        for name, (source_BS, fill) in sources.items()
    }
    return {**packed, **of_rows}


def cut_padding(batch: Batch, *, unmask: bool = False) -> Batch:
    """Cut the padding off that ends all rows of a micro-batch, tensors [B, S], where they have more
    than :data:`~blockwalk.plan.sizes.LONG_ROW` tokens and hold one document each.

    Rows that end together hide nothing then, so that transformers makes no mask of S × S. With
    ``unmask`` shorter rows hide nothing either: no token of a causal model attends to the padding
    behind it, and nothing is learnt of the padding itself. Without it they keep their mask (a
    model's own loss may read it). The batch itself where something in the padding is learnt, and in
    every other case."""
    length = batch["input_ids"].shape[1]
    if length <= LONG_ROW or not batch.keys() & {"attention_mask", "position_ids"}:
        return batch
    places_S = torch.arange(length, device=batch["input_ids"].device)
    real_BS = (
        batch["attention_mask"] != 0
        if "attention_mask" in batch
        else batch["position_ids"] == places_S
    )
    lengths_B = real_BS.sum(1)
    stop = int(lengths_B.max())
    equal = bool((lengths_B == stop).all())
    if int(lengths_B.min()) == 0 or not torch.equal(real_BS, places_S < lengths_B.unsqueeze(1)):
        return batch
    if (stop == length and equal) or not (equal or (unmask and "attention_mask" in batch)):
        return batch
    if bool((batch["labels"] != IGNORE)[~real_BS].any()):
        return batch
    cut = {
        name: tensor if tensor.dim() == 1 else tensor[:, :stop] for name, tensor in batch.items()
    }
    return cut if equal else {**cut, "attention_mask": torch.ones_like(cut["attention_mask"])}

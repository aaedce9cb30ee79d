"""Rows of a data set as a batch, named by their numbers and read when they are looked at; and one
rank's share of a batch, of which no other row is read.

B batch, S sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from blockwalk.data.batch import Batch, loss_tokens, require_groups, tokens_read
from blockwalk.data.dataset import Encoded
from blockwalk.plan.copied_rows import copies_of
from blockwalk.plan.losses import IGNORE
from blockwalk.plan.objectives import PREFIX, ROW
from blockwalk.plan.words import counted, is_or_are


def collate(
    dataset: Encoded,
    rows: Sequence[int],
    padding_multiple: int = 1,
    *,
    length: int = 0,
    numbered: bool = False,
) -> dict[str, Tensor]:
    """Return the examples named as one batch, padded on the right to the longest, rounded up to
    ``padding_multiple``; or to ``length`` tokens.

    In packed rows each token of the padding is a document by itself, at position 0. Numbers of the
    data set are entries of their own, float64 [B] or [B, S]; ``numbered`` batches have the rows'
    numbers as well, int64 [B].
    """
    examples = [dataset[row] for row in rows]
    longest = length or max(len(ids) for ids, _ in examples)
    shape = (len(examples), -(-longest // padding_multiple) * padding_multiple)
    input_ids = np.full(shape, dataset.pad_id, dtype=np.int64)
    places = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE, dtype=np.int64)
    for b, (ids, in_loss) in enumerate(examples):
        input_ids[b, : len(ids)] = ids
        start = int(dataset.starts[rows[b]])
        places[b, : len(ids)] = (
            1 if dataset.positions is None else dataset.positions[start : start + len(ids)]
        )
        labels[b, : len(ids)] = np.where(in_loss, ids, IGNORE)
    second = "attention_mask" if dataset.positions is None else "position_ids"
    arrays: dict[str, np.ndarray] = {"input_ids": input_ids, second: places, "labels": labels}
    for name, numbers in dataset.numbers.items():
        arrays[PREFIX + name] = numbers[list(rows)]
    for name, numbers in dataset.token_numbers.items():
        aligned = np.zeros(shape)
        for b, row in enumerate(rows):
            begin, end = dataset.starts[row : row + 2]
            aligned[b, : end - begin] = numbers[begin:end]
        arrays[PREFIX + name] = aligned
    if numbered:
        arrays[ROW] = np.asarray(rows, dtype=np.int64)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class RowBatch(Mapping[str, Tensor]):
    """A batch of a data set's rows, padded to the longest of them. Its tensors, int64 [B, S], are
    made when one is looked at; :meth:`take` makes those of some rows alone.

    Args:
        dataset: examples as tokens.
        rows: numbers of rows, those of an example together.
        padding_multiple: S is rounded up to it.
        numbered: whether the batch has the rows' numbers.

    Raises:
        ValueError: the data set has no such row; the number is named, and the rows there are.
    """

    def __init__(
        self,
        dataset: Encoded,
        rows: Sequence[int],
        padding_multiple: int = 1,
        *,
        numbered: bool = False,
    ) -> None:
        missing = [row for row in rows if not 0 <= row < len(dataset)]
        if missing or not rows:
            lacks = f"row {missing[0]}" if missing else "no row"
            raise ValueError(
                f"a batch names {lacks}, and there {is_or_are(len(dataset))}"
                f" {counted(len(dataset), 'sequence')} in data.train, from row 0 to row"
                f" {len(dataset) - 1}"
            )
        self.dataset = dataset
        self.rows = rows
        self.numbered = numbered
        lengths = dataset.lengths_of(rows)
        self.shape = (len(rows), -(-int(lengths.max()) // padding_multiple) * padding_multiple)
        self.tokens_read = int(lengths.sum())
        """Tokens without padding."""

    @property
    def loss_tokens(self) -> int:
        """Tokens that the loss is a mean over."""
        return sum(map(self.dataset.predicted_of, self.rows))

    def take(self, places: Sequence[int]) -> dict[str, Tensor]:
        """Return the tensors of the rows at some places of the batch, as long as all of it."""
        rows = [self.rows[place] for place in places]
        return collate(self.dataset, rows, length=self.shape[1], numbered=self.numbered)

    def digest(self) -> bytes:
        """Return a digest of the rows' numbers, by which ranks that read the same data compare
        their batches."""
        numbers = np.asarray(self.rows, dtype=np.int64)
        return hashlib.blake2b(f"{self.shape} ".encode() + numbers.tobytes()).digest()

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return self.take(range(len(self.rows)))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def batch_shape(batch: Batch) -> tuple[int, int]:
    """Return B and S of a batch, of which nothing is read that is named by its rows."""
    if isinstance(batch, RowBatch):
        return batch.shape
    rows, length = batch["input_ids"].shape
    return rows, length


def token_counts(batch: Batch) -> tuple[int, int]:
    """Return tokens of a batch without its padding, and those that its loss is a mean over."""
    if isinstance(batch, RowBatch):
        return batch.tokens_read, batch.loss_tokens
    return tokens_read(batch), loss_tokens(batch)


def share(
    batch: Batch, micro_batches: int, world: int, rank: int, *, group: int = 1
) -> dict[str, Tensor]:
    """Return a rank's rows of a global batch, in the order of its micro-batches: the batch is cut
    first into these, then over ranks, between examples of ``group`` rows each.

    A batch whose examples are no multiple of micro-batches × ranks is first filled up with copies
    of its last one, every label ignored.

    Raises:
        ValueError: rows are no multiple of an example's.
    """
    rows, _ = batch_shape(batch)
    require_groups(rows, group)
    examples = rows // group
    filled = examples + copies_of(examples, micro_batches * world)
    numbers = torch.arange(filled).view(micro_batches, world, -1)[:, rank].flatten()
    within = numbers.clamp(max=examples - 1)
    places = (within[:, None] * group + torch.arange(group)).flatten()
    if isinstance(batch, RowBatch):
        of_rank = batch.take(places.tolist())
    else:
        of_rank = {name: tensor[places.to(tensor.device)] for name, tensor in batch.items()}
    is_copy = (numbers >= examples).repeat_interleave(group)
    of_rank["labels"][is_copy] = IGNORE
    return of_rank

"""Batches in an order that is a pure function of seed, epoch, lengths and batch size: resumable,
for any number of ranks.

The *global* batch is the unit. It is padded to its own longest row before it is cut over ranks or
micro-batches, so each rank's rows hold the same values whatever the world size. B batch, S
sequence, C classes."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from blockwalk.data.dataset import Encoded, Ids, Integers
from blockwalk.data.packing import row_length
from blockwalk.data.permutation import permuted
from blockwalk.data.row_batch import RowBatch
from blockwalk.plan.sizes import steps_of_epochs

_CHANGES = {"records": "text of the records", "template": "chat template", "tokenizer": "tokenizer"}
"""Names of the parts of :class:`blockwalk.data.encode_report.Origin` in a refusal to resume."""


SHUFFLED_IN_MEMORY = 1 << 20
"""Examples whose order is a list in memory, 8 bytes each; that of more is computed where it is
read."""
_LOOKED_AT = 1 << 20
"""Lengths that are looked at together."""

Order: TypeAlias = Callable[[Integers], Integers]
"""Example numbers at some positions of an epoch, [n]."""


def epoch_order(count: int, seed: int, epoch: int) -> Integers:
    """Return a permutation of ``range(count)``: the ranks of ``count`` Philox words keyed by
    blake2b(seed, epoch).

    It rests on the bit generator alone, whose stream numpy keeps the same between versions;
    ``Generator.permutation`` carries no such promise (NEP 19)."""
    digest = hashlib.blake2b(f"blockwalk data {seed} {epoch}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


class Batches(Iterator[RowBatch]):
    """An endless iterator of global batches of exactly ``batch_size`` examples, each with all of
    its rows.

    Every example comes once an epoch; a batch that an epoch cannot fill goes on with the next
    epoch's first examples. The first epoch begins with its longest example, which changes places
    with the one that would come first; then its second batch changes places with the one of the
    most tokens: nearly all memory that a run needs, with padding or without, is asked for, or
    refused, in its first two steps. ``padding_multiple`` rounds S up, for fewer shapes.
    ``shuffle=False`` keeps the file's order. ``numbered`` batches have the number of each row.

    Of more than :data:`SHUFFLED_IN_MEMORY` examples no list is made: each one's place is a function
    of seed, epoch and position, and the longest example alone changes places.

    Examples that were appended while an epoch was under way come last in it, in an order of their
    own; from the next epoch on all are one."""

    def __init__(
        self,
        dataset: Encoded,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        padding_multiple: int = 1,
        numbered: bool = False,
    ) -> None:
        if batch_size < 1 or padding_multiple < 1:
            raise ValueError(
                f"batch size and padding multiple must be at least 1: {batch_size},"
                f" {padding_multiple}"
            )
        if len(dataset) == 0:
            raise ValueError("the data set has no example")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.padding_multiple = padding_multiple
        self.numbered = numbered
        self.epoch = 0
        self.position = 0
        """Examples of this epoch that were given out."""
        self.lengths_before: list[int] = []
        """Examples that there were before each time that some were appended in this epoch."""
        self._order = self._epoch_order()

    def steps(self, epochs: float) -> int:
        """Count the batches until every example has come so many times, the last one filled up."""
        return steps_of_epochs(self.dataset.examples, self.batch_size, epochs)

    def __next__(self) -> RowBatch:
        rows = self.next_rows()
        return RowBatch(self.dataset, rows, self.padding_multiple, numbered=self.numbered)

    def next_rows(self) -> list[int]:
        """Return the numbers of the next batch's rows; the iterator moves past them."""
        examples: list[int] = []
        count = self.dataset.examples
        while len(examples) < self.batch_size:
            if self.position == count:
                self.epoch = self.epoch + 1
                self.position = 0
                self.lengths_before = []
                self._order = self._epoch_order()
            stop = min(self.position + self.batch_size - len(examples), count)
            examples += self._order(np.arange(self.position, stop)).tolist()
            self.position = stop
        rows: list[int] = self.dataset.rows_of(examples).tolist()
        return rows

    def row_lengths(self, steps: int, groups: int, *, apart: bool) -> Integers:
        """Return tokens to a row, [T, groups], in each of so many equal parts of the next T steps:
        with their padding, or ``apart``, as :func:`pack_parts` lays them."""
        ahead = copy.copy(self)
        rows_TB = np.asarray([ahead.next_rows() for _ in range(steps)])
        lengths_TB = self.dataset.lengths_of(rows_TB)
        padded_T: Integers = (
            -(-lengths_TB.max(axis=1) // self.padding_multiple) * self.padding_multiple
        )
        padded_TG = np.repeat(padded_T[:, None], groups, axis=1)
        if not apart:
            return padded_TG
        rows = rows_TB.shape[1] // groups
        tokens_TG = lengths_TB.reshape(steps, groups, rows).sum(axis=2)
        fullest_T1 = tokens_TG.max(axis=1, keepdims=True)
        packs_T1 = row_length(fullest_T1, rows * padded_T[:, None]) < rows * padded_T[:, None]
        return np.where(packs_T1, -(-row_length(tokens_TG, rows * padded_TG) // rows), padded_TG)

    def state_dict(self) -> dict[str, Any]:
        """Return the iterator's place, as JSON values, with the settings that the order depends
        on."""
        place = {name: getattr(self, name) for name in ("epoch", "position", "seed", "shuffle")}
        origin = asdict(self.dataset.report.origin)
        data = {
            "data": self.dataset.fingerprint(),
            "origin": origin,
            "sequences": len(self.dataset),
        }
        return {**place, **data, "lengths_before": [*self.lengths_before]}

    def load_state_dict(self, state: dict[str, Any], *, follow: bool = False) -> None:
        """Go to a saved place.

        A chat template that writes the day makes other tokens of the same records on another day;
        then the run goes on. With ``follow`` it goes on as well where examples were appended.

        Raises:
            ValueError: seed, shuffling or data differ, and the order would be another; what changed
                is named.
        """
        current = self.state_dict()
        for name in ("seed", "shuffle"):
            if state[name] != current[name]:
                raise ValueError(
                    f"cannot resume: data.{name} was {state[name]!r} and is now {current[name]!r}"
                )
        appended = follow and self.appended(state)
        if not self.continues(state) and not appended:
            part = _CHANGES[changed[0]] if (changed := self._changed(state)) else "tokens"
            raise ValueError(
                f"cannot resume: the {part} of the training data changed (content {state['data']},"
                f" now {current['data']}): put back what was, or begin a new run in another"
                " output_dir"
            )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self.lengths_before = [*map(int, state.get("lengths_before", ()))]
        if appended:
            self.lengths_before.append(int(state["sequences"]) // self.dataset.group)
        self._order = self._epoch_order()

    def appended(self, state: Mapping[str, Any]) -> int:
        """Return how many examples these data have behind those of a saved place, which are the
        first ones; 0: none, or the first ones are others."""
        count = int(state.get("sequences", len(self.dataset)))
        more = (len(self.dataset) - count) // self.dataset.group
        return more if more > 0 and self.dataset.first(count).fingerprint() == state["data"] else 0

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Return whether a saved place is one among these data: the same tokens, or other tokens of
        the same records by the same tokenizer and a chat template that writes the date of the
        day."""
        if state["data"] == self.dataset.fingerprint():
            return True
        has_origin = bool((state.get("origin") or {}).get("records"))
        return has_origin and self.dataset.report.origin.dated and not self._changed(state)

    def _changed(self, state: Mapping[str, Any]) -> list[str]:
        """Return names of the parts (records, template, tokenizer) that differ from a saved
        place's, as far as it knows them."""
        current = asdict(self.dataset.report.origin)
        saved = state.get("origin") or {}
        return [
            name
            for name in ("records", "template", "tokenizer")
            if saved.get(name, current[name]) != current[name]
        ]

    def _epoch_order(self) -> Order:
        if not self.shuffle:
            return lambda positions: positions
        ends = [*self.lengths_before, self.dataset.examples]
        orders = [self._first_order(ends[0])]
        for begin, end in itertools.pairwise(ends):
            key = f"blockwalk data {self.seed} {self.epoch} {begin}"
            orders.append(partial(_behind, begin, end - begin, key))
        if len(orders) == 1:
            return orders[0]

        def order(positions: Integers) -> Integers:
            parts = np.searchsorted(ends, positions, side="right")
            rows = np.empty_like(positions)
            for part in np.unique(parts):
                rows[parts == part] = orders[part](positions[parts == part])
            return rows

        return order

    def _first_order(self, count: int) -> Order:
        """Return the order of the examples that an epoch began with."""
        size = self.batch_size
        if count > SHUFFLED_IN_MEMORY:
            return self._computed_order(count)
        order = epoch_order(count, self.seed, self.epoch)
        if self.epoch == 0:
            lengths = self.dataset.lengths(0, count)
            longest = int(lengths.max(axis=1)[order].argmax())
            order[[0, longest]] = order[[longest, 0]]
            later = order[size : count // size * size].reshape(-1, size)
            if len(later):
                fullest = int(lengths.sum(axis=1)[later].sum(axis=1).argmax())
                later[[0, fullest]] = later[[fullest, 0]]
        return lambda positions: order[positions]

    def _computed_order(self, count: int) -> Order:
        """Return the order of so many examples, of which no list is made."""
        key = f"blockwalk data {self.seed} {self.epoch}"
        if self.epoch > 0:
            return lambda positions: permuted(positions, count, key)
        drawn_first = permuted(np.zeros(1, dtype=np.int64), count, key)
        longest = self._longest_example(count)

        def order(positions: Integers) -> Integers:
            rows = permuted(positions, count, key)
            rows = np.where(rows == longest, drawn_first, rows)
            return np.where(positions == 0, longest, rows)

        return order

    def _longest_example(self, count: int) -> int:
        """Return the number of the first example of the most tokens, of so many."""
        longest = 0
        most_tokens = 0
        for begin in range(0, count, _LOOKED_AT):
            lengths = self.dataset.lengths(begin, min(begin + _LOOKED_AT, count)).max(axis=1)
            if int(lengths.max()) > most_tokens:
                most_tokens = int(lengths.max())
                longest = begin + int(lengths.argmax())
        return longest


def _behind(begin: int, count: int, key: str, positions: Integers) -> Integers:
    """Return the examples at positions among ``count`` that were appended behind ``begin``."""
    return begin + permuted(positions - begin, count, key)


def by_length(
    dataset: Encoded, batch_size: int, padding_multiple: int = 1, *, numbered: bool = False
) -> Iterator[tuple[list[int], RowBatch]]:
    """Yield every example once, for evaluation: row numbers and their batch of so many examples,
    the shortest first, so that little is padding; the last batch may be shorter. A rank reads its
    own rows of it alone."""
    order = np.argsort(dataset.lengths().max(axis=1), kind="stable")
    for start in range(0, len(order), batch_size):
        rows = dataset.rows_of(order[start : start + batch_size]).tolist()
        yield rows, RowBatch(dataset, rows, padding_multiple, numbered=numbered)


def left_padded(prompts: Sequence[Ids], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return prompts of unequal length that end together: ids and attention mask, int64 [B, S]."""
    longest = max(map(len, prompts))
    ids_BS = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    mask_BS = torch.zeros_like(ids_BS)
    for b, prompt in enumerate(prompts):
        ids_BS[b, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask_BS[b, longest - len(prompt) :] = 1
    return ids_BS, mask_BS

"""Batches in an order that is a pure function of seed, epoch, lengths and batch size: resumable,
for any number of ranks.

The *global* batch is the unit. It is padded to its own longest row before it is cut over ranks or
micro-batches, so each rank's rows hold the same values whatever the world size. B batch, S
sequence, C classes."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockwalk.data.encode import Choices, Encoded, Ids, Integers
from blockwalk.plan.sizes import ROW_TILE, steps_of_epochs
from blockwalk.plan.words import counted

Batch = Mapping[str, Tensor]
"""``input_ids``, ``attention_mask`` and ``labels``, each int64 [B, S]; labels are −100 where
nothing is learnt. Packed rows have ``position_ids`` in place of the mask: where these restart a
document begins, and transformers lets no attention cross."""

_CHANGES = {"records": "text of the records", "template": "chat template", "tokenizer": "tokenizer"}
"""Names of the parts of :class:`blockwalk.data.encode.Origin` in a refusal to resume."""
IGNORE = -100
LONGEST_PACKED_ROW = 2048
"""The most tokens of a row that a batch's examples are laid side by side in: transformers makes its
mask in 17 MB. Longer rows are rid of their padding or of what hides it, so that they have no mask
(:func:`cut_padding`)."""


def epoch_order(count: int, seed: int, epoch: int) -> Integers:
    """Return a permutation of ``range(count)``: the ranks of ``count`` Philox words keyed by
    blake2b(seed, epoch).

    It rests on the bit generator alone, whose stream numpy keeps the same between versions;
    ``Generator.permutation`` carries no such promise (NEP 19)."""
    digest = hashlib.blake2b(f"blockwalk data {seed} {epoch}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


class Batches(Iterator[Batch]):
    """An endless iterator of global batches of exactly ``batch_size`` rows.

    Every example comes once an epoch; a batch that an epoch cannot fill goes on with the next
    epoch's first examples. The first epoch begins with its longest example, which changes places
    with the one that would come first; then its second batch changes places with the one of the
    most tokens: nearly all memory that a run needs, with padding or without, is asked for, or
    refused, in its first two steps. ``padding_multiple`` rounds S up, for fewer shapes.
    ``shuffle=False`` keeps the file's order."""

    def __init__(
        self,
        dataset: Encoded,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        padding_multiple: int = 1,
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
        self.epoch = 0
        self.position = 0
        """Examples of this epoch that were given out."""
        self._order = self._epoch_order()

    def steps(self, epochs: float) -> int:
        """Count the batches until every example has come so many times, the last one filled up."""
        return steps_of_epochs(len(self.dataset), self.batch_size, epochs)

    def __next__(self) -> Batch:
        return collate(self.dataset, self.next_rows(), self.padding_multiple)

    def next_rows(self) -> list[int]:
        """Return the example numbers of the next batch; the iterator moves past them."""
        rows: list[int] = []
        while len(rows) < self.batch_size:
            if self.position == len(self.dataset):
                self.epoch = self.epoch + 1
                self.position = 0
                self._order = self._epoch_order()
            rows_now = self._order[self.position : self.position + self.batch_size - len(rows)]
            rows += rows_now.tolist()
            self.position += len(rows_now)
        return rows

    def row_lengths(self, steps: int, groups: int, *, apart: bool) -> Integers:
        """Return tokens to a row in each of the next steps: with their padding, or ``apart``, in
        the largest of so many equal parts as :func:`pack_batch` lays it."""
        ahead = copy.copy(self)
        lengths = np.diff(self.dataset.starts)
        lengths_TB = lengths[[ahead.next_rows() for _ in range(steps)]]
        padded_T: Integers = (
            -(-lengths_TB.max(axis=1) // self.padding_multiple) * self.padding_multiple
        )
        if not apart:
            return padded_T
        rows = self.batch_size // groups
        tokens_T = lengths_TB.reshape(steps, groups, rows).sum(axis=2).max(axis=1)
        return -(-row_length(tokens_T, rows * padded_T) // rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the iterator's place, as JSON values, with the settings that the order depends
        on."""
        place = {name: getattr(self, name) for name in ("epoch", "position", "seed", "shuffle")}
        origin = asdict(self.dataset.report.origin)
        return {**place, "data": self.dataset.fingerprint(), "origin": origin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        A chat template that writes the day makes other tokens of the same records on another day;
        then the run goes on.

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
        if not self.continues(state):
            part = _CHANGES[changed[0]] if (changed := self._changed(state)) else "tokens"
            raise ValueError(
                f"cannot resume: the {part} of the training data changed (content {state['data']},"
                f" now {current['data']}): put back what was, or begin a new run in another output_dir"
            )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._order = self._epoch_order()

    def continues(self, state: Mapping[str, Any]) -> bool:
        """Whether a saved place is one among these data: the same tokens, or other tokens of the
        same records by the same tokenizer and a chat template that writes the date of the day."""
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

    def _epoch_order(self) -> Integers:
        count = len(self.dataset)
        size = self.batch_size
        if not self.shuffle:
            return np.arange(count, dtype=np.int64)
        order = epoch_order(count, self.seed, self.epoch)
        if self.epoch == 0:
            lengths = np.diff(self.dataset.starts)
            longest = int(lengths[order].argmax())
            order[[0, longest]] = order[[longest, 0]]
            later = order[size : count // size * size].reshape(-1, size)
            if len(later):
                fullest = int(lengths[later].sum(axis=1).argmax())
                later[[0, fullest]] = later[[fullest, 0]]
        return order


def by_length(
    dataset: Encoded, batch_size: int, padding_multiple: int = 1
) -> Iterator[tuple[list[int], Batch]]:
    """Yield every example once, for evaluation: row numbers and their batch, the shortest first, so
    that little is padding; the last batch may be shorter."""
    order = np.argsort(np.diff(dataset.starts), kind="stable").tolist()
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield rows, collate(dataset, rows, padding_multiple)


def left_padded(prompts: Sequence[Ids], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return prompts of unequal length that end together: ids and attention mask, int64 [B, S]."""
    longest = max(map(len, prompts))
    ids_BS = torch.full((len(prompts), longest), pad_id, dtype=torch.int64)
    mask_BS = torch.zeros_like(ids_BS)
    for b, prompt in enumerate(prompts):
        ids_BS[b, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask_BS[b, longest - len(prompt) :] = 1
    return ids_BS, mask_BS


def collate(dataset: Encoded, rows: Sequence[int], padding_multiple: int = 1) -> Batch:
    """Return the examples named as one batch, padded on the right to the longest, rounded up to
    ``padding_multiple``.

    In packed rows each token of the padding is a document by itself, at position 0.
    """
    examples = [dataset[row] for row in rows]
    longest = max(len(ids) for ids, _ in examples)
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
    arrays = {"input_ids": input_ids, second: places, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def tokens_read(batch: Batch) -> int:
    """Return tokens of a batch without its padding. A packed document has two tokens or more, one
    of them at position 1; a token of padding is at position 0."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    positions_BS = batch["position_ids"]
    return int((positions_BS > 0).sum() + (positions_BS == 1).sum())


def loss_tokens(batch: Batch) -> int:
    """Return tokens that the loss is a mean over: labels from the second on, since a model predicts
    the next one."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def row_length(tokens: Any, padded: Any) -> Integers:
    """Return tokens of the row that micro-batches of so many, side by side, are laid in;
    ``padded``, as they came, where it would pass :data:`LONGEST_PACKED_ROW` or nothing is gained."""
    filled = -(-np.asarray(tokens) // ROW_TILE) * ROW_TILE
    return np.where((filled > LONGEST_PACKED_ROW) | (filled >= padded), padded, filled)


def pack_batch(batch: Batch, groups: int) -> Batch:
    """Return a batch without its padding: the examples of each of ``groups`` equal parts one after
    the other in a packed row, tensors [groups, N]. The batch itself where :func:`row_length` says
    so, or where it is none with an attention mask that hides the right end of its rows alone, of
    which nothing is learnt."""
    if (
        batch.keys() != {"input_ids", "attention_mask", "labels"}
        or len(batch["input_ids"]) % groups
    ):
        return batch
    real_BS = batch["attention_mask"] != 0
    places_BS = torch.arange(batch["input_ids"].shape[1])[None]
    tokens_G = real_BS.view(groups, -1).sum(1)
    length = int(row_length(tokens_G.max(), padded := real_BS.numel() // groups))
    learnt_beyond = bool(((batch["labels"] != IGNORE) & ~real_BS)[:, 1:].any())
    if length == padded or learnt_beyond:
        return batch
    if not torch.equal(real_BS, places_BS < real_BS.sum(1, keepdim=True)):
        return batch
    labels_BS = batch["labels"].masked_fill(
        places_BS == 0, IGNORE
    )  # nothing predicts a document's first token
    sources = {
        "input_ids": (batch["input_ids"], 0),
        "position_ids": (places_BS, 0),
        "labels": (labels_BS, IGNORE),
    }
    real_GN = torch.arange(length) < tokens_G[:, None]
    return {
        name: source_BS.new_full((groups, length), fill).masked_scatter_(
            real_GN, source_BS.expand_as(real_BS)[real_BS]
        )
        for name, (source_BS, fill) in sources.items()
    }


def cut_padding(batch: Batch, *, unmask: bool = False) -> Batch:
    """Cut the padding off that ends all rows of a micro-batch, tensors [B, S], where they have more
    than :data:`LONGEST_PACKED_ROW` tokens and hold one document each.

    Rows that end together hide nothing then, so that transformers makes no mask of S × S. With
    ``unmask`` shorter rows hide nothing either: no token of a causal model attends to the padding
    behind it, and nothing is learnt of the padding itself. Without it they keep their mask (a
    model's own loss may read it). The batch itself where something in the padding is learnt, and in
    every other case."""
    length = batch["input_ids"].shape[1]
    if length <= LONGEST_PACKED_ROW or not batch.keys() & {"attention_mask", "position_ids"}:
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
    cut = {name: tensor_BS[:, :stop] for name, tensor_BS in batch.items()}
    return cut if equal else {**cut, "attention_mask": torch.ones_like(cut["attention_mask"])}


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Return a batch, tensors [B, S], cut into ``count`` equal parts, in order.

    Raises:
        ValueError: something is missing, of another shape, or B is no multiple of ``count``.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"a batch is a mapping with input_ids and labels, not a {type(batch).__name__}"
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{key} of the batch is a {type(value).__name__}; it must be a tensor, int64"
                " [batch, sequence]"
            )
    if "input_ids" not in batch or "labels" not in batch:
        raise ValueError(
            f"a batch needs input_ids and labels; this one has {', '.join(batch) or 'nothing'}"
        )
    shape = batch["input_ids"].shape
    if len(shape) != 2 or not shape[0] or any(value.shape != shape for value in batch.values()):
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
        raise ValueError(
            "every tensor of a batch must be [batch, sequence] of one shape, not empty; got"
            f" {shapes}"
        )
    if shape[0] % count:
        raise ValueError(
            f"the batch has {counted(shape[0], 'sequence')}, which gradient_accumulation_steps ×"
            f" mesh.data = {count} does not divide"
        )
    parts = {key: value.chunk(count) for key, value in batch.items()}
    return [{key: parts[key][m] for key in parts} for m in range(count)]


def require_ids(ids: Tensor, rows: int) -> None:
    """Check that a model has a row for every token, before a device is asked for one: an
    accelerator that is asked for another ends all of its process's work.

    Args:
        ids: int64, of any shape.
        rows: of the model's embeddings.

    Raises:
        ValueError: an id is below 0 or has no row; that id is named, and the number of rows.
    """
    if not ids.numel():
        return
    least, largest = (int(value) for value in torch.aminmax(ids))
    if least < 0 or largest >= rows:
        raise ValueError(
            f"input_ids has the token id {least if least < 0 else largest}, and the model has"
            f" {rows} rows of embeddings: take the model's own tokenizer, or save the model with"
            " resize_token_embeddings"
        )


def pack(dataset: Encoded, length: int) -> Encoded:
    """Return documents side by side in rows of at most ``length`` tokens: each by itself, for
    positions restart at its beginning and attention does not cross it; and each whole.

    A document that is longer than a row becomes several, of which each begins with the last token
    of the one before, so that every token is learnt once; a part with nothing to learn is left out.
    The longest go first, each into the fullest row that has room (best fit, decreasing: Ding et
    al., "Fewer Truncations Improve Language Modeling", 2024, section 3). Documents of a row, and
    rows by their first, stay in the data set's order."""
    if length < 2:
        raise ValueError(f"packed rows must hold at least 2 tokens, not {length}")
    spans: list[tuple[int, int]] = []
    for begin, end in zip(dataset.starts[:-1].tolist(), dataset.starts[1:].tolist(), strict=True):
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
    return dataset.cut(
        [[spans[number] for number in sorted(row)] for row in sorted(rows, key=min)], borders=True
    )


@dataclass(frozen=True)
class LabelWordBatch:
    """Examples with every label word, and their right classes: row ``b * C + c`` is example b with
    word c."""

    batch: Batch
    """Each tensor [B · C, S]; labels cover the label word alone."""
    targets_B: Tensor
    classes: int
    ranked_by: str = "mean"
    """mean or sum of the log-probabilities of a label word's tokens."""

    def scores(self, row_losses: Tensor) -> Tensor:
        """Return scores [B, C] that the label words are ranked by, from the loss summed over each
        row's label word, [B · C] on the CPU."""
        if self.ranked_by == "mean":
            row_losses = row_losses / (self.batch["labels"][:, 1:] != IGNORE).sum(1)
        return -row_losses.view(-1, self.classes)

    def correct(self, row_losses: Tensor) -> int:
        """Return the number of the B examples whose right class is ranked first."""
        return int((self.scores(row_losses).argmax(dim=1) == self.targets_B).sum())


def label_word_batch(
    choices: Choices, rows: Sequence[int], padding_multiple: int = 1, *, scores: str = "mean"
) -> LabelWordBatch:
    """Return the examples named, each with every label word; ``scores`` is
    ``data.label_scores``."""
    classes = choices.classes
    batch = collate(
        choices.rows, [row * classes + c for row in rows for c in range(classes)], padding_multiple
    )
    return LabelWordBatch(batch, torch.from_numpy(choices.targets[list(rows)]), classes, scores)


def row_losses(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross-entropy [B], summed over each row's learnt tokens, in float32."""
    before_BVS = logits_BSV[:, :-1].float().transpose(1, 2)
    labels_BS = labels_BS[:, 1:]
    losses_BS = torch.nn.functional.cross_entropy(
        before_BVS, labels_BS, ignore_index=IGNORE, reduction="none"
    )
    return losses_BS.sum(dim=1)


def share(batch: Batch, micro_batches: int, world: int, rank: int) -> list[Batch]:
    """Return a rank's rows of each micro-batch of the global batch: tensors [B, S], cut first into
    micro-batches, then over ranks.

    Where B is no multiple of micro-batches × ranks, it is :func:`filled` up.
    """
    padded = filled(batch, micro_batches * world)
    parts = {
        name: [part.chunk(world)[rank] for part in rows.chunk(micro_batches)]
        for name, rows in padded.items()
    }
    return [{name: part[m] for name, part in parts.items()} for m in range(micro_batches)]


def filled(batch: Batch, multiple: int) -> dict[str, Tensor]:
    """Return the batch with as many copies of its last row, every label ignored, as it lacks to a
    multiple of so many rows."""
    lacks = -len(batch["input_ids"]) % multiple
    rows = {
        name: torch.cat([tensor, tensor[-1:].expand(lacks, *tensor.shape[1:])])
        for name, tensor in batch.items()
    }
    rows["labels"][len(rows["labels"]) - lacks :] = IGNORE
    return rows

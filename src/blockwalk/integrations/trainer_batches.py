"""Batches of a Trainer's collators as a walk takes them, of one rank or of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockwalk.data.batch import COLUMNS, filled, lengthened, loss_tokens
from blockwalk.plan.losses import IGNORE


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of all ranks, in the order of the ranks, and the place of this one's."""

    batch: dict[str, Tensor]
    """Tensors [B, S], as long as the longest row of any rank."""
    own: dict[str, Tensor]
    """This rank's rows, as its collator gave them."""
    first: int = 0
    """The number of this rank's first row."""

    @property
    def own_tokens(self) -> int:
        """Labels of this rank's rows that count."""
        return loss_tokens(self.own)

    def mine(self, rows: Tensor) -> Tensor:
        """Return this rank's part of something that has an entry for each row."""
        return rows[self.first : self.first + len(self.own["input_ids"])]


def global_batch(inputs: Mapping[str, Any], world: int) -> GlobalBatch:
    """Return the batches of all ranks' collators as one; ranks call this together.

    Raises:
        ValueError: on every rank, a rank's batch lacks a column, or has one that the walk does not
            follow or that another rank has not.
    """
    if world == 1:
        own = tensors_of(inputs)
        return GlobalBatch(own, own)
    error = ""
    own = {}
    try:
        own = {name: tensor.cpu() for name, tensor in tensors_of(inputs).items()}
    except ValueError as raised:
        error = str(raised)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (own, error))
    for rank, (batch, of_rank) in enumerate(everyone):
        if of_rank:
            raise ValueError(f"rank {rank}: {of_rank}")
        if batch.keys() != own.keys():
            raise ValueError(f"rank {rank} has the columns {', '.join(batch)}: {', '.join(own)}")
    batches = [batch for batch, _ in everyone]
    length = max(batch["input_ids"].shape[1] for batch in batches)
    padded = [lengthened(batch, length) for batch in batches]
    rows = [len(batch["input_ids"]) for batch in batches]
    return GlobalBatch(
        {name: torch.cat([batch[name] for batch in padded]) for name in own},
        own,
        sum(rows[: dist.get_rank()]),
    )


def tensors_of(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a collator's batch.

    Raises:
        ValueError: a column is missing, or one that the walk does not follow.
    """
    if missing := {"input_ids", "labels"} - set(inputs):
        raise ValueError(
            f"the data collator gives no {', '.join(sorted(missing))}; for language modelling take"
            " DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    columns = {name: column for name, column in inputs.items() if column is not None}
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which BlockwalkTrainer does not follow; a walk"
            f" takes {', '.join(COLUMNS)}: leave the others out of the data set or the collator"
        )
    return {name: columns[name] for name in COLUMNS if name in columns}


def in_rows(batch: Mapping[str, Tensor], multiple: int, *, group: int = 1) -> dict[str, Tensor]:
    """Return a batch in rows that so many micro-batches divide, ``group`` of them an example."""
    holds_documents = "position_ids" in batch and "attention_mask" not in batch
    if holds_documents and len(batch["input_ids"]) == 1 < multiple:
        return _rows_of_documents(batch, multiple)
    return filled(batch, multiple, group=group)


def _rows_of_documents(batch: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return one row of documents, tensors [1, N], as ``count`` rows [count, S] of about as many
    tokens: each document whole, the longest first into the shortest row. A token of padding is a
    document by itself, of which nothing is learnt."""
    begins = (batch["position_ids"][0] == 0).nonzero().view(-1).tolist()
    ends = [*begins[1:], batch["position_ids"].shape[1]]
    if not begins or begins[0]:
        return filled(batch, count)
    rows: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    lengths = [0] * count
    for begin, end in sorted(zip(begins, ends, strict=True), key=lambda span: span[0] - span[1]):
        shortest = lengths.index(min(lengths))
        rows[shortest].append((begin, end))
        lengths[shortest] += end - begin
    padding = {"input_ids": 0, "position_ids": 0, "labels": IGNORE}
    laid = {}
    for name, row_N in batch.items():
        laid[name] = row_N.new_full((count, max(lengths)), padding[name])
        for number, spans in enumerate(rows):
            offset = 0
            for begin, end in sorted(spans):
                laid[name][number, offset : offset + end - begin] = row_N[0, begin:end]
                if name == "labels":
                    # Nothing predicts a document's first token.
                    laid[name][number, offset] = IGNORE
                offset += end - begin
    return laid

"""A global batch as this rank walks it: its share, cut into micro-batches of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockwalk.cutting.batch_facts import BatchFacts, note
from blockwalk.data.batch import (
    Batch,
    LearntCounts,
    columns,
    learnt_counts,
    micro_batches,
    numbers_of,
    require_entries,
    require_ids,
    row_order,
    without_numbers,
)
from blockwalk.data.packing import cut_padding, pack_parts
from blockwalk.numerics.device import sent
from blockwalk.numerics.sequence_part import SequencePart
from blockwalk.plan.plan import Plan
from blockwalk.plan.row_order import part_tokens
from blockwalk.program.program import Shape
from blockwalk.ranks.exchange import CountedExchange
from blockwalk.ranks.groups import Groups


@dataclass(frozen=True, slots=True)
class BatchParts:
    """The micro-batches of one walk."""

    parts: Sequence[Batch]
    """Those that this rank has: of its share of the batch, or all of the batch where ranks share
    forwards."""
    shape: Shape
    """The shape of the largest of any rank, as foreseen: of rows that lie side by side as well."""
    counts: LearntCounts
    """Counts of the global batch."""
    copies: int = 0
    """Rows over all ranks that are copies, of which nothing is learnt: what the batch lacked to
    equal parts."""

    @property
    def numbers(self) -> list[dict[str, Tensor]]:
        """An objective's numbers of each, by name."""
        return [numbers_of(part) for part in self.parts]

    @property
    def labels(self) -> list[Tensor]:
        """Labels of each, int64 [B, S], on the CPU."""
        return [part["labels"].to("cpu") for part in self.parts]

    def on(
        self, device: torch.device, *, hides_unseen: bool, place: RowPlace | None = None
    ) -> list[Batch]:
        """Return the micro-batches on a device; ``hides_unseen`` False where padding may be read
        too. With a ``place`` each has the rows' part there beside its tensors, as ``part``."""
        parts = [without_numbers(part) for part in self.parts]
        if place is not None:
            return [place.of(part, device) for part in parts]
        return [_on(part, device, hides_unseen) for part in parts]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A rank's place among those that hold parts of the same sequences."""

    number: int
    count: int
    way: str
    exchange: CountedExchange

    def of(self, batch: Batch, device: torch.device) -> Any:
        """Return a micro-batch on a device: of its own tokens the ids, and the part that they
        are."""
        on_device = {name: sent(tensor, device) for name, tensor in batch.items()}
        part = SequencePart(
            self.number,
            row_order(batch, self.count, batch["input_ids"].shape[1]),
            self.way,
            self.exchange,
            attention_mask_BS=on_device.pop("attention_mask", None),
            position_ids_BS=on_device.pop("position_ids", None),
        )
        return {**on_device, "part": part}


def row_place(plan: Plan, groups: Groups | None) -> RowPlace | None:
    """Return this rank's place among those that hold parts of the same sequences; None where each
    has whole ones."""
    if groups is None or groups.context is None:
        return None
    count = plan.mesh.context
    return RowPlace(groups.rank % count, count, plan.context.way, groups.context)


def cut_shared(
    batch: Batch, plan: Plan, *, packs: bool, vocab_size: int, further_columns: bool = False
) -> BatchParts:
    """Return a global batch cut for ranks that share the forwards of all of it: parts are taken by
    number.

    Args:
        batch: ``input_ids``, ``labels``, ... of every rank together, on the CPU.
        plan: its mesh, whose data axis cuts the batch, and whether padding may go.
        packs: True where short sequences are laid side by side, for a model that keeps them apart.
        vocab_size: rows of the model's embeddings.
        further_columns: True where an objective may read further columns of the batch.

    Raises:
        ValueError: a column is not followed, a token has no row, or the sequences cannot be cut
            into equal parts.
    """
    cuts = plan.gradient_accumulation_steps * plan.mesh.data
    (checked,) = micro_batches(batch, 1, further_columns=further_columns)
    require_entries(checked, plan.objective_facts.needs)
    group = plan.objective_facts.group
    rows = -(-len(checked["input_ids"]) // cuts)
    cut = pack_parts if packs else micro_batches
    parts = cut(checked, cuts, group=group)
    for inputs in parts:
        require_ids(inputs["input_ids"], vocab_size)
    largest = max(part["input_ids"].numel() for part in parts)
    shape = Shape(rows, -(-largest // rows))
    return parts_of(parts, plan, shape, learnt_counts(checked, group), copies=0)


def parts_of(
    parts: Sequence[Batch],
    plan: Plan,
    largest: Shape,
    counts: LearntCounts,
    *,
    copies: int,
    part: int = 0,
) -> BatchParts:
    """Return this rank's micro-batches, of which no rank has a larger one than ``largest``, rid of
    padding that hides nothing; where ranks hold parts of sequences, the part of this number."""
    context = plan.mesh.context
    shape = largest.part(context)
    parts = [cut_padding(batch, unmask=plan.loss_facts.by_chunks) for batch in parts]
    if context > 1:
        parts = [_columns(batch, context, part) for batch in parts]
    return BatchParts(parts, shape, counts, copies)


def _columns(batch: Batch, count: int, number: int) -> Batch:
    tokens = part_tokens(batch["input_ids"].shape[1], count)
    return columns(batch, row_order(batch, count, tokens), number)


def _on(batch: Batch, device: torch.device, hides_unseen: bool) -> Batch:
    """Return a micro-batch on the device, with what a processor knows of it noted."""
    on_device = {name: sent(tensor, device) for name, tensor in batch.items()}
    note(on_device["input_ids"], BatchFacts.of(batch, hides_unseen=hides_unseen))
    return on_device

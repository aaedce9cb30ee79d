"""Zeroth order: every forward of a step while the unit is on the device; deferred updates at the
next fetch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from blockwalk.plan.mesh import Piece, forwards_at, micro_batches_at
from blockwalk.plan.placement import StateKind
from blockwalk.program.costs import Pending
from blockwalk.program.lower import Builder, Turn
from blockwalk.program.program import Lane, OpKind


def zeroth_order(b: Builder, pending: Pending) -> None:
    """Every forward of the step while the unit is on the device; the last step's update first,
    where it is deferred."""
    plan = b.places.plan
    deferred = plan.update.deferred
    passes = forwards_at(plan.mesh, dict(b.coordinates), plan.forward_passes)
    b.walk(forwards(b, b.pieces or local_pieces(b, passes), pending if deferred else Pending()))
    entry = exchange(b)
    if not deferred:
        b.update_all([entry])


def exchange(b: Builder) -> int:
    """Emit the op in which the losses of all ranks become the step's entry of the ledger."""
    losses = [len(b.draft.ops) - 1]
    return b.op(OpKind.EXCHANGE, b.places.last, Lane.COMPUTE, losses, axes=b.everyone)


def local_pieces(b: Builder, passes: Sequence[int]) -> list[Piece]:
    """Return these forwards on each part of the global batch that the rank takes, as micro-batches.
    One perturbed copy of a unit serves all micro-batches of a pass."""
    plan = b.places.plan
    cuts = plan.gradient_accumulation_steps * plan.mesh.data
    return list(product(passes, micro_batches_at(plan.mesh, dict(b.coordinates), cuts)))


def forwards(b: Builder, pieces: Sequence[Piece], pending: Pending = Pending()) -> list[Turn]:
    """Return the turns of a walk in which every unit computes these pieces, after the updates that
    wait for it."""
    kinds = {0: OpKind.PROLOGUE, b.places.last: OpKind.LOSS}

    def work(unit: int, after: tuple[int, ...]) -> list[int]:
        cost = b.cost(unit)
        kind = kinds.get(unit, OpKind.FORWARD)
        updates = _apply_pending(b, unit, pending, after)
        computed = [
            b.op(
                kind,
                unit,
                Lane.COMPUTE,
                [*after, *updates[:1]],
                micro_batch=micro_batch,
                passes=passes,
                flops=len(passes) * cost.forward_flops,
                transient=len(passes) * cost.forward_transient,
                **b.exchanges(unit, cost.forward_sent),
            )
            for passes, micro_batch in (
                batches(b, unit, pieces) if kind is OpKind.FORWARD else singly(pieces)
            )
        ]
        return updates + computed

    return [Turn(unit, partial(work, unit)) for unit in range(b.places.last + 1)]


def batches(b: Builder, unit: int, pieces: Sequence[Piece]) -> list[tuple[range, int]]:
    """Return the batches, (passes, micro-batch), in which a block computes these pieces:
    consecutive passes on a micro-batch, where all its trainables are matrices and vectors."""
    trained = b.places.model.units[unit].part(True)
    batch = b.places.plan.passes_together(b.shape.tokens)
    if batch == 1 or b.pieces or any(len(p.shape) > 2 for p in trained):
        return singly(pieces)
    passes, cuts = (list(dict.fromkeys(numbers)) for numbers in zip(*pieces, strict=True))
    starts = range(0, len(passes), batch)
    return [
        (range(passes[start], passes[start] + min(batch, len(passes) - start)), cut)
        for start in starts
        for cut in cuts
    ]


def singly(pieces: Sequence[Piece]) -> list[tuple[range, int]]:
    """Return these pieces as batches of one pass, (passes, micro-batch)."""
    return [(range(p, p + 1), micro_batch) for p, micro_batch in pieces]


def _apply_pending(b: Builder, unit: int, pending: Pending, after: Sequence[int]) -> list[int]:
    """Apply what is pending to the fetched copy, and write it back where this step flushes.

    A resident unit was brought up to date in every step, so it finds one entry; a streamed one
    finds all that its tier has not seen, and a bucket in slices found them on its way."""
    part = StateKind.TRAINABLE
    entries = b.places.residence(unit, part).pending(pending.entries)
    if not entries or not b.places.model.units[unit].numel(trainable=True):
        return []
    update = b.op(OpKind.UPDATE, unit, Lane.COMPUTE, after, part=part, entries=entries)
    return [update, *(b.store(unit, [update]) if pending.flush else [])]


def flush(b: Builder, pending: Pending) -> None:
    """Apply and write back what is pending, without a forward: before saving, evaluating or
    generating."""
    flushed = Pending(pending.entries, flush=True)
    apply = partial(_apply_pending, b)
    b.walk(
        [Turn(unit, partial(apply, unit, flushed), updates=True) for unit in b.places.sizes.trained]
    )

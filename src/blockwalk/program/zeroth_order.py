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
    b.walk(forwards(b, b.pieces or own_pieces(b, passes), pending if deferred else Pending()))
    done = exchange(b)
    if not deferred:
        b.update_all([done])


def exchange(b: Builder) -> int:
    """Return the losses of all ranks become the step's entry of the ledger."""
    return b.op(
        OpKind.EXCHANGE, b.places.last, Lane.COMPUTE, [len(b.draft.ops) - 1], axes=b.everyone
    )


def own_pieces(b: Builder, passes: Sequence[int]) -> list[Piece]:
    """Return these forwards on each part of the global batch that the rank takes, as
    micro-batches."""
    plan = b.places.plan
    cuts = micro_batches_at(
        plan.mesh, dict(b.coordinates), plan.gradient_accumulation_steps * plan.mesh.data
    )
    return list(
        product(passes, cuts)
    )  # one perturbed copy of a unit serves all micro-batches of a pass


def forwards(b: Builder, pieces: Sequence[Piece], pending: Pending = Pending()) -> list[Turn]:
    """Return the turns of a walk in which every unit computes these pieces, after the updates that
    wait for it."""

    def work(unit: int, after: tuple[int, ...]) -> list[int]:
        cost = b.cost(unit)
        used = _apply_pending(b, unit, pending, after)
        kind = (
            OpKind.PROLOGUE
            if unit == 0
            else OpKind.LOSS
            if unit == b.places.last
            else OpKind.FORWARD
        )
        deps = [*after, *used[:1]]
        together = (
            batches(b, unit, pieces) if kind is OpKind.FORWARD else [(p, m, 1) for p, m in pieces]
        )
        return used + [
            b.op(
                kind, unit, Lane.COMPUTE, deps, micro_batch=m, forward_pass=p, passes=passes,
                flops=passes * cost.forward_flops, transient=passes * cost.forward_transient,
            )
            for p, m, passes in together
        ]  # fmt: skip

    return [Turn(unit, partial(work, unit)) for unit in range(b.places.last + 1)]


def batches(b: Builder, unit: int, pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Return the batches, (first pass, micro-batch, passes), in which a block computes these
    pieces: consecutive passes on a micro-batch, where all its trainables are matrices and
    vectors."""
    trained = b.places.model.units[unit].part(True)
    most = (
        b.places.plan.passes_together(b.shape.tokens)
        if all(len(p.shape) < 3 for p in trained)
        else 1
    )
    passes, cuts = (list(dict.fromkeys(numbers)) for numbers in zip(*pieces, strict=True))
    if most == 1 or b.pieces:
        return [(p, m, 1) for p, m in pieces]
    starts = range(0, len(passes), most)
    return [(passes[at], m, min(most, len(passes) - at)) for at in starts for m in cuts]


def _apply_pending(b: Builder, unit: int, pending: Pending, after: Sequence[int]) -> list[int]:
    """Apply what is pending to the fetched copy, and write it back where this step flushes.

    A resident unit was brought up to date in every step, so it finds one entry; a streamed one
    finds all that its tier has not seen, and a bucket in slices found them on its way."""
    streamed = b.places.streams(unit, StateKind.TRAINABLE)
    entries = pending.entries if streamed else min(pending.entries, 1)
    sliced = streamed and b.places.ranks(StateKind.TRAINABLE) > 1
    if not entries or not b.places.model.units[unit].numel(trainable=True) or sliced:
        return []
    done = b.op(OpKind.UPDATE, unit, Lane.COMPUTE, after, part=StateKind.TRAINABLE, entries=entries)
    return [done, *(b.store(unit, [done]) if pending.flush else [])]


def flush(b: Builder, pending: Pending) -> None:
    """Apply and write back what is pending, without a forward: before saving, evaluating or
    generating."""
    at_once = Pending(pending.entries, flush=True)
    b.walk(
        [
            Turn(unit, partial(_apply_pending, b, unit, at_once), updates=True)
            for unit in b.places.trained
        ]
    )

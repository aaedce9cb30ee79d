"""An evaluation over stages of a pipeline: each micro-batch in turn, while the next stage has the
one before it."""

from __future__ import annotations

from functools import partial

from blockwalk.program.handover import Handover
from blockwalk.program.lower import Builder, Turn
from blockwalk.program.program import Lane, OpKind


def evaluate_stage(b: Builder, batches: int) -> None:
    """Emit one stage's forwards of an evaluation of so many micro-batches."""
    order = [visit for visit in b.stage.visits(batches) if not visit.backwards]
    handover = Handover(b, order, [[m] for m in range(batches)])
    kinds = {0: OpKind.PROLOGUE, b.places.last: OpKind.LOSS}

    def work(unit: int, micro_batch: int, after: tuple[int, ...]) -> list[int]:
        if unit in handover.firsts:
            handover.begin(backwards=False)
        cost = b.cost(unit)
        made = b.op(
            kinds.get(unit, OpKind.FORWARD),
            unit,
            Lane.COMPUTE,
            [*after, *handover.waits(unit, micro_batch)],
            micro_batch=micro_batch,
            flops=cost.forward_flops,
            transient=cost.forward_transient,
            **b.exchanges(unit, cost.forward_sent),
        )
        handover.passed(unit, micro_batch, made)
        return [made]

    turns = [
        Turn(unit, partial(work, unit, visit.group))
        for visit in order
        for unit in b.stage.chunks[visit.chunk]
    ]
    b.walk(turns)

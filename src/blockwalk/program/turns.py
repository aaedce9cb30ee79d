"""Turns: what a step does, unit by unit. The row of an estimator names its own
(:mod:`blockwalk.plan.estimators`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blockwalk.plan.table import resolved
from blockwalk.program.backprop import backprop
from blockwalk.program.costs import Pending
from blockwalk.program.lower import Builder
from blockwalk.program.program import StepKind
from blockwalk.program.stage_forwards import evaluate_stage
from blockwalk.program.zeroth_order import flush, forwards, zeroth_order


@dataclass(frozen=True, slots=True)
class Step:
    """The step that is asked for."""

    kind: StepKind
    pending: Pending = Pending()
    graphs: int = 0
    """The most blocks, from the last one back, whose graphs may be kept."""


Turns = Callable[[Builder, Step], None]
"""A function that emits the ops of a step that trains, or flushes."""


def backprop_turns(b: Builder, step: Step) -> None:
    """Emit forwards and backwards. Nothing waits, so a flush writes nothing back."""
    if step.kind is not StepKind.FLUSH:
        backprop(b, update=step.kind is StepKind.TRAIN, graphs=step.graphs)


def zeroth_order_turns(b: Builder, step: Step) -> None:
    """Emit the forwards of a step, or a flush."""
    assert step.kind is not StepKind.GRADIENTS, "zeroth order makes no gradients"
    if step.kind is StepKind.FLUSH:
        flush(b, step.pending)
    else:
        zeroth_order(b, step.pending)


def emit(b: Builder, step: Step, batches: int) -> None:
    """Emit a step of the plan's estimator. An evaluation is forwards for every plan, of so many
    micro-batches at each unit's turn."""
    if step.kind is StepKind.EVALUATE and b.stage.count > 1:
        evaluate_stage(b, batches)
    elif step.kind is StepKind.EVALUATE:
        b.walk(forwards(b, [(0, micro_batch) for micro_batch in range(batches)]))
    else:
        turns: Turns = resolved(b.places.plan.step_estimator.turns)
        turns(b, step)

"""The table of turns: what a step of each estimator does, unit by unit. A row of
:mod:`blockwalk.plan.estimators` names its turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from blockwalk.plan.table import Table
from blockwalk.program.backprop import backprop
from blockwalk.program.costs import Pending
from blockwalk.program.lower import Builder
from blockwalk.program.mezo_original import mezo_original, replay
from blockwalk.program.program import StepKind
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


def _backprop(b: Builder, step: Step) -> None:
    if step.kind is StepKind.FLUSH:  # nothing waits, so nothing is written back
        return
    backprop(b, update=step.kind is StepKind.TRAIN, graphs=step.graphs)


def _zeroth_order(b: Builder, step: Step) -> None:
    assert step.kind is not StepKind.GRADIENTS, "zeroth order makes no gradients"
    in_place = b.places.plan.noise.in_place
    if step.kind is StepKind.FLUSH:
        (replay if in_place else flush)(b, step.pending)
    else:
        (mezo_original if in_place else zeroth_order)(b, step.pending)


TURNS: Table[Turns] = Table("turns", {"backprop": _backprop, "zeroth_order": _zeroth_order})
"""Turns by name."""


def emit(b: Builder, step: Step, batches: int) -> None:
    """Emit a step of the plan's estimator. An evaluation is forwards for every plan, of so many
    micro-batches at each unit's turn."""
    if step.kind is StepKind.EVALUATE:
        b.walk(forwards(b, [(0, micro_batch) for micro_batch in range(batches)]))
    else:
        TURNS[b.places.plan.estimator.facts.turns](b, step)

"""The original MeZO: weights perturbed and updated where they lie, all of them in one pass of
draws; a forward in between.

A draw depends on those before it in the order of the model's ``named_parameters()``, in which units
alternate: so an op changes the trainables of all units. They are resident; frozen parameters stream
as in every other program."""

from __future__ import annotations

from typing import Any

from blockwalk.plan.placement import StateKind
from blockwalk.program.lower import Builder
from blockwalk.program.program import Lane, OpKind, StepKind
from blockwalk.program.turns import Step
from blockwalk.program.zeroth_order import exchange, forwards, local_pieces


def turns(b: Builder, step: Step) -> None:
    """Emit one step: to θ + ε·z and a forward, to θ − ε·z and a forward, back to θ, and the update.
    A flush is the steps of the ledger that the weights have not seen, without a forward."""
    assert step.kind is not StepKind.GRADIENTS, "zeroth order makes no gradients"
    if step.kind is StepKind.FLUSH:
        _in_place(b, OpKind.REPLAY, entries=step.pending.entries)
        return
    for p in range(2):
        _in_place(b, OpKind.PERTURB, passes=range(p, p + 1))
        b.walk(forwards(b, local_pieces(b, [p])))
    _in_place(b, OpKind.PERTURB, passes=range(2, 3))
    exchange(b)
    _in_place(b, OpKind.UPDATE_ALL)


def _in_place(b: Builder, kind: OpKind, **details: Any) -> int:
    """Return an op on the trainables of all units: beside them a whole parameter's draw, and its
    product with the scale."""
    drawn = 2 * max((p.nbytes for p in b.places.model.params(trainable=True)), default=0)
    previous = [len(b.draft.ops) - 1] if b.draft.ops else []
    return b.op(
        kind, 0, Lane.COMPUTE, previous, part=StateKind.TRAINABLE, transient=drawn, **details
    )

"""Inputs of the compiler beside the plan and the model: costs of units, and the updates that a step
finds pending."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.work import NOTHING, Work
from blockwalk.program.program import OpKind


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The memory and the work of one kind of unit while it computes, for one shape: measured once,
    read by plan, program and simulator."""

    forward_transient: int = 0
    """Peak device bytes of a forward without graph, beyond its input; of a prologue, beyond what it
    saves."""
    backward_transient: int = 0
    """Peak device bytes of recomputing with graph and differentiating, gradients of parameters
    included."""
    saved: int = 0
    """Bytes of activations that a kept graph holds; of a prologue, its hidden state and the tensors
    that its calls hold for the blocks."""
    forward_flops: int = 0
    backward_flops: int = 0
    """FLOPs of differentiating; the recomputation of a block is not included."""
    forward: Work = NOTHING
    """The operations of a forward: those that ``forward_flops`` count, and all others; empty where
    only FLOPs are known."""
    backward: Work = NOTHING
    forward_sent: int = 0
    """Bytes that a forward sends to the ranks that hold the other parts of its sequences."""
    backward_sent: int = 0
    """Bytes that differentiating sends them, without the recomputation."""
    unread: Work = NOTHING
    """The operations of a forward that a recomputation leaves out
    (:mod:`blockwalk.cutting.unread_outputs`). They are already subtracted from ``backward``: add
    them back for a kept graph, which recomputes nothing."""


TimedOp = tuple[OpKind, str, bool]
"""Ops that take the same time: their kind, the kind of their unit, and whether it keeps its
graph."""


@dataclass(frozen=True)
class Costs:
    """Costs by kind of unit, hashable so that programs can be cached."""

    units: tuple[tuple[str, UnitCost], ...] = ()
    scratch: int = 0
    """Device bytes of the buffers that weights are decoded or perturbed into: kept from op to
    op."""
    timed: tuple[tuple[TimedOp, float], ...] = ()
    """Seconds of an op on this machine, where they were measured
    (:mod:`blockwalk.walk.timed_units`)."""

    def of(self, kind: str) -> UnitCost:
        return dict(self.units).get(kind, UnitCost())


@dataclass(frozen=True, slots=True)
class Pending:
    """Deferred updates that a step finds: how many are not in the store yet, and whether this step
    writes them back."""

    entries: int = 0
    flush: bool = False
    dirty: frozenset[int] = frozenset()
    """Sharded over ranks: units whose trainables changed since their node slice was gathered."""

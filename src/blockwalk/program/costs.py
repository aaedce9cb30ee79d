"""Inputs of the compiler beside the plan and the model: costs of units, and the updates that a step
finds pending."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.work import NOTHING, Work
from blockwalk.program.program import OpKind


@dataclass(frozen=True, slots=True)
class GraphCost:
    """The memory of a block's graph, and of differentiating it."""

    nbytes: int = 0
    """Bytes of activations that it holds."""
    transient: int = 0
    """Peak device bytes of differentiating it, beyond those; gradients of parameters included."""


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
    """Bytes of activations that a block's graph holds when it has been made again; of a prologue,
    its hidden state and the tensors that its calls hold for the blocks."""
    forward_flops: int = 0
    backward_flops: int = 0
    """FLOPs of differentiating a kept graph."""
    forward: Work = NOTHING
    """The operations of a forward: those that ``forward_flops`` count, and all others; empty where
    only FLOPs are known."""
    backward: Work = NOTHING
    """The operations of differentiating a kept graph."""
    forward_sent: int = 0
    """Bytes that a forward sends to the ranks that hold the other parts of its sequences."""
    backward_sent: int = 0
    """Bytes that differentiating sends them, without the recomputation."""
    again: Work = NOTHING
    """The operations that a block computes again where it keeps no graph: a forward without what
    nobody reads then (:mod:`blockwalk.cutting.unread_outputs`), and of tiles what they compute once
    more in backward."""
    kept: GraphCost | None = None
    """A kept graph, where it is another than the one that is made again: tiles keep theirs."""

    def graph(self, *, kept: bool) -> GraphCost:
        """Return the memory of a block's graph, of one that is kept or made again."""
        if kept and self.kept is not None:
            return self.kept
        return GraphCost(self.saved, self.backward_transient - self.saved)


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
    uncounted: tuple[tuple[str, str], ...] = ()
    """Operations whose FLOPs could not be counted, with the reason."""

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

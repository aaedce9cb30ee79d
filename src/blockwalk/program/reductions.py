"""Gradients over ranks: the buffers that they are made in, and the sums that leave each rank its
slice.

Gradients accumulate in a rank's slice over the group of ``gradient``. Bytes that one node sends per
optimizer step, with N nodes, parameters and gradients over a node and optimizer states over the
world: (N − 1)/N · n · (b_p + b_g), whatever the number of micro-batches. That is the least for an
exact synchronous step: every node must receive every parameter from the node that updates it, and
that node must receive every other's gradient. Replicas of the optimizer states inside a node send
their sum between nodes once, each a slice of it, and gather it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from blockwalk.plan.mesh import Axis, between, gather_bytes, make_axes, names_of, reach
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.arrive import by_lane
from blockwalk.program.flat_layout import accumulates
from blockwalk.program.lower import Builder
from blockwalk.program.program import Lane, OpKind


@dataclass(slots=True)
class Reductions:
    """The gradient buffers of a program; none where one rank trains."""

    b: Builder
    _open: dict[int, int] = field(default_factory=dict)
    """The buffer of each unit whose gradients are being made."""
    _emptied: dict[int, int] = field(default_factory=dict)
    """The op that last emptied each buffer."""
    _latest: int = 0
    """The buffer that a block last took."""
    _scattered: tuple[Axis, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._scattered = scattered_axes(self.b.places.plan)

    def open(self, unit: int, after: Sequence[int]) -> list[int]:
        """Give a unit, and the prologue with a tied head, a buffer. Return what a backward must
        wait for."""
        places = self.b.places
        deps = list(after)
        for needed in places.needs(unit) if places.pools.gradients else ():
            if needed not in self._open and places.model.units[needed].numel(trainable=True):
                buffer = self._open[needed] = self._next(needed)
                deps += [self._emptied[buffer]] if buffer in self._emptied else []
        return deps

    def buffer(self, unit: int) -> int:
        """Return the buffer of a unit, or -1."""
        return self._open.get(unit, -1)

    def _next(self, unit: int) -> int:
        epilogue = self.b.places.last
        of_ends = self.b.places.pools.gradient_of_end
        if unit in (0, epilogue):
            return of_ends[unit == epilogue]
        self._latest = (self._latest + 1) % of_ends[0]
        return self._latest

    def reduce(self, unit: int, gradients: int, *, complete: bool) -> list[int]:
        """Sum a unit's gradients, which the op ``gradients`` made, over their group; where they are
        complete, over the optimizer's and its replicas as well. Return the ops that do so."""
        if unit not in self._open:
            return []
        plan = self.b.places.plan
        numel = self.b.places.sizes.layout(unit, StateKind.TRAINABLE).numel
        buffer = self._open.pop(unit)
        pieces = self._pieces(complete=complete)
        ops = []
        for k, (lane, axes) in enumerate(pieces):
            inner, outer = reach(axes)
            times = 2 if sums_replicas(plan, axes) else 1  # every replica needs the sum
            reads_buffer = inner < plan.gradient_ranks or k == 0 or not accumulates(plan)
            gradients = self.b.op(
                OpKind.REDUCE,
                unit,
                Lane.INTER_SUMS if lane is Lane.INTER and plan.sums_apart else lane,
                [gradients],
                part=StateKind.GRADIENT,
                axes=names_of(axes),
                slot=buffer if reads_buffer else -1,
                nbytes=times * gather_bytes(axes, 4 * numel // inner),
                last=complete and k == len(pieces) - 1,
            )
            ops.append(gradients)
            if outer == plan.gradient_ranks or not accumulates(plan):
                self._emptied[buffer] = gradients
        if complete and self._scattered:
            gather = self.b.op(
                OpKind.GATHER,
                unit,
                Lane.INTRA,
                [gradients],
                part=StateKind.GRADIENT,
                axes=names_of(self._scattered),
                nbytes=gather_bytes(self._scattered, 4 * numel // plan.optimizer_ranks),
            )
            ops.append(gather)
        return ops

    def _pieces(self, *, complete: bool) -> list[tuple[Lane, tuple[Axis, ...]]]:
        """Return the axes that gradients are summed over, innermost first, in pieces that one lane
        serves and that end at the borders of groups."""
        plan = self.b.places.plan
        mesh = make_axes(plan.mesh)
        ranks = [1, plan.gradient_ranks]
        if complete:
            ranks += [plan.optimizer_ranks, plan.mesh.stage_ranks]
        pieces = [piece for span in pairwise(ranks) for piece in by_lane(between(mesh, *span))]
        if plan.gradient_ranks > 1:
            return pieces
        accumulator = (Lane.INTRA, ())  # which is as large as the buffer
        return [accumulator, *pieces]


def sums_replicas(plan: Plan, axes: Sequence[Axis]) -> bool:
    """Return whether a reduction over these axes leaves its whole sum on each of their ranks: the
    last one over replicas of the optimizer states does. One inside the node before it leaves each
    rank a slice, so that no node sends a sum twice."""
    inner, outer = reach(axes)
    return bool(axes) and inner >= plan.optimizer_ranks and outer == plan.mesh.stage_ranks


def scattered_axes(plan: Plan) -> tuple[Axis, ...]:
    """Return the axes inside the node over which sums of replicas lie in slices when they come from
    the other nodes, and are gathered: those between the group of the optimizer states and the node,
    where other nodes have replicas too."""
    replicas = between(make_axes(plan.mesh), plan.optimizer_ranks, plan.mesh.stage_ranks)
    inside = tuple(axis for axis in replicas if not axis.crosses_nodes)
    return inside if len(inside) < len(replicas) else ()

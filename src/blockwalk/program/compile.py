"""Compile a plan into a program: the one place where the order of a step is decided.

A step is a list of *turns*: the prologue, the blocks forwards, the epilogue, and for backpropagation the blocks
backwards. Each turn names a unit and the work done with it; everything else (fetches ahead of their turn, slots,
evictions, write-backs) is lowered the same way for every plan by :class:`~blockwalk.program.lower.Builder`.
:func:`compile` is pure: the same arguments give the same program on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from blockwalk.plan.choices import Estimator
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.backprop import backprop
from blockwalk.program.costs import Costs, Pending
from blockwalk.program.invariants import check, over_budget
from blockwalk.program.lower import Builder, Turn
from blockwalk.program.program import Lane, OpKind, Pool, Program, Shape, StepKind
from blockwalk.program.residency import Placements, maps_graphs
from blockwalk.program.zeroth_order import flush, zeroth_order


@lru_cache(maxsize=64)
def compile(
    plan: Plan,
    model: ModelSpec,
    step_kind: StepKind,
    shape: Shape,
    *,
    costs: Costs = Costs(),
    pending: Pending = Pending(),
    device: str = "cpu",
    page_cache: int = 0,
) -> Program:
    """The program of one kind of step.

    Args:
        plan: the placements and settings.
        model: the units, in execution order.
        step_kind: train, gradients (no update), evaluate (no gradient) or flush (apply what is pending).
        shape: the shape bucket of one micro-batch.
        costs: transients and FLOPs of each kind of unit at this shape; without them those figures are zero.
        pending: deferred updates that this step finds.
        device: ``cpu`` or ``cuda``. On a CPU, files are mapped instead of copied.
        page_cache: bytes that ``recompute: auto`` may keep in file maps instead of recomputing them (``activation: disk``).

    Raises:
        AssertionError: an invariant of :mod:`blockwalk.program.program` does not hold.
    """

    def lowered(graphs: int) -> Program:
        return _lowered(plan, model, step_kind, shape, costs, pending, device, page_cache, graphs)

    fewest = most = len(model.blocks)
    trains = step_kind in (StepKind.TRAIN, StepKind.GRADIENTS)
    if trains and plan.recompute == "auto" and plan.budget is not None and not maps_graphs(plan, device):
        fewest = 0
    while fewest < most:  # the most graphs with which the whole program stays within the budget
        middle = (fewest + most + 1) // 2
        fewest, most = (fewest, middle - 1) if over_budget(lowered(middle), plan.budget) else (middle, most)
    return lowered(fewest)


def _lowered(
    plan: Plan,
    model: ModelSpec,
    step_kind: StepKind,
    shape: Shape,
    costs: Costs,
    pending: Pending,
    device: str,
    page_cache: int,
    graphs: int,
) -> Program:
    """The program in which at most so many of the last blocks keep their graphs."""
    if plan.sharded:
        from blockwalk.program.sharded import ShardedBuilder, adapts, kept_slices

        trains = step_kind in (StepKind.TRAIN, StepKind.GRADIENTS)
        dirty, keeps = set(pending.dirty), frozenset[tuple[int, StateKind]]()
        if trains and adapts(plan):
            without = replace(plan, cache=replace(plan.cache, threshold=0.0))
            plain = _lowered(without, model, step_kind, shape, costs, pending, device, page_cache, graphs)
            keeps = kept_slices(plan, model, plain)
        builder: Builder = ShardedBuilder(
            plan, model, device, shape, costs, dirty=dirty, differentiates_=trains, keeps=keeps
        )
    elif plan.mesh.slice > 1:
        from blockwalk.program.lower import SliceBuilder

        builder = SliceBuilder(
            plan, model, device, shape, costs, pending=pending, gathers=step_kind is not StepKind.FLUSH
        )
    else:
        builder = Builder(plan, model, device, shape, costs, page_cache)
    if step_kind is StepKind.FLUSH:
        flush(builder, pending)
    elif plan.estimator is Estimator.ZEROTH_ORDER and step_kind is StepKind.TRAIN:
        zeroth_order(builder, pending)
    elif step_kind is StepKind.EVALUATE:
        _evaluate(builder)
    else:
        backprop(builder, update=step_kind is StepKind.TRAIN, graphs=graphs)
    return check(builder.program(step_kind))


def _evaluate(b: Builder) -> None:
    """Forward passes without graph, the loss, nothing else."""

    def work(kind: OpKind, unit: int) -> Callable[[tuple[int, ...]], list[int]]:
        cost = b.costs.of(b.model.units[unit].kind)
        return lambda after: [
            b.op(kind, unit, Lane.COMPUTE, after, flops=cost.forward_flops, transient=cost.forward_transient)
        ]

    turns = [Turn(0, work(OpKind.PROLOGUE, 0))]
    turns += [Turn(i, work(OpKind.FORWARD, i)) for i in range(1, b.last)]
    b.walk([*turns, Turn(b.last, work(OpKind.LOSS, b.last))])


def resident(plan: Plan, model: ModelSpec, *, device: str = "cpu") -> dict[Pool, int]:
    """Bytes that each pool of one rank holds between steps: parameters on their tiers and optimizer states."""
    if plan.sharded:
        from blockwalk.program.flat_layout import sharded_resident

        return sharded_resident(plan, model)
    return Placements(plan, model, device).resident()

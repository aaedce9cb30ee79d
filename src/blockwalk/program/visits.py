"""Micro-batches that visit a block together: how many, where ``together`` is left to the memory
there is.

More of them move fewer bytes: a block's weights arrive once a visit, and its gradients are summed
over ranks once. What they hold at once are the inputs of blocks, and graphs, of every one of
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from blockwalk.plan.plan import AUTO_TOGETHER, Plan
from blockwalk.program.program import OpKind, Pool, Program

Fits = Callable[[Counter[Pool], Counter[Pool]], bool]
"""A function of the peaks of a step whose micro-batches come one by one, and of one in which they
come together: whether there is room for the second."""


def most_together(plan: Plan, program_of: Callable[[Plan], Program], fits: Fits) -> Plan:
    """Return the plan with a number where ``together`` is auto.

    It is the largest of all micro-batches and the powers of two below with which the step fits,
    moves no more bytes on any link than with one, and keeps as many graphs.

    Args:
        program_of: the training step of a plan.
    """
    if plan.together != AUTO_TOGETHER:
        return plan
    alone = replace(plan, together=1)
    least = program_of(alone)
    for count in counts(plan):
        several = replace(plan, together=count)
        program = program_of(several)
        if fits(least.peaks(), program.peaks()) and _no_more_work(least, program):
            return several
    return alone


def counts(plan: Plan) -> Iterator[int]:
    """Yield the numbers above one that are tried: all of a step's micro-batches, then the powers of
    two below.

    >>> list(counts(Plan(gradient_accumulation_steps=12)))
    [12, 8, 4, 2]
    """
    micro_batches = plan.gradient_accumulation_steps
    if micro_batches > 1:
        yield micro_batches
    power = 1 << (micro_batches - 1).bit_length() >> 1
    while power > 1:
        yield power
        power //= 2


def _no_more_work(alone: Program, several: Program) -> bool:
    """Return whether a program moves no more bytes on any link than another, and recomputes no
    more blocks."""
    moved = alone.bytes_by_lane()
    more = any(nbytes > moved.get(lane, 0) for lane, nbytes in several.bytes_by_lane().items())
    return not more and _kept_graphs(several) >= _kept_graphs(alone)


def _kept_graphs(program: Program) -> int:
    return sum(op.keep_graph for op in program.ops if op.kind is OpKind.FORWARD)

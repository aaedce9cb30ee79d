"""Steps of many micro-batches on paper: two short ones are simulated, and a long one is so many of
their difference longer.

Once every lane and every stage is in use, a step of one round more takes the same ops once more. So
seconds, bytes and FLOPs are affine in the micro-batches, and peaks are equal
(``tests/closed_form/test_search.py`` holds this to whole steps)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockwalk.plan.plan import Plan
from blockwalk.simulate.simulator import Simulation

ROUNDS = (2, 3)
"""Rounds of the two short steps. A round is a micro-batch of every stage, or the micro-batches that
visit a block together."""


def short_plans(plan: Plan) -> tuple[Plan, Plan] | None:
    """Return the plan with each of two numbers of micro-batches; None where it has hardly more
    itself."""
    of_round = plan.visit * plan.mesh.pipeline
    steps = plan.gradient_accumulation_steps
    shorter, longer = (rounds * of_round for rounds in ROUNDS)
    # A last round that is not whole is not what the others are.
    longer += steps % of_round
    shorter += steps % of_round
    if steps <= longer + of_round:
        return None
    first, second = (
        replace(plan, gradient_accumulation_steps=count) for count in (shorter, longer)
    )
    return first, second


def lengthened(plan: Plan, first: Simulation, second: Simulation) -> Simulation:
    """Return the simulation of a plan's step, of those of its :func:`short_plans`. Its program and
    its times of single ops are those of the longer one."""
    steps = plan.gradient_accumulation_steps
    of_round = plan.visit * plan.mesh.pipeline
    longer = ROUNDS[1] * of_round + steps % of_round
    times = (steps - longer) / of_round

    def on(one: float, other: float) -> float:
        return other + times * (other - one)

    def each(one: Mapping[Any, float], other: Mapping[Any, float]) -> dict[Any, float]:
        return {key: on(one.get(key, 0.0), value) for key, value in other.items()}

    critical = each(first.critical, second.critical)
    return replace(
        second,
        seconds=on(first.seconds, second.seconds),
        tokens=second.tokens // longer * steps,
        bytes_by_lane={
            lane: int(nbytes)
            for lane, nbytes in each(first.bytes_by_lane, second.bytes_by_lane).items()
        },
        bytes_by_axis={
            axis: int(nbytes)
            for axis, nbytes in each(first.bytes_by_axis, second.bytes_by_axis).items()
        },
        useful_flops=on(first.useful_flops, second.useful_flops),
        critical=dict(sorted(critical.items(), key=lambda item: -item[1])),
    )

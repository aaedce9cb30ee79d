"""Partial residency: the blocks of a plan that stay on the device for good, as many as its budget
holds.

Every block and part is on the device for good, or in a slot while its turn is near, and between
turns on the host or the disk. Which blocks stay is a number, ``plan.resident``: the first so many
of an order in which any beginning lies evenly over the walk
(:func:`blockwalk.program.placements.evenly`). The number is a fact of a run, settled from the
program of its longest step before its model is opened; from there on a block that stays is a unit
whose part does not stream, as the ends of the model are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockwalk.plan.choices import AUTO
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs
from blockwalk.program.placements import Placements
from blockwalk.program.program import Pool, Shape, StepKind


def settled(
    plan: Plan,
    model: ModelSpec,
    shape: Shape,
    costs: Costs,
    *,
    device: str,
    budget: int | None = None,
    **inputs: Any,
) -> Plan:
    """Return the plan with a number where ``resident`` is left to the compiler.

    It is the largest with which the whole program of the training step stays within the budget:
    what the units hold between ops is counted anew for each number, what comes and goes beside it
    once, and the program of the answer is compiled and asked. Activations that ``recompute: auto``
    would keep come after blocks that stay: they fill what is left of the budget.

    Args:
        plan, model, shape, costs, device, inputs: as :func:`~blockwalk.program.compile.compile`
            takes them.
        budget: device bytes that the step may use, unless the plan's own.
    """
    budget = plan.budget if budget is None else budget
    if plan.resident != AUTO or plan.sharded:
        return plan

    every = len(model.blocks)
    places = {n: Placements(replace(plan, resident=n), model, device) for n in (0, every)}
    if budget is None or places[0].travels == places[every].travels:
        return replace(plan, resident=0)

    def held(resident: int) -> int:
        if resident not in places:
            places[resident] = Placements(replace(plan, resident=resident), model, device)
        at = places[resident]
        return at.resident().get(Pool.DEVICE, 0) + sum(at.slot_sizes())

    def peak(resident: int) -> int:
        least = replace(
            plan, resident=resident, recompute="all" if plan.recompute == "auto" else plan.recompute
        )
        program = compile(least, model, StepKind.TRAIN, shape, costs=costs, device=device, **inputs)
        return program.peaks()[Pool.DEVICE]

    none = held(0)
    room = budget - (peak(0) - none)  # blocks are about equal
    block = max((held(every) - none) // every, 1)
    most = min(max((room - none) // block, 0), every)
    while most and (
        held(most) > room or (plan.recompute == "none" and peak(most) > budget)
    ):  # the latter keeps their graphs
        most -= 1
    while most < every and plan.recompute != "none" and held(most + 1) <= room:
        most += 1
    return replace(plan, resident=most)

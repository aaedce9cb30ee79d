"""Partial residency: the blocks of a plan that stay on the device for good, as many as its budget
holds.

Every block is on the device for good, or in a slot while its turn is near, and between turns on the
host or the disk. Which blocks stay is a number, ``plan.resident``: the first so many
of an order in which any beginning lies evenly over the walk
(:func:`blockwalk.program.unit_sizes.evenly`). The number is a fact of a run, settled from the
program of its longest step before its model is opened; from there on a block that stays is a unit
whose part does not stream, as the ends of the model are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from blockwalk.plan.choices import AUTO
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs
from blockwalk.program.placements import Placements
from blockwalk.program.program import Pool, Shape, StepKind
from blockwalk.program.resident_bytes import resident_bytes


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
    if plan.resident != AUTO or plan.home.gathered:
        return plan

    blocks = len(model.blocks)

    @cache
    def placed(resident: int) -> Placements:
        return Placements(replace(plan, resident=resident), model, device)

    if budget is None or placed(0).travels == placed(blocks).travels:
        return replace(plan, resident=0)

    def between_ops(resident: int) -> int:
        places = placed(resident)
        return resident_bytes(places)[Pool.DEVICE] + sum(places.slot_sizes())

    def peak(resident: int) -> int:
        recompute = "all" if plan.recompute == "auto" else plan.recompute
        leanest = replace(plan, resident=resident, recompute=recompute)
        program = compile(
            leanest, model, StepKind.TRAIN, shape, costs=costs, device=device, **inputs
        )
        return program.peaks()[Pool.DEVICE]

    streamed = between_ops(0)
    room = budget - (peak(0) - streamed)  # blocks are about equal
    block_bytes = max((between_ops(blocks) - streamed) // blocks, 1)
    resident = min(max((room - streamed) // block_bytes, 0), blocks)
    keeps_graphs = plan.recompute == "none"  # of every block that stays
    while resident and (between_ops(resident) > room or (keeps_graphs and peak(resident) > budget)):
        resident -= 1
    while resident < blocks and not keeps_graphs and between_ops(resident + 1) <= room:
        resident += 1
    return replace(plan, resident=resident)

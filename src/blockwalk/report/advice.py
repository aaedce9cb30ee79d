"""Advice on the choice of a plan: what the planner is asked for a model, and the next plan where one does not fit.

Importing this imports no torch; asking does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockwalk.program.program import Pool, Shape, human_bytes

if TYPE_CHECKING:
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.run_config import RunConfig
    from blockwalk.simulate.hardware import Hardware
    from blockwalk.simulate.planner import Task


def task(model: str, lora: LoraSettings | None, machine: Hardware, shape: Shape, *, budget: int | None) -> Task:
    """The planner's task for a model's folder or ``config.json``: the model as it is cut, and costs that are measured as the
    planner asks for them, without padding.

    Raises:
        ValueError: there is no such model, or it cannot be cut.
    """
    from blockwalk.report.forecast import model_spec
    from blockwalk.simulate.planner import Task
    from blockwalk.walk.unit_costs import UnitCosts

    costs = UnitCosts(model, lora=lora, device=machine.device)
    return Task(model_spec(model, costs), costs, machine, shape, budget)


def next_plan(run: RunConfig, room: int, shape: Shape, *, device: str) -> str:
    """The fastest plan for one rank that needs less than ``room`` bytes of memory, in words; empty where none is known.
    ``shape`` is that of a micro-batch."""
    from blockwalk.simulate import hardware, planner

    try:
        found = planner.rank(task(run.model, run.lora, hardware.of_this_machine(device), shape, budget=room))
    except ValueError:  # a model that is no folder, or adapters that cannot be made anew
        return ""
    fits = (c for c in found.ranked if c.plan.mesh.world == 1 and c.plan != run.plan)
    if (best := next(fits, None)) is None:
        alone = ", or train adapters (lora.rank: 8)" if run.lora is None else ""
        return f"; no plan of this model fits {human_bytes(room)}: lower batch_size or data.max_length{alone}"
    held = best.peaks.get(Pool.DEVICE, 0) + (best.peaks.get(Pool.HOST, 0) if device == "cpu" else 0)
    return f"; the next plan that fits: {settings_of(best.plan)} ({best.label}), {human_bytes(held)} of tensors"


def settings_of(plan: object) -> str:
    """A plan as the settings that ask for it: what tells it from its method's row."""
    from dataclasses import fields

    from blockwalk.plan.methods import METHODS
    from blockwalk.plan.placement import Placement
    from blockwalk.plan.plan import Plan

    assert isinstance(plan, Plan)
    row = METHODS[plan.method]()
    words = [f"method: {plan.method}"]
    for each in fields(plan):
        mine, default = getattr(plan, each.name), getattr(row, each.name)
        if mine != default and isinstance(mine, str | int | Placement) and each.name != "budget":
            words.append(f"{each.name}: {mine}")
    return ", ".join(words)

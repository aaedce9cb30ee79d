"""Advice for a plan that does not fit: the next plan that does, with its figures. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockwalk.program.program import Pool, Shape, human_bytes

if TYPE_CHECKING:
    from blockwalk.plan.run_config import RunConfig


def next_plan(run: RunConfig, room: int, shape: Shape, *, device: str) -> str:
    """The fastest plan for one rank that needs less than ``room`` bytes of memory, in words; empty where none is known.
    ``shape`` is that of a micro-batch."""
    from blockwalk.simulate import formula_model as analytic
    from blockwalk.simulate import hardware, planner

    machine = hardware.of_this_machine(device)
    try:
        task = planner.Task(
            config=analytic.read_config(run.model),
            hardware=machine,
            batch=shape.batch,
            sequence=shape.sequence,
            lora_rank=None if run.lora is None else run.lora.rank,
            budget=room,
        )
        found = planner.rank(task)
    except (ValueError, KeyError, FileNotFoundError):  # no configuration that a formula describes
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

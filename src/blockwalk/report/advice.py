"""What a user can do when a plan does not fit: the next plan that does, with its figures. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockwalk.program import Pool, Shape, human_bytes

if TYPE_CHECKING:
    from blockwalk.config import RunConfig


class OutOfMemory(RuntimeError):
    """A run was refused memory while it ran; the message has the forecast, what was measured, and the next plan that fits."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocator's, of the interpreter, a processor or an accelerator."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error))
    )


def next_plan(run: RunConfig, room: int, shape: Shape, *, device: str) -> str:
    """The fastest plan for one rank that needs less than ``room`` bytes of memory, in words; empty where none is known.
    ``shape`` is that of a micro-batch."""
    from blockwalk import planner
    from blockwalk.simulate import analytic, hardware

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

    from blockwalk.methods import METHODS
    from blockwalk.plan import Plan
    from blockwalk.state import Placement

    assert isinstance(plan, Plan)
    row = METHODS[plan.method]()
    words = [f"method: {plan.method}"]
    for each in fields(plan):
        mine, default = getattr(plan, each.name), getattr(row, each.name)
        if mine != default and isinstance(mine, str | int | Placement) and each.name != "budget":
            words.append(f"{each.name}: {mine}")
    return ", ".join(words)

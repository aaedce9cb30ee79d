"""Advice on the choice of a plan: what the planner is asked for a model, and the next plan where
one does not fit.

Importing this imports no torch; asking does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from blockwalk.plan.choices import AUTO, Adapters, LoraSettings, PrefixSettings
from blockwalk.plan.methods import method
from blockwalk.plan.parsing import plain_values, setting_of
from blockwalk.plan.placement import NOBODY, Placement
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.settings import unnamed_codec
from blockwalk.program.program import Pool, Shape, human_bytes
from blockwalk.report.machine import this_machine
from blockwalk.simulate import planner
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.planner import Task


def task(
    model: str,
    lora: Adapters | None,
    machine: Hardware,
    shape: Shape,
    *,
    budget: int | None,
    micro_batches: int = 1,
    tokens: int = 0,
) -> Task:
    """Return the planner's task for a model's folder or ``config.json``: the model as it is cut,
    and costs that are measured as the planner asks for them, without padding.

    Raises:
        ValueError: there is no such model, or it cannot be cut.
    """
    from blockwalk.report.foresee import model_spec
    from blockwalk.walk.unit_costs import UnitCosts

    costs = UnitCosts(model, lora=lora, device=machine.device)
    may = machine.world > 1 and shape.sequence > planner.PARTS_FROM
    parts = may and _has_parts(model, lora)
    spec = model_spec(model, costs)
    return Task(spec, costs, machine, shape, budget, micro_batches, parts, tokens)


def _has_parts(model: str, lora: Adapters | None) -> bool:
    """Return whether ranks may hold parts of a model's sequences: tried once, on a small one."""
    from blockwalk.walk.context_check import require_parts

    if isinstance(lora, PrefixSettings):
        return False
    try:
        require_parts(model, method("hzp", mesh={"world": 2, "context": 2}))
    except ValueError:
        return False
    return True


def next_plan(
    run: RunConfig, room: int | None, shape: Shape, *, device: str, host: int | None = None
) -> str:
    """Return the fastest plan for one rank that fits, in words; empty where none is known.
    ``shape`` is that of a micro-batch.

    Args:
        room: bytes of the device's memory that it may need; None: as many as a plan of this machine
            may.
        host: bytes of the host's memory that it may need beside an accelerator; None: those of this
            machine.
    """
    try:
        machine = this_machine(device)
        steps = run.plan.gradient_accumulation_steps
        if host is not None:
            machine = replace(machine, host_bytes=host)
        ranking = planner.rank(
            task(run.model, run.adapters, machine, shape, budget=room, micro_batches=steps)
        )
    except ValueError:  # a model that is no folder, or adapters that cannot be made anew
        return ""
    fits = (c for c in ranking.ranked if c.plan.mesh.world == 1 and c.plan != run.plan)
    if (best := next(fits, None)) is None:
        adapters = ", or train adapters (lora.rank: 8)" if run.adapters is None else ""
        limit = human_bytes(machine.usable_bytes if room is None else room)
        host_limit = "" if host is None else f" beside {human_bytes(host)} of the host's"
        return (
            f"; no plan of this model fits {limit}{host_limit}: lower batch_size or"
            f" data.max_length{adapters}"
        )
    nbytes = best.peaks[Pool.DEVICE] + (best.peaks[Pool.HOST] if device == "cpu" else 0)
    return (
        f"; the next plan that fits: {settings_text(best.plan)} ({best.label}),"
        f" {human_bytes(nbytes)} of tensors"
    )


def settings_text(plan: Plan) -> str:
    """Return a plan as the settings that ask for it: what tells it from its method's row."""
    settings = differing(plan)
    inner = {f"mesh.{name}": value for name, value in settings.pop("mesh", {}).items()}
    return ", ".join(f"{name}: {value}" for name, value in {**settings, **inner}.items())


def differing(plan: Plan) -> dict[str, Any]:
    """Return the method of a plan, and each setting that a run of the method has otherwise unless
    it is named, by name."""
    row = unnamed_codec(method(plan.method))
    settings: dict[str, Any] = {"method": plan.method}
    for field in fields(plan):
        value = getattr(plan, field.name)
        default = getattr(row, field.name)
        if value != default and isinstance(value, str | int | Placement) and field.name != "budget":
            settings[field.name] = value if isinstance(value, str | int) else str(value)
    mesh = {"context": plan.mesh.context, "pipeline": plan.mesh.pipeline}
    cut = {name: ranks for name, ranks in mesh.items() if ranks > 1}
    return {**settings, **({"mesh": cut} if cut else {})}


def recommended(run: RunConfig, plan: Plan) -> dict[str, Any]:
    """Return the settings of a run under another plan, to be copied: the plan's, and those of the
    run that are not the defaults. A micro-batch has as many sequences as the run's."""

    def changed(values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value != default[name]}

    settings = run.to_mapping()
    default = RunConfig().to_mapping()
    settings["batch_size"] = -(-run.batch_size // run.plan.cuts) * plan.cuts
    names = [
        setting_of(field.name)
        for field in fields(RunConfig)
        if field.name not in ("plan", "model", "named")
    ]
    run_settings = changed({name: settings[name] for name in names}, default)
    optimizer = (
        {}
        if run.plan.estimator is not plan.estimator
        else changed(settings["optimizer"], default["optimizer"])
    )
    nested = {
        "data": changed(settings["data"], default["data"]),
        "lora": settings["lora"],
        "optimizer": optimizer,
    }
    if settings["lora"]:
        nested["lora"] = {
            "rank": settings["lora"]["rank"],
            **changed(settings["lora"], plain_values(LoraSettings())),
        }
    budget = {"budget": run.plan.budget} if run.plan.budget else {}
    plan_settings = differing(plan)
    # 0 is as without the setting: none are kept, or as many as a budget has room for
    if not plan_settings.get("resident", AUTO):
        del plan_settings["resident"]
    parts = {"model": settings["model"], **plan_settings, **run_settings, **nested, **budget}
    return {name: _of_one(value) for name, value in parts.items() if value != {}}


def _of_one(value: Any) -> Any:
    """Return a setting's value; of a placement that is spread over no ranks, tier and codec."""
    return value.removesuffix(f" × {NOBODY}") if isinstance(value, str) else value

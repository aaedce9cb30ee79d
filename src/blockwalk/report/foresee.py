"""Foreseeing: the forecast of a run, read off its model's configuration and this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.program.costs import Costs
from blockwalk.program.program import Shape, StepKind
from blockwalk.program.settling import settle
from blockwalk.program.state_sizes import compute_dtype
from blockwalk.report import machine
from blockwalk.report.forecast import Forecast
from blockwalk.simulate import process_memory
from blockwalk.simulate.seconds import CostModel
from blockwalk.system.card import Card

if TYPE_CHECKING:
    from blockwalk.plan.run_config import RunConfig
    from blockwalk.walk.unit_costs import UnitCosts


def foresee(
    run: RunConfig,
    shape: Shape,
    measured: UnitCosts,
    visit: tuple[Shape, int] | None = None,
    steps: float = math.inf,
    *,
    learnt: float = 1.0,
) -> Forecast:
    """Return the forecast of a run's training step at the shape of a micro-batch, read off the
    model's configuration alone: no weight is touched. Its plan has what this machine decides: see
    :func:`blockwalk.program.settling.settle`.

    Args:
        visit: the shape of a batch of held-out data, and how many of them a visit of a block
            computes.
        steps: the run's, as far as they are known.
        learnt: the part of the tokens that have a label.
    """
    from blockwalk.program.compile import checkpoint_copies, compile, compile_ranks

    device = measured.device
    context = run.plan.mesh.context
    shape = shape.part(context)
    room = machine.room(Path(run.output_dir), measured.device)
    model = model_spec(run.model, measured)
    costs = measured(run.plan, shape)
    priced = CostModel(run.plan, model, machine.this_machine(device), costs)
    facts: Any = {"device": device, "room": room, "named": run.named, "price": priced.work_seconds}
    settled = settle(run.plan, model, shape, costs, **facts)
    plan = settled.plan
    programs = compile_ranks(
        plan, model, StepKind.TRAIN, shape, costs=costs, device=device, page_cache=room.page_cache
    )
    held_out = None
    if visit is not None:
        of_part = visit[0].part(context)
        arguments: Any = {
            "costs": measured(run.plan, of_part),
            "batches": visit[1],
            "device": device,
        }
        if plan.mesh.pipeline == 1:
            held_out = compile(plan, model, StepKind.EVALUATE, of_part, **arguments)
        else:
            of_stages = compile_ranks(plan, model, StepKind.EVALUATE, of_part, **arguments)
            held_out = max(of_stages, key=process_memory.tensors)
    notes = (
        *settled.notes,
        *without_bfloat16(machine.card(device), plan, model),
        *uncounted(costs),
    )
    description = machine.this_machine(device)
    if description.measured:
        try:
            costs = replace(costs, timed=measured.timed(plan, shape, repr(description), learnt))
        except Exception as error:  # nothing that is only foreseen ends a run
            reason = str(error) or type(error).__name__
            notes = (*notes, f"note: seconds are foreseen by doctor's rates alone: {reason}")
    decided = (settled.names, notes, room.device_free)
    copied = checkpoint_copies(plan, model, device=device) if run.saves_before(steps) else ()
    return Forecast(plan, model, programs, device, costs, held_out, *decided, copied)


def without_bfloat16(card: Card, plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Yield a sentence where a plan computes in bfloat16 and the card has no such arithmetic: a
    T4's or an RTX 20's products and attention take their slowest ways then. Nothing is refused: the
    numbers are right."""
    if not card.bfloat16 and compute_dtype(plan, model) == "bfloat16":
        other = "float32" if plan.estimator.facts.walks_back else "float32, or float16"
        yield (
            f"note: {card.name or 'this card'} has no bfloat16 arithmetic, and the plan computes in"
            f" bfloat16, slowly there: set compute_dtype: {other}"
        )


def uncounted(costs: Costs) -> Iterator[str]:
    """Yield a sentence on the operations whose FLOPs could not be counted."""
    for operation, reason in costs.uncounted:
        yield (
            f"note: the FLOPs of {operation} are not counted, and the seconds foreseen lack them"
            f" ({reason})"
        )


def model_spec(model: str, measured: UnitCosts) -> ModelSpec:
    """Return the model of a folder as the walk will see it, adapters included and stored as it is
    there; no weight is read."""
    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.models.model_source import model_source
    from blockwalk.tiers.block_store.store import read_index
    from blockwalk.tiers.model_folder.folder import CheckpointFolder
    from blockwalk.tiers.protocols import as_stored

    spec = measured.spec()
    files = model_source(model)
    if files.packed:
        index = read_index(model)
        stored = {p.name: p.codec for unit in index.units for p in unit.params}
        return spec.as_stored(
            lambda p: replace(p, codec=stored.get(p.name, p.codec), group_size=index.group_size)
        )
    if files.codec is None:
        return spec
    folder = CheckpointFolder(files, build_skeleton(files))  # its header alone is read
    names = set(folder.names())
    stored_spec = spec.as_stored(lambda p: as_stored(p, folder) if p.name in names else p)
    folder.close()
    return stored_spec

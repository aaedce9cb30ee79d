"""Oracle: the definition, written down here from names of tiers and groups alone. Where each kind
of state of each unit lives, for plans sampled over methods, tiers, groups, stages and blocks that
stay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.plan.tiers import TIERS
from blockwalk.program.compile import compile
from blockwalk.program.placements import Placements
from blockwalk.program.program import OpKind, Shape, StepKind
from blockwalk.program.residence import RESIDENCES, UPDATERS, resolve, updater
from blockwalk.program.stages import part_of, stage_at
from blockwalk.program.unit_sizes import UnitSizes
from tests.golden.specs import MODELS
from tests.support.messages import refused

pytestmark = pytest.mark.fast

PARTS = (StateKind.FROZEN, StateKind.TRAINABLE)
DEVICES = ("cpu", "cuda")
MESHES: tuple[dict[str, Any], ...] = (
    {},
    {"resident": 1},
    {"mesh.world": 4, "mesh.ranks_per_node": 2},
    {"mesh.world": 4, "mesh.ranks_per_node": 2, "update.timing": "block"},
    {"mesh.world": 4, "mesh.ranks_per_node": 2, "frozen.group": "node"},
    {"mesh.world": 4, "mesh.ranks_per_node": 2, "trainable.group": "node"},
    {"mesh.world": 4, "mesh.ranks_per_node": 2, "mesh.pipeline": 2},
    {
        "mesh.world": 8,
        "mesh.ranks_per_node": 4,
        "mesh.groups": {"pair": 2},
        "trainable.group": "pair",
        "frozen.group": "pair",
    },
    {"gradient_accumulation_steps": 2, "update.timing": "step", "gradient.tier": "disk"},
)


@cache
def plans() -> tuple[Plan, ...]:
    """Every plan of the sample that is accepted, once."""
    accepted: dict[Plan, None] = {}
    tiers = (None, *TIERS)
    for name, mesh in itertools.product(METHODS, MESHES):
        for frozen, trainable, states in itertools.product(tiers, tiers, tiers):
            placed = {"frozen": frozen, "trainable": trainable, "optimizer_state": states}
            settings = {f"{kind}.tier": tier for kind, tier in placed.items() if tier}
            try:
                accepted[method(name, **mesh, **settings)] = None
            except ValueError:
                continue
    return tuple(accepted)


def sample() -> Iterator[UnitSizes]:
    """Every plan of the sample, with each model and device that it takes."""
    for plan, model, device in itertools.product(plans(), MODELS.values(), DEVICES):
        for stage in range(plan.mesh.pipeline):
            held = part_of(stage_at(plan, model, (("pipeline", stage),)), model)
            yield UnitSizes(plan, held, device)


def has(model: ModelSpec, unit: int, *, trains: bool, read: bool = False) -> bool:
    """Whether a unit has, or its turn reads, trained or frozen parameters."""
    params = list(model.units[unit].params)
    if read and unit == len(model.blocks) + 1:
        tied = {canonical for _, canonical in model.tied}
        params += [p for p in model.prologue.params if p.name in tied]
    return any(p.trainable is trains for p in params)


def few(model: ModelSpec) -> bool:
    trained = sum(p.numel for unit in model.units for p in unit.params if p.trainable)
    return trained < max(sum(p.numel for p in block.params) for block in model.blocks)


def ranks_of(plan: Plan, group: str) -> int:
    sizes = {"nobody": 1, "node": plan.mesh.ranks_per_node, "world": plan.mesh.world}
    return {**sizes, **dict(plan.mesh.groups)}[group]


def by_host(plan: Plan, device: str) -> bool:
    """Whether the processor behind an accelerator updates: every rule of the sample that has
    optimizer states updates where they lie."""
    states = plan.optimizer_state if plan.optimizer.name == "adamw" else plan.trainable
    return device == "cuda" and plan.estimator == "backprop" and states.tier != "device"


def is_spread(plan: Plan) -> bool:
    kinds = (plan.trainable, plan.gradient, plan.optimizer_state)
    return plan.estimator == "backprop" and any(placed.group != "nobody" for placed in kinds)


def of_part(plan: Plan, model: ModelSpec, device: str, unit: int, part: StateKind) -> str:
    trains = part is StateKind.TRAINABLE
    first_order = plan.estimator == "backprop"
    placed = plan.trainable if trains else plan.frozen
    last = len(model.blocks) + 1
    if is_spread(plan):
        return "gathered" if has(model, unit, trains=trains) else "resident"
    reads = has(model, unit, trains=trains, read=True)
    if placed.tier == "disk" and device == "cpu" and (first_order or not trains):
        return "mapped" if reads and not (trains and few(model)) else "paged"
    if placed.tier == "device" or not reads or (trains and few(model)) or unit in (0, last):
        return "resident"
    if plan.resident > 0 and not (first_order and trains):
        stay = {1} if plan.resident == 1 else set(range(1, last))
        if unit in stay:
            return "resident"
    shared = 1 if first_order else ranks_of(plan, placed.group)
    if not trains and placed.tier == "disk":
        shared = 1  # a file is one copy for all
    if placed.tier == "host" and device == "cpu" and trains and not first_order and shared == 1:
        return "resident"  # its memory is the device's
    if shared > 1:
        return "sliced"
    return "copied" if trains and by_host(plan, device) else "streamed"


def of_states(plan: Plan, model: ModelSpec, device: str) -> str:
    if plan.estimator == "zeroth-order":
        return "inside"
    if plan.optimizer_state.tier == "disk" and device == "cpu":
        return "paged" if few(model) else "mapped"
    return "resident"


def of_gradients(plan: Plan, device: str) -> str:
    at_turn = plan.update.timing == "block"
    in_maps = plan.gradient.tier == "disk" and device == "cpu" and plan.estimator == "backprop"
    return "mapped" if in_maps and not at_turn else "resident"


def of_update(plan: Plan, device: str) -> str:
    if plan.estimator == "zeroth-order":
        return "visit"
    if is_spread(plan):
        return "behind" if plan.update.timing == "block" else "compute"
    return "host" if by_host(plan, device) else "compute"


def test_every_way_that_occurs_has_its_row() -> None:
    ways: set[tuple[str, ...]] = set()
    for sizes in sample():
        plan, model, device = sizes.plan, sizes.model, sizes.device
        try:
            residences = resolve(sizes)
        except ValueError:
            # masters off the device whose states are on it
            assert device == "cuda"
            assert plan.trainable.tier != "device"
            assert plan.optimizer_state.tier == "device"
            assert not few(model)
            continue
        update = of_update(plan, device)
        assert {updater(sizes, unit) for unit in range(len(model.blocks) + 2)} == {update}
        for unit in range(len(model.blocks) + 2):
            names = {kind: residences[unit, kind].name for kind in PARTS}
            for part in PARTS:
                assert names[part] == of_part(plan, model, device, unit, part), (plan, unit, part)
            states = residences[unit, StateKind.OPTIMIZER].name
            gradient = residences[unit, StateKind.GRADIENT].name
            if not is_spread(plan):
                assert states == of_states(plan, model, device)
                assert gradient == of_gradients(plan, device)
            ways.add((*names.values(), states, gradient, update))
    assert {name for way in ways for name in way[:4]} == set(RESIDENCES)
    assert {way[4] for way in ways} == set(UPDATERS)


def test_the_page_has_every_row_with_its_mover() -> None:
    """Oracle: the table of docs/architecture.md."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| residence | arrives by | mover |")[2].partition("\n\n")[0]
    cells = [line.split("|") for line in table.splitlines()[2:]]
    of_page = {line[1].strip(): line[3].strip().strip("`") for line in cells}
    of_rows = {name: str(row.mover).rpartition(":")[2] for name, row in RESIDENCES.items()}
    assert of_page == of_rows


def test_what_arrives_is_what_programs_bring() -> None:
    """Oracle: the ops of an evaluation, which brings every part that is not where it is used."""
    for plan in plans()[::7]:
        if plan.mesh.pipeline > 1:
            continue
        for model, device in itertools.product(MODELS.values(), DEVICES):
            try:
                places = Placements(plan, model, device)
            except ValueError:
                continue
            program = compile(plan, model, StepKind.EVALUATE, Shape(1, 8), device=device)
            brought = {
                (op.unit, op.part)
                for op in program.ops
                if op.kind in (OpKind.FETCH, OpKind.GATHER) and op.part in PARTS
            }
            assert brought == {
                (unit, part)
                for unit in range(places.last + 1)
                for part in PARTS
                if places.residence(unit, part).arrive is not None
            }


def test_masters_that_no_update_could_reach_are_refused() -> None:
    plan = method("plain", **{"trainable.tier": "host"})
    with refused(ValueError, "trainable optimizer_state host device"):
        Placements(plan, MODELS["opt"], "cuda")

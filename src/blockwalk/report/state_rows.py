"""Kinds of state of a plan: the tier that each lies on, and the bytes that it takes there.

Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from blockwalk.plan.model_spec import ModelSpec, encoded_nbytes
from blockwalk.plan.placement import NOBODY, Codec, Placement, StateKind, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.zeroth_order_kinds import states_beside
from blockwalk.program.placements import Placements
from blockwalk.program.program import OpKind, Pool, Program

_RESIDENT = next(tier for tier in Tier if tier.facts.resident)


@dataclass(frozen=True, slots=True)
class StateRow:
    """One kind of state: its placement, its bytes there, and a note on it."""

    kind: str
    placement: Placement
    nbytes: int
    note: str = ""


def state_rows(plan: Plan, model: ModelSpec, program: Program, device: str) -> Iterator[StateRow]:
    """Yield each kind of state of a step, in the order of the forecast's table."""
    places = Placements(plan, model, device)
    frozen = f"{model.numel(trainable=False):,} parameters"
    yield StateRow("frozen", plan.frozen, _stored(model, plan.frozen, trainable=False), frozen)
    trainable = _trainable(plan, model, places)
    yield trainable
    if plan.estimator.facts.walks_back:
        yield _gradient(plan, model, places)
    yield _optimizer(plan, model, places, trainable.placement)
    if plan.estimator.facts.walks_back:
        saves = (op for op in program.ops if op.kind is OpKind.SAVE)
        nbytes = sum(size for op in saves for _, size in op.takes)
        note = "activation checkpoints of one step"
        yield StateRow("activation", plan.activation, nbytes, note)


def _stored(model: ModelSpec, placement: Placement, *, trainable: bool) -> int:
    return sum(unit.nbytes(placement.codec, trainable=trainable) for unit in model.units)


def _trainable(plan: Plan, model: ModelSpec, places: Placements) -> StateRow:
    placement = plan.trainable
    note = f"{model.numel(trainable=True):,} parameters"
    if _stays(places):
        placement = replace(placement, tier=_RESIDENT, group=NOBODY)
        note += f", fewer than a block's: they stay there, not on the {plan.trainable.tier}"
    nbytes = _stored(model, plan.trainable, trainable=True)
    return StateRow("trainable", placement, nbytes, note)


def _stays(places: Placements) -> bool:
    """Return whether trainables that the plan puts on another tier are on the device all the same,
    for they are few."""
    sizes = places.sizes
    rows = (places.residence(unit, StateKind.TRAINABLE) for unit in sizes.trained)
    off_device = not sizes.plan.trainable.tier.facts.resident
    return off_device and sizes.few and all(row.pool is Pool.DEVICE for row in rows)


def _gradient(plan: Plan, model: ModelSpec, places: Placements) -> StateRow:
    """Return float32 gradients; one that is used at its block's turn is at most one unit's."""
    placement = plan.gradient
    if not places.pools.gradients and places.gradient_pool is Pool.DEVICE:
        placement = replace(placement, tier=_RESIDENT)
    elements = model.numel(trainable=True)
    note = "accumulated to the step's end"
    if plan.update.at_turn:
        elements = max(unit.numel(trainable=True) for unit in model.units)
        note = "of one unit: used at its turn"
    return StateRow("gradient", placement, 4 * elements, note)


def _optimizer(plan: Plan, model: ModelSpec, places: Placements, trainable: Placement) -> StateRow:
    """Return the update rule's states: those of a bucket travel with the trainables in it."""
    trained = model.numel(trainable=True)
    placement = plan.optimizer_state
    nbytes = 4 * len(plan.update_rule.states) * trained
    if plan.home.states_inside:
        codecs = [codec for codec, _ in states_beside(plan.zo, plan.optimizer).values()]
        placement = replace(trainable, codec=next(iter(codecs), Codec.FP32))
        nbytes = sum(encoded_nbytes((trained,), "float32", codec) for codec in codecs)
    elif places.sizes.few and places.landings:
        placement = replace(placement, tier=places.residences[0, StateKind.OPTIMIZER].tier)
    return StateRow("optimizer", placement, nbytes, plan.optimizer.name)

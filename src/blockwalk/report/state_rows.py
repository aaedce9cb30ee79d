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
from blockwalk.program.residence import device_tier
from blockwalk.program.state_sizes import pool_of

_DEVICE = device_tier()


@dataclass(frozen=True, slots=True)
class StateRow:
    """One kind of state: its placement, its bytes there, and a note on it."""

    kind: str
    placement: Placement
    nbytes: int
    note: str = ""
    in_files: int = 0
    """Those of its bytes, with float32 masters of slices, that lie in files on the disk."""


def state_rows(plan: Plan, model: ModelSpec, program: Program, device: str) -> Iterator[StateRow]:
    """Yield each kind of state of a step, in the order of the forecast's table."""
    places = Placements(plan, model, device)
    frozen = f"{model.numel(trainable=False):,} parameters"
    yield _row("frozen", plan.frozen, _stored(model, plan.frozen, trainable=False), frozen)
    trainable = _trainable(plan, model, places)
    yield trainable
    if plan.estimator.facts.walks_back:
        yield _gradient(plan, model, places)
    yield _optimizer(plan, model, places, trainable.placement)
    if plan.estimator.facts.walks_back:
        saves = (op for op in program.ops if op.kind is OpKind.SAVE)
        nbytes = sum(size for op in saves for _, size in op.takes)
        note = "activation checkpoints of one step"
        yield _row("activation", plan.activation, nbytes, note)


def _row(kind: str, placement: Placement, nbytes: int, note: str) -> StateRow:
    """Return a kind of state that lies on one tier."""
    return StateRow(kind, placement, nbytes, note, _in_files(placement.tier, nbytes))


def _in_files(tier: Tier, nbytes: int) -> int:
    return nbytes if pool_of(tier) is Pool.DISK else 0


def _stored(model: ModelSpec, placement: Placement, *, trainable: bool) -> int:
    return sum(unit.nbytes(placement.codec, trainable=trainable) for unit in model.units)


def _trainable(plan: Plan, model: ModelSpec, places: Placements) -> StateRow:
    placement = plan.trainable
    note = f"{model.numel(trainable=True):,} parameters"
    if _stays(places):
        placement = replace(placement, tier=_DEVICE, group=NOBODY)
        note += f", fewer than a block's: they stay there, not on the {plan.trainable.tier}"
    nbytes = _stored(model, plan.trainable, trainable=True)
    return _row("trainable", placement, nbytes, note)


def _stays(places: Placements) -> bool:
    """Return whether trainables that the plan puts on another tier are on the device all the same,
    for they are few."""
    sizes = places.sizes
    rows = (places.residence(unit, StateKind.TRAINABLE) for unit in sizes.trained)
    off_device = sizes.plan.trainable.tier != _DEVICE
    return off_device and sizes.few and all(row.pool is Pool.DEVICE for row in rows)


def _gradient(plan: Plan, model: ModelSpec, places: Placements) -> StateRow:
    """Return float32 gradients; one that is used at its block's turn is at most one unit's."""
    placement = plan.gradient
    if not places.pools.gradients and places.gradient_pool is Pool.DEVICE:
        placement = replace(placement, tier=_DEVICE)
    elements = model.numel(trainable=True)
    note = "accumulated to the step's end"
    if plan.update.at_turn:
        elements = max(unit.numel(trainable=True) for unit in model.units)
        note = "of one unit: used at its turn"
    return _row("gradient", placement, 4 * elements, note)


def _optimizer(plan: Plan, model: ModelSpec, places: Placements, trainable: Placement) -> StateRow:
    """Return the update rule's states: those of a bucket travel with the trainables in it. Of a
    tier that is made of shares the units' lie on several."""
    trained = model.numel(trainable=True)
    name = plan.optimizer.name
    residences = [places.residences[unit, StateKind.OPTIMIZER] for unit in places.sizes.trained]
    if any(residence.facts.within for residence in residences):
        codecs = [codec for codec, _ in states_beside(plan.zo, plan.optimizer).values()]
        placement = replace(trainable, codec=next(iter(codecs), Codec.FP32))
        nbytes = sum(encoded_nbytes((trained,), "float32", codec) for codec in codecs)
        return _row("optimizer", placement, nbytes, name)
    tiers = {residence.tier for residence in residences}
    placement = plan.optimizer_state
    if len(tiers) == 1:
        placement = replace(placement, tier=tiers.pop())
    copies = len(plan.update_rule.states)
    beside = 1 if places.pools.slots else 0  # masters of slices lie with their states
    in_files = sum(
        _in_files(residence.tier, 4 * (copies + beside) * model.units[unit].numel(trainable=True))
        for unit, residence in zip(places.sizes.trained, residences, strict=True)
    )
    return StateRow("optimizer", placement, 4 * copies * trained, name, in_files)

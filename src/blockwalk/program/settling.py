"""Choices that a run leaves to its machine and its model, settled once, before the model is
opened: the tiers that feed an accelerator and hold adapters' states, the device memory that a step
may use, the blocks that stay there, the micro-batches that visit a block together, and the blocks
of each stage.

A processor changes nothing of a plan but the last three. Nothing that is settled here changes a bit
of what one process computes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from blockwalk.plan.choices import AUTO
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import Placement, Tier
from blockwalk.plan.plan import AUTO_TOGETHER, Plan
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs
from blockwalk.program.program import Pool, Program, Shape, StepKind, human_bytes
from blockwalk.program.resident_blocks import settled
from blockwalk.program.stages import Price, cut
from blockwalk.program.unit_sizes import UnitSizes
from blockwalk.program.visits import Fits, most_together

BUDGET = 0.9
"""The share of what is free on an accelerator that a step may use unless ``budget`` says otherwise:
the rest is for kernels that are loaded later, fragments, and what the forecast is wrong by."""

PINNED = 0.8
"""The share of host memory that buffers beside an accelerator may take. They are pinned: the kernel
can neither swap nor drop them, and wants the rest for itself, the process, and the pages of the
model's file."""

FEEDS = ("frozen", "activation")
"""The kinds of state whose tier the machine decides where a first-order method's row has them on a
slow one."""

STATES = ("trainable", "optimizer_state")
"""The kinds of state whose tier the machine decides where they are those of adapters: they go
together, since an update needs them in one place."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a machine has for a run, in bytes."""

    device_free: int = 0
    """Bytes that are free on the accelerator; 0: there is none, or they are not known."""
    host_free: int = 0
    """Bytes of host memory that the process may still take."""
    page_cache: int = 0
    """Bytes of file maps that a run may keep dirty."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A plan with every choice made, and the ones that the machine made."""

    plan: Plan
    names: tuple[str, ...] = ()
    """Names of the settings that were settled: a resumed run takes them from its checkpoint."""
    notes: tuple[str, ...] = ()
    """Sentences on the tiers among them."""


def settle(
    plan: Plan,
    model: ModelSpec,
    shape: Shape,
    costs: Costs,
    *,
    device: str,
    room: Room,
    named: Collection[str] | None = None,
    price: Price = attrgetter("flops"),
) -> Settled:
    """Return the plan as it will run on this machine.

    Args:
        plan, model, shape, costs, device: as :func:`~blockwalk.program.compile.compile` takes them.
        room: the memory that there is.
        named: the settings that somebody gave; None: every one.
        price: the seconds of work here, by which stages are cut; else its FLOPs count.
    """
    plan = cut(plan, model, costs, price)
    inputs: dict[str, Any] = {"costs": costs, "device": device, "page_cache": room.page_cache}

    def program(full: Plan) -> Program:
        return compile(full, model, StepKind.TRAIN, shape, **inputs)

    if device == "cpu":
        full = settled(plan, model, shape, **inputs)
        return Settled(most_together(full, program, _room_for(full, room)))

    def with_blocks(start: Plan) -> tuple[Plan, int]:
        """Return a plan with the blocks that stay, and the host bytes that its step pins."""
        full = settled(start, model, shape, **inputs)
        return full, program(full).peaks()[Pool.HOST]

    limit = int(PINNED * room.host_free)

    def fed(start: Plan) -> tuple[Plan, int, int]:
        """Return the plan with the tiers that feed the device, the host bytes that its step pins,
        and those of the first plan that was tried."""
        starts = [with_blocks(moved) for moved in begins(start, named)]
        unmoved_bytes = starts[-1][1]
        # A tier takes no room where the step pins as much without it.
        fits = max(limit, unmoved_bytes)
        chosen, pinned = next((full, nbytes) for full, nbytes in starts if nbytes <= fits)
        return chosen, pinned, starts[0][1]

    states = free_states(plan, named, model, device)
    start = budgeted(plan, room.device_free)
    chosen, pinned, pinned_at_best = fed(_with_states(start, states))
    if states and program(chosen).peaks()[Pool.DEVICE] > (chosen.budget or math.inf):
        chosen, pinned, pinned_at_best = fed(start)
    chosen = most_together(chosen, program, _room_for(chosen, room))
    free = free_tiers(plan, named)
    names = [f"{kind}.tier" for kind in (*free, *states)]
    names += [
        name
        for name, unset in UNSET.items()
        if getattr(plan, name) == unset != getattr(chosen, name)
    ]
    notes = _notes(plan, chosen, free, (pinned_at_best, pinned, limit))
    return Settled(chosen, tuple(names), tuple(notes))


def _room_for(plan: Plan, room: Room) -> Fits:
    """Return whether a step in which micro-batches come together has room: on the device by the
    budget, elsewhere by what is free. Ranks have to agree, and count on the budget alone."""
    rooms = {Pool.DEVICE: plan.budget or 0}
    if plan.mesh.world == 1:
        rooms[Pool.HOST] = int(PINNED * room.host_free)
        rooms[Pool.MAPPED] = room.page_cache

    def fits(alone: Counter[Pool], several: Counter[Pool]) -> bool:
        beside = {**rooms, Pool.MAPPED: alone[Pool.MAPPED] + rooms.get(Pool.MAPPED, 0)}
        return all(
            nbytes <= max(alone[pool], beside.get(pool, 0)) for pool, nbytes in several.items()
        )

    return fits


_WITH_BUDGET = ("resident",)
"""Settings that are counted for a budget, and go with it."""
UNSET = {"budget": None, "resident": AUTO, "together": AUTO_TOGETHER}
"""Settings beside tiers that are settled, and their values while nobody has."""


def free_tiers(plan: Plan, named: Collection[str] | None) -> tuple[str, ...]:
    """Return the kinds of state whose tier the machine decides: those of :data:`FEEDS` that the row
    of a first-order method of one rank has on a tier that runs may begin above, and nobody
    named."""
    if named is None:
        return ()
    settled = [kind for kind in FEEDS if kind in plan.home.settles]
    slow = (kind for kind in settled if getattr(plan, kind).tier.facts.begins_from)
    return tuple(kind for kind in slow if not {kind, f"{kind}.tier"} & set(named))


def free_states(
    plan: Plan, named: Collection[str] | None, model: ModelSpec, device: str
) -> tuple[str, ...]:
    """Return the kinds of adapters' state that go to the device where it has room: both masters and
    optimizer states, or none where somebody named the tier of one."""
    if named is None or {*STATES, *(f"{kind}.tier" for kind in STATES)} & set(named):
        return ()
    tiers = [getattr(plan, kind).tier.facts for kind in STATES]
    settled = all(kind in plan.home.settles for kind in STATES)
    may_move = settled and all(facts.adapters_on for facts in tiers)
    return STATES if may_move and UnitSizes(plan, model, device).few else ()


def _with_states(plan: Plan, kinds: Collection[str]) -> Plan:
    placements = {kind: getattr(plan, kind) for kind in kinds}
    moved: dict[str, Any] = {
        kind: replace(placement, tier=Tier(placement.tier.facts.adapters_on))
        for kind, placement in placements.items()
    }
    return replace(plan, **moved)


def settle_states(plan: Plan, model: ModelSpec, device: str) -> Plan:
    """Return the plan of a walker that no run has settled, with adapters' states on the device
    where no budget has to hold them. Its row's tier is not where they would lie: those of adapters
    are in memory, whatever it is."""
    if device == "cpu" or plan.budget is not None:
        return plan
    return _with_states(plan, free_states(plan, (), model, device))


def settled_before(
    plan: Plan, named: Collection[str] | None, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that a resumed run takes from its checkpoint: those that the machine
    decided then (``before``, by name), and that nobody has given since. The blocks that stay go
    with the budget that they were counted for."""
    tiers = [f"{kind}.tier" for kind in free_tiers(plan, named)]
    if named is not None and not {*STATES, *(f"{kind}.tier" for kind in STATES)} & set(named):
        tiers += [f"{kind}.tier" for kind in STATES]
    unset = tiers + [name for name, value in UNSET.items() if getattr(plan, name) == value]
    if "budget" not in unset or "budget" not in before:
        unset = [name for name in unset if name not in _WITH_BUDGET]
    return {name: before[name] for name in unset if name in before}


def begins(plan: Plan, named: Collection[str] | None) -> Iterator[Plan]:
    """Yield the plan with the tiers that an accelerator may begin from, best first: all kinds of
    state moved up, the activations alone, none. The first with room for what it pins is taken, the
    last without asking."""
    free = free_tiers(plan, named)
    for moved in dict.fromkeys((free, free[1:], ())):
        placements: dict[str, Any] = {kind: _moved_up(getattr(plan, kind)) for kind in moved}
        yield replace(plan, **placements)


def _moved_up(placement: Placement) -> Placement:
    return replace(placement, tier=Tier(placement.tier.facts.begins_from))


def budgeted(plan: Plan, free: int) -> Plan:
    """Return the plan with a budget: :data:`BUDGET` of the ``free`` bytes, unless it has one. Ranks
    that have to agree on it have none."""
    agree = plan.mesh.world > 1 and "budget" in plan.shared()
    if plan.budget is not None or not free or agree:
        return plan
    return replace(plan, budget=int(BUDGET * free))


def _notes(
    plan: Plan, chosen: Plan, free: Collection[str], pinned: tuple[int, int, int]
) -> Iterator[str]:
    """Yield a sentence on each tier of the kinds that were free. ``pinned``: the host bytes of the
    first plan that was tried and of the one that was chosen, and the most that may be."""
    pinned_at_best, pinned_as_chosen, limit = map(human_bytes, pinned)
    bound = f"{limit} may be, {PINNED} of what is free"
    moved = [kind for kind in free if getattr(chosen, kind).tier != getattr(plan, kind).tier]
    stays = [kind for kind in free if kind not in moved]
    if moved:
        kind = moved[0]
        yield (
            f"{' and '.join(moved)} begin from the {getattr(chosen, kind).tier}:"
            f" {pinned_as_chosen} lie there, {bound}"
            f" ({kind}.tier: {getattr(plan, kind).tier} leaves it there)"
        )
    if stays:
        yield (
            f"{' and '.join(stays)} begin from the {getattr(plan, stays[0]).tier}: the host would"
            f" hold {pinned_at_best}, and {bound}"
        )

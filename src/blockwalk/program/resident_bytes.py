"""Bytes that one rank holds between steps, pool by pool: parameters on their tiers, what lies
beside them, and the slices of sharded state; and those of a checkpoint that is written behind the
steps."""

from __future__ import annotations

from collections import Counter

from blockwalk.plan.placement import DTYPE_BYTES, StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.flat_layout import PARTS, accumulates, has_node_slice, hosts_node_slice
from blockwalk.program.placements import Placements
from blockwalk.program.program import Pool
from blockwalk.program.stages import Stage
from blockwalk.program.state_sizes import compute_dtype, pool_at, pool_of


def resident_bytes(places: Placements) -> Counter[Pool]:
    """Return bytes that each pool of one rank holds between steps: parameters on their tiers, and
    optimizer states."""
    if places.gathered:
        return _slices(places)
    nbytes = _parameters(places)
    if places.home.kinds_apart:  # else buckets hold what the rule keeps
        nbytes += _beside_parameters(places)
    return +nbytes


def _parameters(places: Placements) -> Counter[Pool]:
    """Count the parameters of a run that gathers none."""
    nbytes: Counter[Pool] = Counter()
    for index, unit in enumerate(places.model.units):
        for part in PARTS:
            size = places.part_bytes(unit, part)
            if not size:
                continue
            tier = places.placement(part).tier
            written_back = part is StateKind.FROZEN or places.home.rewritten
            if places.streams(index, part):
                sliced = places.ranks(part) > 1
                nbytes[pool_of(tier)] += places.slice_bytes(unit, part)[0] if sliced else size
            elif places.mapped(part):
                nbytes[Pool.MAPPED] += size
            else:
                nbytes[Pool.DEVICE] += size
                if tier.facts.mapped and written_back:  # the file is there all the same
                    nbytes[Pool.DISK] += size
    return nbytes


def _beside_parameters(places: Placements) -> Counter[Pool]:
    """Count what a first-order run of one process holds beside its parameters."""
    plan = places.plan
    units = range(len(places.model.units))
    moments = sum(map(places.state_bytes, units))
    undone = sum(map(places.undo_bytes, units))  # what a step that is refused goes back to
    nbytes: Counter[Pool] = Counter()
    if places.device == "cpu":
        nbytes[pool_at(plan.optimizer_state.tier, places.device)] += moments
        nbytes[Pool.MAPPED] += undone
        return nbytes
    if not places.updates_on_host:
        nbytes[Pool.DEVICE] += moments + undone
        return nbytes
    stay = [u for u in units if not places.streams(u, StateKind.TRAINABLE)]
    masters = Pool.DISK if places.masters_on_disk else Pool.HOST
    nbytes[Pool.DISK if places.states_on_disk else Pool.HOST] += moments
    nbytes[masters] += sum(map(places.master_bytes, stay)) + undone
    nbytes[Pool.HOST] += sum(places.landings)
    return nbytes


def bytes_in_maps(places: Placements) -> int:
    """Return the bytes of file maps that masters, optimizer states and copies of both lie in,
    behind an accelerator."""
    if not places.updates_on_host:
        return 0
    nbytes = _beside_parameters(places)[Pool.DISK]
    if places.masters_on_disk:
        units = range(len(places.model.units))
        travel = (unit for unit in units if places.streams(unit, StateKind.TRAINABLE))
        nbytes += sum(map(places.master_bytes, travel))
    return nbytes


def _slices(places: Placements) -> Counter[Pool]:
    """Count the slices of one rank, without slots and gradient buffers.

    On the device with 16-bit parameters, Adam and gradients that accumulate: 12n/o + 4n/g + 2n/p,
    spread over o, g and p ranks."""
    plan = places.plan
    size = DTYPE_BYTES[compute_dtype(plan, places.model)]
    states_pool = pool_of(plan.optimizer_state.tier)
    undo_pool = Pool.DISK if places.device == "cpu" else states_pool
    in_place = accumulates(plan) and plan.gradient.tier.facts.resident
    computes_with_masters = size == 4 and plan.optimizer_state.tier.facts.resident
    nbytes: Counter[Pool] = Counter()
    for unit in range(len(places.model.units)):
        frozen, trained = (places.layout(unit, part) for part in PARTS)
        states = 4 * (1 + len(plan.update_rule.states)) * trained.numel // plan.optimizer_ranks
        node = Pool.HOST if hosts_node_slice(plan) else Pool.DEVICE
        nbytes[node] += (frozen.nbytes + trained.nbytes) // plan.parameter_ranks
        if computes_with_masters and not has_node_slice(plan):  # gathered from masters themselves
            nbytes[Pool.DEVICE] -= size * trained.numel // plan.parameter_ranks
        elif hosts_node_slice(plan) and not computes_with_masters:
            nbytes[Pool.DEVICE] += size * trained.numel // plan.optimizer_ranks
        nbytes[states_pool] += states
        if plan.update.at_turn:  # what a step that is refused goes back to
            nbytes[undo_pool] += states
        gradient_ranks = plan.gradient_ranks if in_place else plan.optimizer_ranks
        nbytes[Pool.DEVICE] += 4 * trained.numel // gradient_ranks
        if accumulates(plan) and not in_place:
            nbytes[Pool.HOST] += 4 * trained.numel // plan.gradient_ranks
    return +nbytes


def writes_behind(plan: Plan) -> bool:
    """Return whether a checkpoint is written while the next steps run, from a copy in host memory:
    where each rank writes the slices that it holds."""
    return plan.home.gathered


def copied_bytes(stage: Stage, places: Placements) -> int:
    """Return bytes of that copy on a rank of a stage, padding counted: float32 masters and the
    update rule's states. A unit is written by the stage that walks over it, and where ranks hold
    copies of a slice each writes a share of it.

    Args:
        places: of the model as the stage holds it.
    """
    plan = places.plan
    written = (unit for unit in places.trained if unit in stage.units)
    elements = sum(places.layout(unit, StateKind.TRAINABLE).numel for unit in written)
    kinds = 1 + len(plan.update_rule.states)
    return 4 * kinds * elements // plan.mesh.stage_ranks

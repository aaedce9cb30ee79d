"""Bytes that one rank holds between steps, pool by pool: parameters on their tiers, what lies
beside them, and the slices of sharded state; and those of a checkpoint that is written behind the
steps."""

from __future__ import annotations

from collections import Counter

from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.placements import Placements
from blockwalk.program.program import Pool
from blockwalk.program.stages import Stage
from blockwalk.program.state_sizes import pool_of


def resident_bytes(places: Placements) -> Counter[Pool]:
    """Return bytes that each pool of one rank holds between steps: parameters on their tiers, and
    optimizer states."""
    nbytes: Counter[Pool] = Counter()
    for (unit, kind), residence in places.residences.items():
        for pool, size in residence.facts.held(places.sizes, unit, kind, residence.tier):
            if size:
                nbytes[pool] += size
    nbytes.update(_beside(places))
    return +nbytes


def _beside(places: Placements) -> Counter[Pool]:
    """Count what lies beside state for its updates."""
    nbytes: Counter[Pool] = Counter()
    for unit, updater in enumerate(places.updaters):
        for pool, size in updater.beside(places.sizes, unit, places.residences):
            nbytes[pool] += size
    nbytes[Pool.HOST] += sum(places.landings)
    return nbytes


def bytes_in_maps(places: Placements) -> int:
    """Return the bytes of file maps that masters, optimizer states and copies of both lie in,
    behind an accelerator."""
    if not places.landings:
        return 0
    nbytes = _beside(places)
    for (unit, kind), residence in places.residences.items():
        if kind is StateKind.OPTIMIZER:
            nbytes[pool_of(residence.tier)] += places.sizes.state_bytes(unit)
        elif kind is StateKind.TRAINABLE and residence.facts.arrive is not None:
            nbytes[pool_of(residence.tier)] += places.sizes.master_bytes(unit)
    return nbytes[Pool.DISK]


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
    written = (unit for unit in places.sizes.trained if unit in stage.units)
    elements = sum(places.sizes.layout(unit, StateKind.TRAINABLE).numel for unit in written)
    kinds = 1 + len(plan.update_rule.states)
    return 4 * kinds * elements // plan.mesh.stage_ranks

"""A plan's placements applied to a model: which part of which unit arrives, and into which slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import DTYPE_BYTES, StateKind
from blockwalk.plan.plan import Plan
from blockwalk.plan.table import Reference
from blockwalk.program.flat_layout import NO_BUFFERS, PARTS, Buffers
from blockwalk.program.program import Bytes, Pool
from blockwalk.program.residence import (
    UPDATERS,
    Residence,
    ResidenceFacts,
    UpdaterFacts,
    landed,
    of_graphs,
    resolve,
    updater,
)
from blockwalk.program.state_sizes import compute_dtype, pool_of
from blockwalk.program.unit_sizes import UnitSizes


@dataclass(slots=True)
class Placements:
    """The facts of one plan and one model that hold at every point of a program."""

    plan: Plan
    model: ModelSpec
    device: str
    """``cpu`` or ``cuda``. On a CPU, files are mapped instead of copied."""
    last: int = field(init=False)
    """The epilogue's index."""
    sizes: UnitSizes = field(init=False)
    """Bytes of units and their parts."""
    residences: dict[tuple[int, StateKind], Residence] = field(init=False)
    """The residence of each kind of state of each unit."""
    updaters: list[UpdaterFacts] = field(init=False)
    """The row of the way in which each unit's masters are updated."""
    landed: list[int] = field(init=False)
    """The units whose gradients come to host memory."""
    graph_pool: Pool = field(init=False)
    """The memory in which what a block's graph saves lies until its backward turn."""
    pools: Buffers = field(init=False)
    """The slots and gradient buffers of a plan that gathers; none of another."""
    _parts: list[list[StateKind]] = field(init=False)
    _stored: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        self.sizes = UnitSizes(plan, self.model, self.device)
        self.last = self.sizes.last
        self.residences = resolve(self.sizes)
        self.updaters = [UPDATERS[updater(self.sizes, u)] for u in range(self.last + 1)]
        self.landed = landed(plan, self.model, self.device)
        self.graph_pool = of_graphs(plan, self.device).pool or Pool.DEVICE
        rows = {id(residence.facts): residence.facts for residence in self.residences.values()}
        buffers = (row.buffers(plan, self.model) for row in rows.values())
        self.pools = next((shared for shared in buffers if shared.slots), NO_BUFFERS)
        self._parts = [
            [part for part in PARTS if self.residence(unit, part).arrive is not None]
            for unit in range(self.last + 1)
        ]

    # ---- what arrives ----------------------------------------------------------------------------

    def residence(self, unit: int, kind: StateKind) -> ResidenceFacts:
        """Return the row of the residence of a kind of state of a unit."""
        return self.residences[unit, kind].facts

    def mover(self, unit: int, kind: StateKind) -> Reference:
        """Return the mover of a kind of state of a unit."""
        of_updater = None if kind is StateKind.FROZEN else self.updaters[unit].mover
        return of_updater or self.residence(unit, kind).mover

    def parts(self, unit: int) -> list[StateKind]:
        """Return the parts of a unit that arrive when its turn comes."""
        return self._parts[unit]

    @property
    def travels(self) -> list[int]:
        """The units of which a part arrives when their turn comes."""
        return [unit for unit, parts in enumerate(self._parts) if parts]

    def needs(self, unit: int) -> tuple[int, ...]:
        """Return the units that must be there at a unit's turn. Where the prologue has a slot of
        its own, a tied head is read there."""
        reads_prologue = unit == self.last and self.own_slot(0) is not None and self.model.tied
        return (unit, 0) if reads_prologue else (unit,)

    # ---- updates ---------------------------------------------------------------------------------

    def landing(self, unit: int) -> int:
        """Return bytes of the place in host memory that a unit's gradients come to, for the
        processor behind an accelerator; 0: they are used on the device."""
        return self.updaters[unit].landing(self.sizes, unit)

    @property
    def landings(self) -> list[int]:
        """Bytes of the places that they come to: one for each unit, so that none waits for an
        update; where state is in file maps, for host memory would not hold it, a few of the
        largest's size."""
        nbytes = [self.landing(unit) for unit in self.landed]
        kinds = (StateKind.TRAINABLE, StateKind.OPTIMIZER)
        tiers = {self.residences[unit, kind].tier for unit in self.landed for kind in kinds}
        if any(pool_of(tier) is Pool.DISK for tier in tiers):
            return [max(nbytes)] * min(len(nbytes), self.at_once + 1)
        return nbytes

    def stored(self, unit: int) -> int:
        """Return bytes of trainables that are written back when an update has changed them where
        they came to at their turn."""
        if unit not in self._stored:
            part = StateKind.TRAINABLE
            self._stored[unit] = self.residence(unit, part).stored(self.sizes, unit, part)
        return self._stored[unit]

    def brought(self, unit: int) -> dict[StateKind, int]:
        """Return bytes of the gradients and optimizer states that come to a unit's update."""
        nbytes = {
            StateKind.GRADIENT: 4 * self.model.units[unit].numel(trainable=True),
            StateKind.OPTIMIZER: self.sizes.state_bytes(unit),
        }
        return {kind: self.residence(unit, kind).brought(n) for kind, n in nbytes.items()}

    def outlives_slot(self, unit: int) -> bool:
        """Return True where a unit's graph can be kept while its parameters leave their slot: they
        are in none, or the graph refers to their places, which are filled again."""
        return all(
            self.residence(unit, part).refilled(self.plan)
            or not self.residence(unit, part).in_slot(self.sizes, unit, part)
            for part in self.parts(unit)
        )

    # ---- slots -----------------------------------------------------------------------------------

    @property
    def at_once(self) -> int:
        """Blocks that may be on the device at once: the one that computes, and those fetched
        ahead."""
        return self.plan.prefetch + 1

    @property
    def block_slots(self) -> int:
        """Slots that blocks take: those on the device at once, and those of a chunk that stays."""
        return self.pools.slot_of_end[0] if self.pools.slots else self.at_once

    def own_slot(self, unit: int) -> int | None:
        """Return the slot of prologue and epilogue, where they have slots of their own; a block
        takes any that is free."""
        ends = self.pools.slots and unit in (0, self.last)
        return self.pools.slot_of_end[unit == self.last] if ends else None

    @property
    def slot_count(self) -> int:
        """Slots that units arrive in; those of blocks come first."""
        return len(self.pools.slots) or min(self.at_once, len(self.travels))

    def slot_sizes(self) -> list[int]:
        """Return device bytes of each slot."""
        if self.pools.slots:
            size = DTYPE_BYTES[compute_dtype(self.plan, self.model)]
            frozen_size = 1 if self.plan.frozen.codec.encoded else size
            return [frozen_size * frozen + size * trained for frozen, trained in self.pools.slots]
        sizes = (
            sum(self.residence(unit, part).in_slot(self.sizes, unit, part) for part in parts)
            for unit, parts in enumerate(self._parts)
        )
        largest = max(sizes, default=0)
        return [largest] * self.slot_count if largest else []

    # ---- gradients -------------------------------------------------------------------------------

    def made_gradients(self, unit: int) -> int:
        """Float32 bytes of the gradients that are first made at a unit's backward turn; a tied
        head's are made there. None of those in buffers, which are there all the time."""
        if self.pools.gradients:
            return 0
        tied = {canonical for _, canonical in self.model.tied}
        return 4 * sum(
            p.numel
            for p in self.sizes.reads(unit).params
            if p.trainable and not (unit == 0 and p.name in tied)
        )

    @property
    def gradient_pool(self) -> Pool:
        """The memory in which gradients wait for their update."""
        return self.residence(0, StateKind.GRADIENT).pool or Pool.DEVICE

    def accumulated(self, unit: int | None = None) -> Bytes:
        """Return the gradients of a unit's own parameters, or of all, while they wait for their
        update."""
        if self.pools.gradients or not self.plan.estimator.facts.walks_back:
            return ()
        params = self.model if unit is None else self.model.units[unit]
        nbytes = 4 * params.numel(trainable=True)
        return ((self.gradient_pool, nbytes),) if nbytes else ()

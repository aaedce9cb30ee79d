"""Lower turns to ops: arrivals ahead of their turn, slots, evictions, write-backs and memory, one
way for every plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from blockwalk.plan.mesh import (
    PIPELINE,
    Coordinates,
    Piece,
    context_axis,
    make_axes,
    names_of,
    work_axes,
)
from blockwalk.plan.placement import DTYPE_BYTES, StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.arrive import Residency, Ways, exchanged, refresh
from blockwalk.program.costs import Costs, UnitCost
from blockwalk.program.flat_layout import has_node_slice
from blockwalk.program.placements import Placements
from blockwalk.program.program import (
    COMPUTES,
    Draft,
    Lane,
    OpKind,
    Pool,
    Program,
    Shape,
    StepKind,
)
from blockwalk.program.resident_bytes import resident_bytes
from blockwalk.program.stages import Stage, held_by
from blockwalk.program.state_sizes import activation_pool, compute_dtype, stages_inputs


def visits_at_once(plan: Plan) -> int:
    """Return the visits whose values are on their way between stages, or in use, on a lane at
    once."""
    return min(plan.prefetch, 1) + 1


@dataclass(slots=True)
class Turn:
    """One unit's turn: ``work`` emits the ops that use it, given what they must wait for, and
    returns those of them that use its slot."""

    unit: int
    work: Callable[[tuple[int, ...]], list[int]]
    stays: frozenset[int] = frozenset()
    """Units that keep their slots after it, for a later turn."""
    updates: bool = False
    """True for updates after the walk: parameters are fetched only if the masters live in a
    slot."""


@dataclass(slots=True)
class Builder:
    """A program under construction."""

    places: Placements
    ways: Ways
    residency: Residency
    shape: Shape
    costs: Costs
    stage: Stage
    """The units that the rank walks over."""
    page_cache: int = 0
    """Bytes of file maps that activations may take (``recompute: auto``)."""
    coordinates: Coordinates = ()
    """The rank's places on the axes of the mesh."""
    pieces: tuple[Piece, ...] = ()
    """The parts of a zeroth-order step that are computed; none given: those of the rank's place."""
    draft: Draft = field(default_factory=Draft)
    updates: list[int] = field(default_factory=list)
    """The updates so far, in order."""
    updates_on_host: list[int] = field(default_factory=list)
    """Those of them by the processor behind an accelerator."""

    def op(
        self, kind: OpKind, unit: int, lane: Lane, deps: Sequence[int] = (), **details: object
    ) -> int:
        """Write an op, and return its number."""
        return self.draft.op(kind, unit, lane, deps, **details)

    def cost(self, unit: int) -> UnitCost:
        return self.costs.of(self.places.model.units[unit].kind)

    @property
    def everyone(self) -> tuple[str, ...]:
        """The axes over which all ranks exchange scalars."""
        plan = self.places.plan
        if plan.estimator.facts.shares_forwards:
            return names_of(work_axes(plan.mesh))
        return (*names_of(make_axes(plan.mesh)), *((PIPELINE,) if plan.mesh.pipeline > 1 else ()))

    def exchanges(self, unit: int, nbytes: int) -> dict[str, Any]:
        """Return what an op that computes says of the bytes that a block sends meanwhile to the
        ranks that hold the other parts of its sequences."""
        mesh = self.places.plan.mesh
        if mesh.context == 1 or not 0 < unit < self.places.last:
            return {}
        axis = context_axis(mesh)
        return {"axes": (axis.name,), "sent": exchanged(mesh, axis, nbytes)}

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one micro-batch's hidden state."""
        plan = self.places.plan
        model = self.places.model
        return self.shape.tokens * model.hidden_size * DTYPE_BYTES[compute_dtype(plan, model)]

    # ---- the walk --------------------------------------------------------------------------------

    def walk(self, turns: Sequence[Turn]) -> None:
        """Emit the turns in order. Units arrive ahead of their turn, as far as slots are free; one
        whose next turn is near keeps its slot, so that the last block arrives once for its forward
        and backward."""
        free = list(range(self.places.slot_count))
        for k, turn in enumerate(turns):
            for later in self._window(turns, k):
                if not all(self._bring(unit, free) for unit in self._needs(turns[later])):
                    assert later > k, f"no slot for {self.places.model.units[turn.unit].name}"
                    break
            occupants = {
                unit: self.residency.occupants[unit]
                for unit in self._needs(turn)
                if unit in self.residency.occupants
            }
            users = turn.work(tuple(op for occupant in occupants.values() for op in occupant.ready))
            next_units = self._next_units(turns, k + 1)
            for unit in [unit for unit in occupants if unit not in turn.stays]:
                if next_units.get(self._slot_key(unit)) != unit:
                    free.append(self._evict(unit, users, islice(turns, k + 1, None)))

    def _window(self, turns: Sequence[Turn], start: int) -> Iterator[int]:
        """Yield the turns from ``start`` on for which ``prefetch`` further units arrive; those that
        stay, or have slots of their own, do not count."""
        room = self.places.at_once
        for k in range(start, len(turns)):
            unit = turns[k].unit
            room -= bool(self.places.parts(unit)) and self.places.own_slot(unit) is None
            if room < 0:
                return
            yield k

    def _next_units(self, turns: Sequence[Turn], start: int) -> dict[tuple[int, ...], int]:
        """Return the first unit that needs each slot from the turn ``start`` on: the ends of the
        model may share one."""
        units: dict[tuple[int, ...], int] = {}
        for later in self._window(turns, start):
            for unit in self._needs(turns[later]):
                units.setdefault(self._slot_key(unit), unit)
        return units

    def _needs(self, turn: Turn) -> tuple[int, ...]:
        resident = turn.updates and not self.places.stored(turn.unit)
        return () if resident else self.places.needs(turn.unit)

    def _slot_key(self, unit: int) -> tuple[int, ...]:
        slot = self.places.own_slot(unit)
        return (unit,) if slot is None else (-1, slot)

    def _bring(self, unit: int, free: list[int]) -> bool:
        """Bring a unit, and return whether it is there: False where no slot is free for it."""
        if unit in self.residency.occupants or not self.places.parts(unit):
            return True
        own_slot = self.places.own_slot(unit)
        slots = range(self.places.block_slots) if own_slot is None else (own_slot,)
        slot = next((slot for slot in free if slot in slots), None)
        if slot is None:
            return False
        free.remove(slot)
        self.residency = self.residency.takes(unit, slot)
        for part in self.places.parts(unit):
            arrive = self.places.residence(unit, part).arrive
            assert arrive is not None
            self.residency = arrive(self.ways, unit, part, self.residency, self.draft)
        return True

    def _evict(self, unit: int, users: Sequence[int], later: Iterable[Turn]) -> int:
        """Empty a unit's slot once its users are done with it, and return which. Slices of it that
        stay on the device do so until no later turn needs them."""
        places = self.places
        occupant = self.residency.occupants[unit]
        kept = [part for part in places.parts(unit) if (unit, part) in self.residency.kept]
        freed = [] if kept and any(unit in self._needs(turn) for turn in later) else kept
        sizes: Counter[Pool] = Counter()
        for part in places.parts(unit):
            tier = places.residences[unit, part].tier
            for pool, nbytes in places.residence(unit, part).leaves(places.sizes, unit, part, tier):
                sizes[pool] += nbytes
        sizes[Pool.DEVICE] += sum(places.sizes.node_bytes(unit, part) for part in freed)
        # On the lane of what fills the slot next: no slot waits for another unit's write-back.
        op = self.op(
            OpKind.EVICT,
            unit,
            Lane.FETCH,
            [*users, *occupant.fills],
            slot=occupant.slot,
            frees=tuple((pool, nbytes) for pool, nbytes in sizes.items() if nbytes),
            device_slice=bool(freed),
        )
        self.residency = self.residency.left(unit, op, freed)
        return occupant.slot

    # ---- updates ---------------------------------------------------------------------------------

    def update(self, unit: int, after: Sequence[int]) -> list[int]:
        """Update a unit, which uses its accumulated gradients up; where its trainables are in a
        slot, write them back."""
        if self.places.landing(unit):
            return self.update_on_host(unit, self.land(unit, after))
        update = self.op(
            OpKind.UPDATE,
            unit,
            self.places.updaters[unit].lane,
            [*after, *self._fetch_states(unit)],
            part=StateKind.TRAINABLE,
            frees=self.places.accumulated(unit),
        )
        self.updates.append(update)
        if has_node_slice(self.places.plan):
            self.residency = self.residency.updated(unit)
            if not self.places.plan.update.at_turn:
                self.refresh(unit, update)
        return [update, *self.store(unit, [update])]

    def refresh(self, unit: int, after: int) -> None:
        """Refresh a unit's node slice behind its update, unless the adaptive cache keeps it on the
        device: then its next use does."""
        if (unit, StateKind.TRAINABLE) not in self.ways.keeps:
            refreshed = refresh(self.ways, unit, self.draft, [after])
            self.residency = self.residency.brought_up_to_date(unit, refreshed)

    def land(self, unit: int, after: Sequence[int]) -> int:
        """Bring a unit's complete gradients to a place in host memory, and free them on the device.
        Where places are fewer than units, it is that of an update before."""
        places = self.places
        count = len(places.landings)
        earlier = len(self.updates_on_host)
        one_a_unit = count == len(places.landed)
        waits = self.updates_on_host[earlier - count :][:1] if earlier >= count else []
        return self.op(
            OpKind.STORE,
            unit,
            Lane.STORE,
            [*after, *waits],
            part=StateKind.GRADIENT,
            nbytes=4 * places.model.units[unit].numel(trainable=True),
            slot=places.landed.index(unit) if one_a_unit else earlier % count,
            last=True,
            frees=places.accumulated(unit),
        )

    def update_on_host(self, unit: int, landed: int) -> list[int]:
        """Let the processor update a unit. Where the device has a copy that stays, bring it up to
        date."""
        lane = self.places.updaters[unit].lane
        ops = [self.op(OpKind.UPDATE, unit, lane, [landed], part=StateKind.TRAINABLE)]
        if StateKind.TRAINABLE not in self.places.parts(unit):
            unit_spec = self.places.model.units[unit]
            nbytes = self.places.sizes.part_bytes(unit_spec, StateKind.TRAINABLE)
            ops.append(
                self.op(OpKind.FETCH, unit, lane, ops, part=StateKind.TRAINABLE, nbytes=nbytes)
            )
        self.updates.append(ops[0])
        self.updates_on_host.append(ops[0])
        return ops

    def _fetch_states(self, unit: int) -> list[int]:
        """Bring the optimizer states that an update reads, and gradients that wait for it, where
        they are in file maps: no earlier than ``prefetch`` updates before."""
        places = self.places
        waits = self.updates[-places.at_once :][:1] if len(self.updates) >= places.at_once else []
        return [
            self.op(OpKind.FETCH, unit, Lane.FETCH, waits, part=part, nbytes=nbytes)
            for part, nbytes in places.brought(unit).items()
            if nbytes
        ]

    def store(self, unit: int, after: Sequence[int]) -> list[int]:
        """Write a streamed unit's trainables back, and optimizer states in file maps, with what an
        update has copied."""
        places = self.places
        sizes: dict[StateKind, int] = {}
        if written := places.stored(unit):
            sizes[StateKind.TRAINABLE] = written
        if brought := places.brought(unit)[StateKind.OPTIMIZER]:
            sizes[StateKind.OPTIMIZER] = brought + places.sizes.undo_bytes(unit)
        return [
            self.op(OpKind.STORE, unit, Lane.STORE, after, part=part, nbytes=nbytes)
            for part, nbytes in sizes.items()
        ]

    def update_all(self, after: Sequence[int]) -> None:
        """Update every unit at the step's end."""

        def work(unit: int) -> Callable[[tuple[int, ...]], list[int]]:
            return lambda arrivals: self.update(unit, [*arrivals, *after])

        self.walk([Turn(unit, work(unit), updates=True) for unit in self.places.sizes.trained])

    # ---- the finished program --------------------------------------------------------------------

    def program(self, step_kind: StepKind) -> Program:
        places = self.places
        model = self.places.model
        slots = places.slot_sizes()
        gradients = 4 * sum(places.pools.gradients) if step_kind.trains else 0
        walks = self._carried(step_kind) + self._staged() + self._travelling()
        static = resident_bytes(places)
        static[Pool.DEVICE] += sum(slots) + gradients + self.costs.scratch + walks
        streamed = frozenset(u for u in range(places.last + 1) if places.parts(u))
        return Program(
            title=f"{places.plan.method} on {model.name}{self.stage}",
            step_kind=step_kind,
            shape=self.shape,
            unit_names=("prologue", *(f"block {i}" for i in range(len(model.blocks))), "epilogue"),
            streamed=streamed,
            written=frozenset(u for u in streamed if places.stored(u)),
            ops=tuple(self.draft.ops),
            static=tuple(static.items()),
            slots=len(slots),
            slot_bytes=max(slots, default=0),
            stage=self.stage.number,
            absent=frozenset(range(places.last + 1)) - held_by(self.stage),
            dirty=self.residency.dirty,
        )

    def _staged(self) -> int:
        """Return device bytes of the buffers by way of which inputs go to their tier and come
        back."""
        places = self.places
        saves = any(op.kind is OpKind.SAVE and not op.of_graph for op in self.draft.ops)
        staged = saves and stages_inputs(places.plan, places.device)
        return places.at_once * self.hidden_bytes if staged else 0

    def _travelling(self) -> int:
        """Return device bytes of the buffers that values travel by between stages."""
        plan = self.places.plan
        lanes = {op.lane for op in self.draft.ops if op.kind in (OpKind.SEND, OpKind.RECV)}
        return len(lanes) * self.hidden_bytes * visits_at_once(plan) * plan.visit

    def _carried(self, step_kind: StepKind) -> int:
        """Return device bytes that go from op to op for the whole walk: of every walk under way its
        hidden state (in the backward walk the hidden state's gradient) and what the prologue made
        for the blocks. The prologue's own hidden state is let go of where sequences are long and
        no gradient goes back through it."""
        nbytes = self.cost(0).saved
        plan = self.places.plan
        saves = plan.estimator.facts.walks_back and step_kind is not StepKind.EVALUATE
        on_device = saves and activation_pool(plan, self.places.device) is Pool.DEVICE
        trained = saves and bool(self.places.model.units[0].numel(trainable=True))
        let_go = plan.is_long(self.shape.sequence, self.places.device) and not trained
        if nbytes and not (on_device or let_go):
            nbytes += self.hidden_bytes  # the prologue's own hidden state beside the walk's
        return self._walks_at_once() * nbytes

    def _walks_at_once(self) -> int:
        """Return the most walks under way at any time: of one micro-batch in one forward pass, from
        its first op to its last."""
        walks = [(op.micro_batch, op.forward_pass) for op in self.draft.ops if op.kind in COMPUTES]
        ends = {walk: place for place, walk in enumerate(walks)}
        starts = {walk: place for place, walk in reversed(list(enumerate(walks)))}
        return max(
            (
                sum(starts[walk] <= start <= ends[walk] for walk in starts)
                for start in starts.values()
            ),
            default=0,
        )

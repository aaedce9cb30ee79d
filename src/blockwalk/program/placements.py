"""A plan's placements applied to a model: which part of which unit travels, into which slot, and
how many bytes it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from blockwalk.plan.estimators import HomeFacts
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import DTYPE_BYTES, Placement, StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.flat_layout import (
    NO_BUFFERS,
    PARTS,
    Buffers,
    FlatLayout,
    buffer_pools,
    part_layout,
)
from blockwalk.program.program import Bytes, Lane, Pool
from blockwalk.program.slicing import slice_size
from blockwalk.program.state_sizes import (
    bucket_bytes,
    compute_dtype,
    epilogue_reads,
    gradient_pool,
    maps_graphs,
    slice_bytes,
    updates_on_host,
)


@dataclass(slots=True)
class Placements:
    """The facts of one plan and one model that hold at every point of a program."""

    plan: Plan
    model: ModelSpec
    device: str
    """``cpu`` or ``cuda``. On a CPU, files are mapped instead of copied."""
    home: HomeFacts = field(init=False)
    """The row of the home that trainables have between their turns."""
    gathered: bool = field(init=False)
    """True where parameters are gathered before each use, and gradients summed over ranks."""
    adapters: bool = field(init=False)
    """True where the trainables of all blocks together are fewer than one block's parameters
    (adapters are): they stay resident whatever their tier, for less than a slot, instead of
    travelling with their blocks."""
    kept: frozenset[int] = field(init=False)
    """Blocks that stay on the device for good: ``mezo`` is the end where that is all of them,
    ``zo2`` the one with none."""
    pools: Buffers = field(init=False)
    """The slots and gradient buffers of a plan that gathers; none of another."""
    maps_states: bool = field(init=False)
    """True where optimizer states come and go with their unit's update, in file maps. Those of
    adapters stay: a page or two."""
    maps_gradients: bool = field(init=False)
    """True where gradients wait for the step's end in file maps."""
    updates_on_host: bool = field(init=False)
    """True where the processor behind an accelerator updates the trainables, beside the walk."""
    _parts: list[list[StateKind]] = field(init=False)
    _layouts: dict[tuple[int, StateKind], FlatLayout] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        largest = max(block.numel() for block in self.model.blocks)
        resident = evenly(len(self.model.blocks))[: max(plan.resident, 0)]
        self.home = plan.home
        self.gathered = self.home.gathered
        self.adapters = self.model.numel(trainable=True) < largest
        self.kept = frozenset(1 + block for block in resident)
        self.pools = buffer_pools(plan, self.model) if self.gathered else NO_BUFFERS
        in_maps = plan.optimizer_state.tier.facts.maps(self.device) and not self.adapters
        self.maps_states = self.home.kinds_apart and in_maps
        self.maps_gradients = gradient_pool(plan, self.device) is Pool.MAPPED
        self.updates_on_host = updates_on_host(plan, self.device)
        self._refuse_apart()
        self._parts = [
            [part for part in PARTS if self._arrives(unit, part)] for unit in range(self.last + 1)
        ]

    @property
    def last(self) -> int:
        """The epilogue's index."""
        return len(self.model.blocks) + 1

    @property
    def trained(self) -> list[int]:
        """Units with trainable parameters."""
        return [u for u, unit in enumerate(self.model.units) if unit.numel(trainable=True)]

    @property
    def host_is_device(self) -> bool:
        """True where trainables that are rewritten are on the device as they lie on their tier,
        whole: on a processor, whose memory is both."""
        unsliced = self.home.rewritten and self.ranks(StateKind.TRAINABLE) == 1
        return unsliced and self.plan.trainable.tier.facts.is_device(self.device)

    # ---- what travels ----------------------------------------------------------------------------

    def placement(self, part: StateKind) -> Placement:
        """Return the placement of frozen or of trainable parameters."""
        return self.plan.frozen if part is StateKind.FROZEN else self.plan.trainable

    def mapped(self, part: StateKind) -> bool:
        """Return True where this part is used in place through a file map, on a CPU: it is never
        rewritten in a slot, nor gathered."""
        rewritten = part is StateKind.TRAINABLE and self.home.rewritten
        in_place = not (rewritten or self.gathered)
        return in_place and self.placement(part).tier.facts.maps(self.device)

    @property
    def stays(self) -> bool:
        """True where trainables that the plan puts on another tier are on the device all the same:
        see ``adapters``."""
        moves = not (self.plan.trainable.tier.facts.resident or self.gathered)
        return moves and self.adapters and not self.mapped(StateKind.TRAINABLE)

    def ranks(self, part: StateKind) -> int:
        """Return ranks that hold one copy of a part of the streamed units together, each a slice; 1
        where none do."""
        ranks = self.plan.frozen_ranks if part is StateKind.FROZEN else self.plan.parameter_ranks
        return ranks if self.home.slices_streams else 1

    def streams(self, unit: int, part: StateKind) -> bool:
        """Return True where this part of this unit is fetched from its tier when its turn comes,
        and once changed written back."""
        trainable = part is StateKind.TRAINABLE
        if self.gathered or self.placement(part).tier.facts.resident:
            return False
        if not self.reads(unit).numel(trainable=trainable) or (trainable and self.adapters):
            return False
        return self.mapped(part) or not self.fixed(unit, part)

    def fixed(self, unit: int, part: StateKind) -> bool:
        """Return True where a part of a unit is on the device for good, whatever its tier: at both
        ends of the model, of the blocks that are kept, and where host and device are one. A file
        map stays what it is, and masters travel with blocks that are kept as well."""
        trainable = part is StateKind.TRAINABLE
        is_master = trainable and not self.home.rewritten
        kept = unit in self.kept and not is_master and not self.mapped(part)
        return unit in (0, self.last) or kept or (trainable and self.host_is_device)

    def parts(self, unit: int) -> list[StateKind]:
        """Return the parts of a unit that arrive when its turn comes: those that stream, and over
        ranks every one."""
        return self._parts[unit]

    def _arrives(self, unit: int, part: StateKind) -> bool:
        if self.gathered:
            return self.model.units[unit].numel(trainable=part is StateKind.TRAINABLE) > 0
        return self.streams(unit, part)

    @property
    def travels(self) -> list[int]:
        """The units of which a part arrives when their turn comes."""
        return [unit for unit, parts in enumerate(self._parts) if parts]

    def reads(self, index: int) -> UnitSpec:
        """Return a unit with all that its turn reads: an epilogue whose head is tied reads the
        prologue's weight as well."""
        return self.model.units[index] if index != self.last else epilogue_reads(self.model)

    def needs(self, unit: int) -> tuple[int, ...]:
        """Return the units that must be there at a unit's turn. Over ranks a tied head is read
        where the prologue's bucket lies."""
        reads_prologue = self.gathered and unit == self.last and self.model.tied
        return (unit, 0) if reads_prologue else (unit,)

    # ---- updates by the processor behind an accelerator ------------------------------------------

    def _refuse_apart(self) -> None:
        """Raise ValueError for masters behind an accelerator that no update there could read and
        write."""
        plan = self.plan
        if self.device == "cpu" or self.adapters or not self.home.kinds_apart:
            return
        if not (self.updates_on_host or plan.trainable.tier.facts.resident):
            raise ValueError(
                f"plan {plan.method!r}: trainable is {plan.trainable} and optimizer_state"
                f" {plan.optimizer_state}, and on an accelerator an update needs both in one place:"
                f" set optimizer_state: {plan.trainable.tier} × fp32, or trainable: device × raw"
            )

    @property
    def masters_on_disk(self) -> bool:
        """True where the processor behind an accelerator updates masters in file maps: their tier,
        or that of the states beside them. Adapters, which are few, are in host memory all the same,
        with their states."""
        masters = self.plan.trainable.tier.facts
        if masters.resident:
            masters = self.plan.optimizer_state.tier.facts
        return self.updates_on_host and masters.mapped and not self.adapters

    @property
    def states_on_disk(self) -> bool:
        """True where it updates optimizer states in file maps."""
        in_maps = self.plan.optimizer_state.tier.facts.mapped
        return self.updates_on_host and in_maps and not self.adapters

    @property
    def landings(self) -> list[int]:
        """Bytes of the places in host memory where its gradients come to: one for each unit, so
        that none waits for an update; where state is on disk, for host memory would not hold it, a
        few of the largest's size."""
        if not self.updates_on_host:
            return []
        sizes = [4 * self.model.units[unit].numel(trainable=True) for unit in self.trained]
        if self.masters_on_disk or self.states_on_disk:
            return [max(sizes, default=0)] * min(len(sizes), self.at_once + 1)
        return sizes

    def rewritten(self, unit: int) -> bool:
        """Return whether an update changes trainables where they come to at their turn, so that
        they are written back."""
        return self.streams(unit, StateKind.TRAINABLE) and not self.updates_on_host

    @property
    def update_lane(self) -> Lane:
        """The lane of updates."""
        if self.updates_on_host:
            return Lane.UPDATE
        return Lane.STORE if self.updates_behind else Lane.COMPUTE

    @property
    def updates_behind(self) -> bool:
        """True where a unit is updated beside the walk, while the next one's backward runs."""
        return self.gathered and self.plan.update.at_turn

    @property
    def maps_graphs(self) -> bool:
        """True where what a graph saves is written to file maps, instead of staying on the
        device."""
        return maps_graphs(self.plan, self.device)

    def outlives_slot(self, unit: int) -> bool:
        """Return True where a unit's graph can be kept while its parameters leave their slot: they
        are in none, or the graph refers to their places, which are filled again (not those of
        encoded ones)."""
        in_slot = self.assembled_bytes(unit) > 0 or any(
            not self.mapped(part) for part in self.parts(unit)
        )
        return not in_slot or (self.gathered and not self.plan.frozen.codec.encoded)

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
        ends = self.gathered and unit in (0, self.last)
        return self.pools.slot_of_end[unit == self.last] if ends else None

    @property
    def slot_count(self) -> int:
        """Slots that units arrive in; those of blocks come first."""
        return len(self.pools.slots) or min(self.at_once, len(self.travels))

    def slot_sizes(self) -> list[int]:
        """Return device bytes of each slot."""
        if self.gathered:
            size = DTYPE_BYTES[compute_dtype(self.plan, self.model)]
            frozen_size = 1 if self.plan.frozen.codec.encoded else size
            return [frozen_size * frozen + size * trained for frozen, trained in self.pools.slots]
        sizes = (
            self.assembled_bytes(index)
            + sum(self._in_slot(unit, part) for part in self.parts(index) if not self.mapped(part))
            for index, unit in enumerate(self.model.units)
            if self.parts(index)
        )
        largest = max(sizes, default=0)
        return [largest] * self.slot_count if largest else []

    def _in_slot(self, unit: UnitSpec, part: StateKind) -> int:
        """Return bytes of a slot that a part takes. A bucket in slices has, with scales a row, the
        gathered parameters beside it; with states this rank's slice."""
        trains = part is StateKind.TRAINABLE
        if self.ranks(part) == 1:
            return self.part_bytes(unit, part) if trains else self.memory_bytes(unit)
        local, gathered = self.slice_bytes(unit, part)
        copies = 2 if trains and self.plan.trainable.codec.encoded else 1
        return self.ranks(part) * gathered * copies + (local if local > gathered else 0)

    def slice_bytes(self, unit: UnitSpec, part: StateKind) -> tuple[int, int]:
        """Return bytes of one rank's slice of a part that ranks hold together, and of the
        parameters in it, which are gathered."""
        if part is StateKind.TRAINABLE:
            return slice_bytes(self.plan, unit)
        nbytes = slice_size(self.memory_bytes(unit), self.ranks(part))
        return nbytes, nbytes

    def assembled_bytes(self, unit: int) -> int:
        """Return bytes of a slot for those of a block's mapped parameters that are assembled at its
        turn."""
        if unit in (0, self.last) or not self.mapped(StateKind.FROZEN):
            return 0
        codec = self.plan.frozen.codec
        return self._computed([p for p in self.model.units[unit].params if p.whole_in(codec)])

    # ---- bytes -----------------------------------------------------------------------------------

    def layout(self, unit: int, part: StateKind) -> FlatLayout:
        """Return the places of a part's parameters in its flat buffer over ranks."""
        if (unit, part) not in self._layouts:
            layout = part_layout(self.plan, self.model, self.model.units[unit], part)
            self._layouts[unit, part] = layout
        return self._layouts[unit, part]

    def node_bytes(self, unit: int, part: StateKind) -> int:
        """Return bytes of one rank's slice of a part over the group of its parameters."""
        return self.layout(unit, part).nbytes // self.plan.parameter_ranks

    def _computed(self, params: Sequence[ParamSpec]) -> int:
        """Return bytes of parameters in the compute dtype."""
        return sum(p.numel for p in params) * DTYPE_BYTES[compute_dtype(self.plan, self.model)]

    def part_bytes(self, unit: UnitSpec, part: StateKind) -> int:
        """Return bytes of a unit's frozen or trainable parameters on their tier: encoded; in memory
        see :meth:`memory_bytes`."""
        placement = self.placement(part)
        if part is StateKind.FROZEN and not placement.tier.facts.mapped:
            return self.memory_bytes(unit)
        if part is StateKind.TRAINABLE and self.home.states_inside:
            return bucket_bytes(self.plan, unit)
        return unit.nbytes(placement.codec, trainable=part is StateKind.TRAINABLE)

    def memory_bytes(self, unit: UnitSpec) -> int:
        """Return bytes of a unit's frozen parameters in memory (slot or resident): experts that are
        not encoded take the compute dtype."""
        codec = self.plan.frozen.codec
        dense = [p for p in unit.part(False) if not p.stored_in(codec).encoded]
        experts = [p for p in dense if p.assembled or len(p.shape) > 2]
        without = replace(unit, params=tuple(p for p in unit.params if p not in experts))
        return self._computed(experts) + without.nbytes(codec, trainable=False)

    def made_gradients(self, unit: int) -> int:
        """Float32 bytes of the gradients that are first made at a unit's backward turn; a tied
        head's are made there. Over ranks they are made in buffers that are there all the time."""
        tied = {canonical for _, canonical in self.model.tied}
        params = () if self.gathered else self.reads(unit).params
        return 4 * sum(
            p.numel for p in params if p.trainable and not (unit == 0 and p.name in tied)
        )

    def state_bytes(self, unit: int) -> int:
        """Return bytes of a unit's optimizer states."""
        return 4 * len(self.plan.update_rule.states) * self.model.units[unit].numel(trainable=True)

    def master_bytes(self, unit: int) -> int:
        """Return bytes of a unit's masters: its trainables in their codec."""
        return self.model.units[unit].nbytes(self.plan.trainable.codec, trainable=True)

    def undo_bytes(self, unit: int) -> int:
        """Return bytes that a unit's update at its turn copies, for a step that may still be
        refused."""
        if not self.plan.update.at_turn:
            return 0
        return self.master_bytes(unit) + self.state_bytes(unit)

    def gradient_bytes(self, unit: int) -> int:
        """Float32 bytes of the gradients that a turn of a unit adds to: a tied head's are the
        prologue's own too."""
        return 4 * self.reads(unit).numel(trainable=True)

    def accumulated(self, unit: int | None = None) -> Bytes:
        """Return the gradients of a unit's own parameters, or of all, while they wait for their
        update."""
        if self.gathered or not self.plan.estimator.facts.walks_back:
            return ()
        params = self.model if unit is None else self.model.units[unit]
        nbytes = 4 * params.numel(trainable=True)
        return ((gradient_pool(self.plan, self.device), nbytes),) if nbytes else ()


def evenly(count: int) -> list[int]:
    """Return 0 to ``count`` − 1 in van der Corput's order: every prefix is evenly spread, so
    resident blocks alternate with fetched ones, and transfers hide behind them.

    >>> evenly(6)
    [0, 3, 1, 4, 2, 5]
    """
    bits = max(count - 1, 0).bit_length()
    mirrored = (int(f"{k:0{bits}b}"[::-1], 2) if bits else 0 for k in range(1 << bits))
    return list(dict.fromkeys(place * count >> bits for place in mirrored))[:count]

"""A plan's placements applied to a model: which part of which unit travels, how many bytes it has,
and where the rest stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import DTYPE_BYTES, StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.flat_layout import (
    PARTS,
    Buffers,
    FlatLayout,
    buffer_pools,
    part_layout,
    sharded_resident,
)
from blockwalk.program.program import POOLS, Bytes, Lane, Pool
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
    adapters: bool = field(init=False)
    """True where the trainables of all blocks together are fewer than one block's parameters
    (adapters are): they stay resident whatever their tier, for less than a slot, instead of
    travelling with their blocks."""
    sharded: bool = field(init=False)
    """True where state is spread over ranks that sum gradients."""
    kept: frozenset[int] = field(init=False)
    """Blocks that stay on the device for good: ``mezo`` is the end where that is all of them,
    ``zo2`` the one with none."""
    pools: Buffers = field(init=False)
    """Their slots and gradient buffers."""
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
        self.adapters = self.model.numel(trainable=True) < max(
            block.numel() for block in self.model.blocks
        )
        self.sharded = self.plan.sharded
        self.kept = frozenset(
            1 + block for block in evenly(len(self.model.blocks))[: max(self.plan.resident, 0)]
        )
        self.pools = (
            buffer_pools(self.plan, self.model) if self.sharded else Buffers((), (), (0, 0), (0, 0))
        )
        alone = not (self.plan.zeroth_order or self.sharded)
        self.maps_states = (
            alone
            and self.plan.optimizer_state.on_disk
            and self.device == "cpu"
            and not self.adapters
        )
        self.maps_gradients = alone and gradient_pool(self.plan, self.device) is Pool.MAPPED
        self.updates_on_host = updates_on_host(self.plan, self.device)
        self._refuse_apart()
        self._parts = [
            [part for part in PARTS if self._arrives(u, part)] for u in range(self.last + 1)
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
        """True where trainables are on the device as they lie on the host tier, whole: on a
        processor, whose memory is both."""
        host = self.plan.zeroth_order and self.plan.trainable.on_host
        return host and self.device == "cpu" and self.ranks(StateKind.TRAINABLE) == 1

    # ---- what travels ----------------------------------------------------------------------------

    def mapped(self, part: StateKind) -> bool:
        """Return True where this part is used in place through a file map: disk tier, CPU, and
        never rewritten in a slot."""
        placement = self.plan.frozen if part is StateKind.FROZEN else self.plan.trainable
        rewritten = part is StateKind.TRAINABLE and self.plan.zeroth_order
        return placement.on_disk and self.device == "cpu" and not rewritten and not self.sharded

    @property
    def stays(self) -> bool:
        """True where trainables that the plan puts on another tier are on the device all the same:
        see ``adapters``."""
        placed = not self.plan.trainable.on_device and not self.mapped(StateKind.TRAINABLE)
        return placed and self.adapters and not self.sharded

    def ranks(self, part: StateKind) -> int:
        """Return ranks that hold one copy of a part of the streamed units together, each a slice
        (zeroth order); 1 where none do."""
        ranks = self.plan.frozen_ranks if part is StateKind.FROZEN else self.plan.parameter_ranks
        return ranks if self.plan.zeroth_order else 1

    def streams(self, unit: int, part: StateKind) -> bool:
        """Return True where this part of this unit is fetched from its tier when its turn comes,
        and once changed written back."""
        placement = self.plan.frozen if part is StateKind.FROZEN else self.plan.trainable
        trainable = part is StateKind.TRAINABLE
        if placement.on_device or self.sharded or not self.reads(unit).numel(trainable=trainable):
            return False
        if trainable and self.adapters:
            return False
        return self.mapped(part) or not self.fixed(unit, part)

    def fixed(self, unit: int, part: StateKind) -> bool:
        """Return True where a part of a unit is on the device for good, whatever its tier: at both
        ends of the model, of the blocks that are kept, and where host and device are one. A file
        map stays one, and masters of backpropagation travel."""
        trainable = part is StateKind.TRAINABLE
        travels = trainable and not self.plan.zeroth_order
        kept = unit in self.kept and not travels and not self.mapped(part)
        return unit in (0, self.last) or kept or (trainable and self.host_is_device)

    def parts(self, unit: int) -> list[StateKind]:
        """Return the parts of a unit that arrive when its turn comes: those that stream, and over
        ranks every one."""
        return self._parts[unit]

    def _arrives(self, unit: int, part: StateKind) -> bool:
        if self.sharded:
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
        return (unit, 0) if self.sharded and unit == self.last and self.model.tied else (unit,)

    def _refuse_apart(self) -> None:
        """Raise ValueError for masters behind an accelerator that no update there could read and
        write."""
        plan = self.plan
        if self.device == "cpu" or plan.zeroth_order or self.sharded or self.adapters:
            return
        if not (self.updates_on_host or plan.trainable.on_device):
            tier = plan.trainable.tier
            beside = plan.optimizer_state
            raise ValueError(
                f"plan {plan.method!r}: trainable is {plan.trainable} and optimizer_state"
                f" {beside}, and on an accelerator an"
                f" update needs both in one place: set optimizer_state: {tier} × fp32, or"
                " trainable: device × raw"
            )

    # ---- updates by the processor behind an accelerator ------------------------------------------

    @property
    def masters_on_disk(self) -> bool:
        """True where the processor behind an accelerator updates masters in file maps: their tier,
        or that of the states beside them. Adapters, which are few, are in host memory all the same,
        with their states."""
        plan = self.plan
        placed = plan.optimizer_state if plan.trainable.on_device else plan.trainable
        return self.updates_on_host and placed.on_disk and not self.adapters

    @property
    def states_on_disk(self) -> bool:
        """True where it updates optimizer states in file maps."""
        return self.updates_on_host and self.plan.optimizer_state.on_disk and not self.adapters

    @property
    def landings(self) -> list[int]:
        """Bytes of the places in host memory where its gradients come to: one for each unit, so
        that none waits for an update; where state is on disk, for host memory would not hold it, a
        few of the largest's size."""
        if not self.updates_on_host:
            return []
        sizes = [4 * self.model.units[unit].numel(trainable=True) for unit in self.trained]
        if self.masters_on_disk or self.states_on_disk:
            return [max(sizes, default=0)] * min(len(sizes), self.plan.prefetch + 2)
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
        return self.sharded and self.plan.update.at_turn

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
        return not in_slot or (self.sharded and not self.plan.frozen.codec.encoded)

    # ---- slots -----------------------------------------------------------------------------------

    def own_slot(self, unit: int) -> int | None:
        """Return the slot of prologue and epilogue, where they have slots of their own; a block
        takes any that is free."""
        ends = self.sharded and unit in (0, self.last)
        return self.pools.slot_of_end[unit == self.last] if ends else None

    @property
    def slot_count(self) -> int:
        """Slots that units arrive in; those of blocks come first."""
        return len(self.pools.slots) or min(self.plan.prefetch + 1, len(self.travels))

    def slot_sizes(self) -> list[int]:
        """Return device bytes of each slot."""
        if self.sharded:
            size = DTYPE_BYTES[compute_dtype(self.plan, self.model)]
            frozen_size = 1 if self.plan.frozen.codec.encoded else size
            return [frozen_size * frozen + size * trained for frozen, trained in self.pools.slots]
        units = [(u, unit) for u, unit in enumerate(self.model.units) if self.parts(u)]
        needed = (
            self.assembled_bytes(u)
            + sum(self._in_slot(unit, part) for part in self.parts(u) if not self.mapped(part))
            for u, unit in units
        )
        largest = max(needed, default=0)
        return [largest] * self.slot_count if largest else []

    def _in_slot(self, unit: UnitSpec, part: StateKind) -> int:
        """Return bytes of a slot that a part takes. A bucket in slices has, with scales a row, the
        gathered parameters beside it; with states this rank's slice."""
        trains = part is StateKind.TRAINABLE
        if self.ranks(part) == 1:
            return self.part_bytes(unit, part) if trains else self.memory_bytes(unit)
        own, gathered = self.slice_bytes(unit, part)
        copies = 2 if trains and self.plan.trainable.codec.encoded else 1
        return self.ranks(part) * gathered * copies + (own if own > gathered else 0)

    def slice_bytes(self, unit: UnitSpec, part: StateKind) -> tuple[int, int]:
        """Return bytes of one rank's slice of a part that ranks hold together, and of the
        parameters in it, which are gathered."""
        if part is StateKind.TRAINABLE:
            return slice_bytes(self.plan, unit)
        own = slice_size(self.memory_bytes(unit), self.ranks(part))
        return own, own

    def assembled_bytes(self, unit: int) -> int:
        """Return bytes of a slot for those of a block's mapped parameters that are assembled at its
        turn."""
        if unit in (0, self.last) or not self.mapped(StateKind.FROZEN):
            return 0
        return self._whole(
            [p for p in self.model.units[unit].params if p.whole_in(self.plan.frozen.codec)]
        )

    # ---- bytes -----------------------------------------------------------------------------------

    def layout(self, unit: int, part: StateKind) -> FlatLayout:
        """Return the places of a part's parameters in its flat buffer over ranks."""
        if (unit, part) not in self._layouts:
            self._layouts[unit, part] = part_layout(
                self.plan, self.model, self.model.units[unit], part
            )
        return self._layouts[unit, part]

    def node_bytes(self, unit: int, part: StateKind) -> int:
        """Return bytes of one rank's slice of a part over the group of its parameters."""
        return self.layout(unit, part).nbytes // self.plan.parameter_ranks

    def _whole(self, params: Sequence[ParamSpec]) -> int:
        """Return bytes of parameters in the compute dtype."""
        return sum(p.numel for p in params) * DTYPE_BYTES[compute_dtype(self.plan, self.model)]

    def part_bytes(self, unit: UnitSpec, part: StateKind) -> int:
        """Return bytes of a unit's frozen or trainable parameters on their tier: encoded; in memory
        see :meth:`memory_bytes`."""
        if part is StateKind.FROZEN:
            if not self.plan.frozen.on_disk:
                return self.memory_bytes(unit)
            return unit.nbytes(self.plan.frozen.codec, trainable=False)
        if self.plan.zeroth_order:
            return bucket_bytes(self.plan, unit)
        return unit.nbytes(self.plan.trainable.codec, trainable=True)

    def memory_bytes(self, unit: UnitSpec) -> int:
        """Return bytes of a unit's frozen parameters in memory (slot or resident): experts that are
        not encoded take the compute dtype."""
        codec = self.plan.frozen.codec
        dense = [p for p in unit.part(False) if not p.stored_in(codec).encoded]
        whole = [p for p in dense if p.assembled or len(p.shape) > 2]
        encoded = replace(unit, params=tuple(p for p in unit.params if p not in whole))
        return self._whole(whole) + encoded.nbytes(self.plan.frozen.codec, trainable=False)

    def made_gradients(self, unit: int) -> int:
        """Float32 bytes of the gradients that are first made at a unit's backward turn; a tied
        head's are made there. Over ranks they are made in buffers that are there all the time."""
        tied = {canonical for _, canonical in self.model.tied}
        params = () if self.sharded else self.reads(unit).params
        return 4 * sum(
            p.numel for p in params if p.trainable and not (unit == 0 and p.name in tied)
        )

    def state_bytes(self, unit: int) -> int:
        """Return bytes of a unit's optimizer states."""
        return 4 * len(self.plan.update_rule.states) * self.model.units[unit].numel(trainable=True)

    def undo_bytes(self, unit: int) -> int:
        """Return bytes that a unit's update at its turn copies, for a step that may still be
        refused."""
        masters = self.model.units[unit].nbytes(self.plan.trainable.codec, trainable=True)
        return masters + self.state_bytes(unit) if self.plan.update.at_turn else 0

    def gradient_bytes(self, unit: int) -> int:
        """Float32 bytes of the gradients that a turn of a unit adds to: a tied head's are the
        prologue's own too."""
        return 4 * self.reads(unit).numel(trainable=True)

    def accumulated(self, unit: int | None = None) -> Bytes:
        """Return the gradients of a unit's own parameters, or of all, while they wait for their
        update."""
        of = self.model if unit is None else self.model.units[unit]
        nbytes = 0 if self.sharded else 4 * of.numel(trainable=True)
        return ((gradient_pool(self.plan, self.device), nbytes),) if nbytes else ()

    def resident(self) -> Counter[Pool]:
        """Return bytes that each pool of one rank holds between steps: parameters on their tiers
        and optimizer states."""
        if self.sharded:
            return sharded_resident(self.plan, self.model, self.device)
        held: Counter[Pool] = Counter()
        for index, unit in enumerate(self.model.units):
            for part, placement in zip(PARTS, (self.plan.frozen, self.plan.trainable), strict=True):
                if not (nbytes := self.part_bytes(unit, part)):
                    continue
                if self.streams(index, part):
                    held[POOLS[placement.tier]] += (
                        self.slice_bytes(unit, part)[0] if self.ranks(part) > 1 else nbytes
                    )
                elif self.mapped(part):
                    held[Pool.MAPPED] += nbytes
                else:
                    held[Pool.DEVICE] += nbytes
                    if placement.on_disk and (part is StateKind.FROZEN or self.plan.zeroth_order):
                        held[Pool.DISK] += nbytes
        if not self.plan.zeroth_order:  # else buckets hold what the rule keeps
            held += self._beside_parameters()
        return +held

    def _beside_parameters(self) -> Counter[Pool]:
        """Count what a first-order run of one process holds beside its parameters, in bytes."""
        plan = self.plan
        trained = self.model.numel(trainable=True)
        sizes = [unit.nbytes(plan.trainable.codec, trainable=True) for unit in self.model.units]
        moments = len(plan.update_rule.states) * 4 * trained
        undone = (
            sum(sizes) + moments if plan.update.at_turn else 0
        )  # what a step that is refused goes back to
        held: Counter[Pool] = Counter()
        if self.device == "cpu":
            held[
                Pool.MAPPED if plan.optimizer_state.on_disk else POOLS[plan.optimizer_state.tier]
            ] += moments
            held[Pool.MAPPED] += undone
            return held
        if not self.updates_on_host:
            held[Pool.DEVICE] += moments + undone
            return held
        masters = Pool.DISK if self.masters_on_disk else Pool.HOST
        stay = sum(size for u, size in enumerate(sizes) if not self.streams(u, StateKind.TRAINABLE))
        held[Pool.DISK if self.states_on_disk else Pool.HOST] += moments
        held[masters] += stay + undone
        held[Pool.HOST] += sum(self.landings)
        return held

    def bytes_in_maps(self) -> int:
        """Count the bytes of file maps that masters, optimizer states and copies of both lie in,
        behind an accelerator."""
        held = self._beside_parameters()[Pool.DISK] if self.updates_on_host else 0
        if self.masters_on_disk:
            travel = [
                unit
                for u, unit in enumerate(self.model.units)
                if self.streams(u, StateKind.TRAINABLE)
            ]
            held += sum(unit.nbytes(self.plan.trainable.codec, trainable=True) for unit in travel)
        return held


def evenly(count: int) -> list[int]:
    """Return 0 to ``count`` − 1 in van der Corput's order: every prefix is evenly spread, so
    resident blocks alternate with fetched ones, and transfers hide behind them.

    >>> evenly(6)
    [0, 3, 1, 4, 2, 5]
    """
    bits = max(count - 1, 0).bit_length()
    mirrored = (int(f"{k:0{bits}b}"[::-1], 2) if bits else 0 for k in range(1 << bits))
    return list(dict.fromkeys(place * count >> bits for place in mirrored))[:count]

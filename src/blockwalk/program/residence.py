"""Residences: where each kind of state of a unit lives between its turns, and how it comes to them.

A plan says a tier, a codec and a group for each kind of state. What that means for one unit depends
on the model and the device as well. :func:`resolve` answers it once, with a row of
:data:`RESIDENCES` for every unit and kind of state; nothing else asks what the tier, the group or
the device is.

==========  ======================  =============================  =============================
row         arrives by              bytes between steps            at an update
==========  ======================  =============================  =============================
resident    nothing                 device                         changed where it is
paged       nothing                 file map                       changed where it is
mapped      FETCH (pages), EVICT    file map                       STORE (pages)
streamed    FETCH into a slot       tier                           STORE from the slot
sliced      FETCH, UPDATE, GATHER   tier ÷ ranks                   STORE of the slice
copied      FETCH into a slot       tier                           masters are on the tier
gathered    GATHER (FETCH, CACHE)   slices over groups of ranks    slices of masters change
inside      with the trainables     in the trainables' bucket      with the trainables
==========  ======================  =============================  =============================

What the ops of a row do, its mover says (:mod:`blockwalk.engine.movers`). The engine hands it the
home of the state.

Updates have a table of their own, :data:`UPDATERS`: the *compute* lane at a unit's turn or the
step's end, the *visit* of a unit whose updates were deferred, *behind* the walk, or the *host*
behind an accelerator. Gradients that wait for an update are a kind of state like the others:
*resident*, *mapped* or *gathered*.

A row from elsewhere is registered in :data:`RESIDENCES`, and a tier names it as the way in which
its state visits the device (:attr:`blockwalk.plan.tiers.TierFacts.residence`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from blockwalk.plan.model_spec import ModelSpec, ParamSpec
from blockwalk.plan.placement import DTYPE_BYTES, StateKind, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.table import Reference, Table
from blockwalk.program.arrive import Residency, Ways, fetched, gathered, mapped, sliced
from blockwalk.program.flat_layout import (
    NO_BUFFERS,
    PARTS,
    Buffers,
    accumulates,
    buffer_pools,
    has_node_slice,
    hosts_node_slice,
)
from blockwalk.program.program import Bytes, Draft, Lane, Pool
from blockwalk.program.state_sizes import compute_dtype, pool_of
from blockwalk.program.unit_sizes import UnitSizes, evenly

Arrival = Callable[[Ways, int, StateKind, Residency, Draft], Residency]
"""A function that writes the ops which bring a part of a unit into the slot that the unit has, and
returns the residency after them."""
Claim = Callable[[UnitSizes, int, StateKind, Tier], Bytes]
"""A function of sizes, a unit, a kind of state and its tier that returns bytes, pool by pool."""
Size = Callable[[UnitSizes, int, StateKind], int]
"""A function of sizes, a unit and a kind of state that returns bytes."""


def _nothing(_sizes: UnitSizes, _unit: int, _kind: StateKind, _tier: Tier) -> Bytes:
    return ()


def _none(_sizes: UnitSizes, _unit: int, _kind: StateKind) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class ResidenceFacts:
    """One way to live and to come."""

    held: Claim = _nothing
    """Bytes that one rank holds of it between steps."""
    pool: Pool | None = None
    """The memory in which it is used, where that is no slot."""
    arrive: Arrival | None = None
    """The ops that bring a part when its unit's turn comes; None: it is where it is used."""
    in_slot: Size = _none
    """Bytes of a slot that a part takes."""
    visits: Callable[[UnitSizes, int, ParamSpec], bool] = lambda sizes, unit, param: False
    """Whether a parameter is copied to a slot, instead of being read where it lies."""
    leaves: Claim = _nothing
    """Memory that an eviction gives back, beside the slot."""
    stored: Size = _none
    """Bytes of trainables that are written back when an update has changed them where they came
    to."""
    brought: Callable[[int], int] = lambda nbytes: 0
    """Bytes of state beside parameters that come to an update and go after it, of so many."""
    pending: Callable[[int], int] = lambda entries: min(entries, 1)
    """Deferred updates that a turn of a unit applies, of so many that no flush has."""
    refilled: Callable[[Plan], bool] = lambda plan: False
    """Whether a graph may refer to parameters in a slot that is filled again before the backward
    turn."""
    within: StateKind | None = None
    """The kind of state in whose bucket it lies, and with which it comes."""
    crosses: Callable[[Tier, str], bool] = lambda tier, device: False
    """Whether what an update reads and writes comes from the device to a tier, and goes back."""
    buffers: Callable[[Plan, ModelSpec], Buffers] = lambda plan, model: NO_BUFFERS
    """The slots and gradient buffers that all its units share."""
    mover: Reference = "blockwalk.engine.movers:stays"
    """The work of these ops: a function of the home and an op
    (:data:`blockwalk.engine.movers.Mover`)."""
    over_ranks: str = ""
    """The row of a part that ranks hold together; empty: no ranks do."""
    as_copies: str = ""
    """The row of copies of masters that the host updates; empty: it updates none."""


# ---- resident ------------------------------------------------------------------------------------


def _held_where_used(sizes: UnitSizes, unit: int, kind: StateKind, tier: Tier) -> Bytes:
    """Return bytes of state on the device, with those of the file that a part was read from."""
    if kind is StateKind.GRADIENT:
        return ()  # ops claim them
    if kind is StateKind.OPTIMIZER:
        return ((pool_of(tier), sizes.state_bytes(unit)),)
    nbytes = sizes.part_bytes(sizes.model.units[unit], kind)
    read_from_file = kind is StateKind.FROZEN or sizes.home.rewritten
    on_disk = nbytes if tier.facts.mapped and read_from_file else 0
    return ((Pool.DEVICE, nbytes), (Pool.DISK, on_disk))


RESIDENT = ResidenceFacts(held=_held_where_used, pool=Pool.DEVICE)


# ---- file maps -----------------------------------------------------------------------------------


def _held_in_maps(sizes: UnitSizes, unit: int, kind: StateKind, _tier: Tier) -> Bytes:
    """Return bytes of file maps that are there all the time."""
    if kind is StateKind.GRADIENT:
        return ()  # ops claim them
    if kind is StateKind.OPTIMIZER:
        return ((Pool.MAPPED, sizes.state_bytes(unit)),)
    return ((Pool.MAPPED, sizes.part_bytes(sizes.model.units[unit], kind)),)


def _held_in_file(sizes: UnitSizes, unit: int, kind: StateKind, tier: Tier) -> Bytes:
    """Return bytes of a file, of whose parts the pages come and go with their unit's turn."""
    if kind in PARTS:
        return _held_on_tier(sizes, unit, kind, tier)
    return _held_in_maps(sizes, unit, kind, tier)


def _pages(sizes: UnitSizes, unit: int, kind: StateKind, _tier: Tier) -> Bytes:
    return ((Pool.MAPPED, sizes.part_bytes(sizes.reads(unit), kind)),)


def _assembled(sizes: UnitSizes, unit: int, kind: StateKind) -> int:
    return sizes.assembled_bytes(unit) if kind is StateKind.FROZEN else 0


def _is_assembled(sizes: UnitSizes, unit: int, param: ParamSpec) -> bool:
    """Return whether a block's parameter is put together at its turn, for no file has it whole."""
    return param.assembled and unit not in (0, sizes.last)


def _written(sizes: UnitSizes, unit: int, kind: StateKind) -> int:
    return sizes.part_bytes(sizes.model.units[unit], kind)


PAGED = ResidenceFacts(held=_held_in_maps, pool=Pool.MAPPED)
"""State in a file map whose few pages come by themselves: that of adapters."""
MAPPED = ResidenceFacts(
    held=_held_in_file,
    pool=Pool.MAPPED,
    arrive=mapped,
    mover="blockwalk.engine.movers:mapped",
    visits=_is_assembled,
    in_slot=_assembled,
    leaves=_pages,
    stored=_written,
    brought=lambda nbytes: nbytes,
    pending=lambda entries: entries,
)


# ---- slots ---------------------------------------------------------------------------------------


def _held_on_tier(sizes: UnitSizes, unit: int, kind: StateKind, tier: Tier) -> Bytes:
    return ((pool_of(tier), sizes.part_bytes(sizes.model.units[unit], kind)),)


def _whole_in_slot(sizes: UnitSizes, unit: int, kind: StateKind) -> int:
    spec = sizes.model.units[unit]
    return sizes.memory_bytes(spec) if kind is StateKind.FROZEN else sizes.part_bytes(spec, kind)


def _always(_sizes: UnitSizes, _unit: int, _param: ParamSpec) -> bool:
    return True


STREAMED = ResidenceFacts(
    held=_held_on_tier,
    arrive=fetched,
    visits=_always,
    in_slot=_whole_in_slot,
    stored=_written,
    pending=lambda entries: entries,
    mover="blockwalk.engine.movers:streamed",
    over_ranks="sliced",
    as_copies="copied",
)
COPIED = ResidenceFacts(
    held=_held_on_tier,
    arrive=fetched,
    mover="blockwalk.engine.movers:landed",
    visits=_always,
    in_slot=_whole_in_slot,
)
"""Copies of masters, which stay on the tier and are updated there."""


def _held_slice(sizes: UnitSizes, unit: int, kind: StateKind, tier: Tier) -> Bytes:
    return ((pool_of(tier), sizes.slice_bytes(sizes.model.units[unit], kind)[0]),)


def _slices_in_slot(sizes: UnitSizes, unit: int, kind: StateKind) -> int:
    """Return bytes of a slot for a bucket in slices: with scales a row, the gathered parameters lie
    beside it; with states this rank's slice."""
    local, gathered_bytes = sizes.slice_bytes(sizes.model.units[unit], kind)
    encoded = sizes.placement(kind).codec.encoded and kind is StateKind.TRAINABLE
    copies = 2 if encoded else 1
    beside = local if local > gathered_bytes else 0
    return sizes.ranks(kind) * gathered_bytes * copies + beside


SLICED = ResidenceFacts(
    held=_held_slice,
    arrive=sliced,
    mover="blockwalk.engine.movers:sliced",
    visits=_always,
    in_slot=_slices_in_slot,
    stored=_written,
    pending=lambda entries: 0,  # the slice found them on its way
)


# ---- gathered ------------------------------------------------------------------------------------


def _held_slices(sizes: UnitSizes, unit: int, kind: StateKind, tier: Tier) -> Bytes:
    """Return bytes of the slices of one rank, without slots and gradient buffers.

    On the device with 16-bit parameters, Adam and gradients that accumulate: 12n/o + 4n/g + 2n/p,
    spread over o, g and p ranks."""
    plan = sizes.plan
    if kind is StateKind.OPTIMIZER:
        return _master_slices(sizes, unit, tier)
    if kind is StateKind.GRADIENT:
        return _gradient_slices(sizes, unit, tier)
    hosted = hosts_node_slice(plan)
    node = (Pool.HOST if hosted else Pool.DEVICE, sizes.node_bytes(unit, kind))
    if kind is StateKind.FROZEN:
        return (node,)
    size = DTYPE_BYTES[compute_dtype(plan, sizes.model)]
    computes_with_masters = size == 4 and plan.optimizer_state.tier.facts.resident
    if computes_with_masters and not has_node_slice(plan):
        return ()  # gathered from masters themselves
    if not hosted or computes_with_masters:
        return (node,)
    source = size * sizes.layout(unit, kind).numel // plan.optimizer_ranks
    return (node, (Pool.DEVICE, source))


def _master_slices(sizes: UnitSizes, unit: int, tier: Tier) -> Bytes:
    """Return bytes of a rank's masters and optimizer states, and of what a step that is refused
    goes back to."""
    plan = sizes.plan
    numel = sizes.layout(unit, StateKind.TRAINABLE).numel
    nbytes = 4 * (1 + len(plan.update_rule.states)) * numel // plan.optimizer_ranks
    undo_pool = Pool.DISK if sizes.device == "cpu" else pool_of(tier)
    return ((pool_of(tier), nbytes), (undo_pool, nbytes if plan.update.at_turn else 0))


def _gradient_slices(sizes: UnitSizes, unit: int, tier: Tier) -> Bytes:
    """Return bytes of the sum that an update reads, and of the accumulator beside it."""
    plan = sizes.plan
    nbytes = 4 * sizes.layout(unit, StateKind.TRAINABLE).numel
    if not accumulates(plan):
        return ((Pool.DEVICE, nbytes // plan.optimizer_ranks),)
    accumulator = nbytes // plan.gradient_ranks
    if tier.facts.resident:  # the sum is in it
        return ((Pool.DEVICE, accumulator),)
    return ((Pool.DEVICE, nbytes // plan.optimizer_ranks), (Pool.HOST, accumulator))


GATHERED = ResidenceFacts(
    held=_held_slices,
    pool=Pool.DEVICE,
    arrive=gathered,
    mover="blockwalk.engine.movers:gathered",
    visits=_always,
    in_slot=lambda sizes, unit, kind: sizes.layout(unit, kind).nbytes,
    refilled=lambda plan: not plan.frozen.codec.encoded,
    crosses=lambda tier, device: device != "cpu" and not tier.facts.resident,
    buffers=buffer_pools,
)

RESIDENCES = Table(
    "residence",
    {
        "resident": RESIDENT,
        "paged": PAGED,
        "mapped": MAPPED,
        "streamed": STREAMED,
        "sliced": SLICED,
        "copied": COPIED,
        "gathered": GATHERED,
        "inside": ResidenceFacts(within=StateKind.TRAINABLE),
    },
)
"""Residences by name."""


@dataclass(frozen=True, slots=True)
class Residence:
    """The residence of one kind of state of one unit."""

    name: str
    tier: Tier
    """The tier that it lies on."""
    facts: ResidenceFacts = field(init=False, compare=False, repr=False)
    """The row."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", RESIDENCES[self.name])


Residences = Mapping[tuple[int, StateKind], Residence]
"""The residence of each kind of state of each unit."""


# ---- updates -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpdaterFacts:
    """One way in which the masters of a unit are updated."""

    lane: Lane = Lane.COMPUTE
    beside: Callable[[UnitSizes, int, Residences], Bytes] = lambda sizes, unit, residences: ()
    """Bytes that lie beside a unit's state between steps."""
    landing: Callable[[UnitSizes, int], int] = lambda sizes, unit: 0
    """Bytes of the place in host memory that a unit's gradients come to; 0: they are used on the
    device."""
    mover: Reference | None = None
    """The mover of masters, optimizer states and gradients, in place of their residences'; None:
    theirs."""


def _undo(sizes: UnitSizes, unit: int, _residences: Residences) -> Bytes:
    """Return bytes of what a step that is refused goes back to."""
    pool = Pool.MAPPED if sizes.device == "cpu" else Pool.DEVICE
    return ((pool, sizes.undo_bytes(unit)),)


def _behind_accelerator(sizes: UnitSizes, unit: int, residences: Residences) -> Bytes:
    """Return bytes of masters whose copy stays on the device, and of what a step that is refused
    goes back to."""
    residence = residences[unit, StateKind.TRAINABLE]
    nbytes = sizes.undo_bytes(unit)
    if residence.facts.arrive is None:
        nbytes += sizes.master_bytes(unit)
    return ((pool_of(residence.tier), nbytes),)


UPDATERS = Table(
    "updater",
    {
        "compute": UpdaterFacts(beside=_undo),
        "visit": UpdaterFacts(),
        "behind": UpdaterFacts(Lane.STORE),
        "host": UpdaterFacts(
            Lane.UPDATE,
            _behind_accelerator,
            lambda sizes, unit: 4 * sizes.model.units[unit].numel(trainable=True),
            "blockwalk.engine.movers:landed",
        ),
    },
)
"""Ways to update by name."""


def updater(sizes: UnitSizes, unit: int) -> str:
    """Return the name of the way in which a unit's masters are updated: by the processor behind an
    accelerator where optimizer states, or without any they themselves, are not on the device."""
    plan = sizes.plan
    if sizes.home.gathered:
        return "behind" if plan.update.at_turn else "compute"
    if sizes.home.states_inside:
        return "visit"
    placement = plan.optimizer_state if plan.update_rule.states else plan.trainable
    on_device = tier_of(placement.tier, unit, sizes.last + 1).facts.resident
    return "compute" if sizes.device == "cpu" or on_device else "host"


def landed(plan: Plan, model: ModelSpec, device: str) -> list[int]:
    """Return the units whose gradients come to host memory, where the processor behind an
    accelerator updates their masters."""
    if device == "cpu" or not plan.home.kinds_apart:
        return []
    sizes = UnitSizes(plan, model, device)
    rows = ((unit, UPDATERS[updater(sizes, unit)]) for unit in sizes.trained)
    return [unit for unit, row in rows if row.landing(sizes, unit)]


def tier_of(tier: Tier, unit: int, units: int) -> Tier:
    """Return the tier that a unit's state lies on: the tier itself, or of one that is made of
    shares that which the unit is in. The last share takes what the others leave."""
    if not tier.facts.shares:
        return tier
    *shares, (remainder, _) = tier.facts.shares
    place = evenly(units).index(unit) / units
    end = 0.0
    for name, share in shares:
        end += share
        if place < end:
            return Tier(name)
    return Tier(remainder)


def device_tier() -> Tier:
    """Return the tier of the device's own memory."""
    return next(tier for tier in Tier if tier.facts.resident)


def link_of_tier(tier: Tier) -> str | None:
    """Return the name of the link between host memory and a tier; None of the device's own."""
    return None if tier.facts.resident else tier.facts.link


# ---- which state lives how -----------------------------------------------------------------------


def resolve(sizes: UnitSizes) -> dict[tuple[int, StateKind], Residence]:
    """Return the residence of each kind of state of each unit.

    Raises:
        ValueError: masters behind an accelerator that no update there could read and write, a
            residence that a plan asks too much of, or shares of a tier for state that has none.
    """
    plan = sizes.plan
    _refuse_shares(sizes)
    if sizes.home.gathered:
        return _spread(sizes)
    beside = [_tiers_beside(sizes, unit) for unit in range(sizes.last + 1)]
    resolved: dict[tuple[int, StateKind], Residence] = {}
    residence = cache(Residence)  # units share them
    for unit, (masters, _) in enumerate(beside):
        for part, tier in ((StateKind.FROZEN, plan.frozen.tier), (StateKind.TRAINABLE, masters)):
            resolved[unit, part] = residence(_visiting(sizes, unit, part), tier)
    waits_in_maps = plan.gradient.tier.facts.maps(sizes.device) and not plan.update.at_turn
    gradient = "mapped" if waits_in_maps and sizes.home.kinds_apart else "resident"
    for unit, (_, states) in enumerate(beside):
        state = "resident"
        if sizes.home.states_inside:
            state = "inside"
        elif states.facts.maps(sizes.device):
            state = "paged" if sizes.few else "mapped"
        resolved[unit, StateKind.GRADIENT] = residence(gradient, plan.gradient.tier)
        resolved[unit, StateKind.OPTIMIZER] = residence(state, states)
    return resolved


def of_graphs(plan: Plan, device: str) -> ResidenceFacts:
    """Return the row of what the blocks' graphs hold: in file maps where activations are, on a
    processor. A compiled block keeps its own graph, and so does one whose parameters are
    gathered."""
    in_maps = plan.activation.tier.facts.maps(device)
    stays = plan.compile or plan.home.gathered
    return RESIDENCES["resident" if stays or not in_maps else "mapped"]


def _refuse_shares(sizes: UnitSizes) -> None:
    """Raise ValueError for state that is put on shares of tiers, and lies on one."""
    plan = sizes.plan
    kinds = ["frozen", "trainable", "gradient", "activation"]
    if not sizes.home.kinds_apart:
        kinds.append("optimizer_state")
    for kind in kinds:
        tier = getattr(plan, kind).tier
        if tier.facts.shares:
            raise ValueError(
                f"plan {plan.method!r}: {kind}.tier is {tier}, which is shares of tiers, and those"
                " are of optimizer_state beside the masters of one process; set it to another"
            )


def _spread(sizes: UnitSizes) -> dict[tuple[int, StateKind], Residence]:
    """Return residences of state that ranks hold in slices."""
    plan = sizes.plan
    tiers = {
        StateKind.FROZEN: plan.frozen.tier,
        StateKind.TRAINABLE: plan.trainable.tier,
        StateKind.GRADIENT: plan.gradient.tier,
        StateKind.OPTIMIZER: plan.optimizer_state.tier,
    }
    resolved: dict[tuple[int, StateKind], Residence] = {}
    residence = cache(Residence)  # units share them
    for unit, spec in enumerate(sizes.model.units):
        for kind, tier in tiers.items():
            present = spec.numel(trainable=kind is not StateKind.FROZEN) > 0
            resolved[unit, kind] = residence("gathered" if present else "resident", tier)
    return resolved


def _tiers_beside(sizes: UnitSizes, unit: int) -> tuple[Tier, Tier]:
    """Return the tiers that a unit's masters and optimizer states lie on. An accelerator updates
    what is on the device; the processor behind it what is on its own tiers, or in its memory where
    that is as little as adapters have."""
    plan = sizes.plan
    masters = plan.trainable.tier
    states = tier_of(plan.optimizer_state.tier, unit, sizes.last + 1)
    if sizes.device == "cpu" or not sizes.home.kinds_apart:
        return masters, states
    by_host = updater(sizes, unit) == "host"
    if not (by_host or sizes.few or masters.facts.resident):
        raise ValueError(
            f"plan {plan.method!r}: trainable is {plan.trainable} and optimizer_state"
            f" {plan.optimizer_state}, and on an accelerator an update needs both in one place:"
            f" set optimizer_state: {plan.trainable.tier} × fp32, or trainable: device × raw"
        )
    if not by_host:
        return device_tier(), device_tier()
    if sizes.few:
        in_memory = next(tier for tier in Tier if tier.facts.host)
        return in_memory, in_memory
    return (states if masters.facts.resident else masters), states


def _visiting(sizes: UnitSizes, unit: int, part: StateKind) -> str:
    """Return the residence of one part of a unit on one process."""
    tier = sizes.placement(part).tier.facts
    trains = part is StateKind.TRAINABLE
    if tier.maps(sizes.device) and not (trains and sizes.home.rewritten):
        comes = sizes.reads(unit).numel(trainable=trains) and not (trains and sizes.few)
        return "mapped" if comes else "paged"
    if _stays(sizes, unit, part):
        return "resident"
    row = RESIDENCES[tier.residence]
    ranks = sizes.ranks(part)
    if ranks > 1:
        no_slices = f"{ranks} ranks hold no slices of it"
        return row.over_ranks or _refuse(sizes, part, no_slices, "group")
    if trains and updater(sizes, unit) == "host":
        by_host = "the processor updates no masters in it"
        return row.as_copies or _refuse(sizes, part, by_host, "tier")
    return tier.residence


def _stays(sizes: UnitSizes, unit: int, part: StateKind) -> bool:
    """Return whether a part of a unit is on the device for good: what its tier has there, both ends
    of the model, blocks that stay, and trainables that are few or that the host computes with."""
    trains = part is StateKind.TRAINABLE
    if unit in (0, sizes.last) or sizes.placement(part).tier.facts.resident:
        return True
    if trains and (sizes.few or host_is_device(sizes)):
        return True
    # masters travel with blocks that stay as well
    kept = unit in sizes.kept and (not trains or sizes.home.rewritten)
    return kept or not sizes.reads(unit).numel(trainable=trains)


def _refuse(sizes: UnitSizes, part: StateKind, reason: str, setting: str) -> str:
    """Raise ValueError for a residence that a plan asks too much of."""
    placement = sizes.placement(part)
    raise ValueError(
        f"plan {sizes.plan.method!r}: {part} is {placement}, whose residence is"
        f" {placement.tier.facts.residence}, and {reason}; set {part}.{setting} to another"
    )


def host_is_device(sizes: UnitSizes) -> bool:
    """Return whether trainables that are rewritten are on the device as they lie on their tier,
    whole: on a processor, whose memory is both."""
    unsliced = sizes.home.rewritten and sizes.ranks(StateKind.TRAINABLE) == 1
    return unsliced and sizes.plan.trainable.tier.facts.is_device(sizes.device)

"""Flat buffers of sharded state: where each parameter lies, which device buffers a plan reuses,
what a rank keeps.

One part (frozen or trainable) of a unit is one flat buffer, padded so that every rank of the world
has a slice of it; who holds which slice is told in :mod:`blockwalk.program.arrive`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec, encoded_nbytes
from blockwalk.plan.placement import DTYPE_BYTES, Codec, StateKind
from blockwalk.plan.plan import Plan
from blockwalk.plan.sizes import ALIGN
from blockwalk.program.program import POOLS, Pool
from blockwalk.program.slicing import Slicing, sliced
from blockwalk.program.state_sizes import compute_dtype

PARTS = (StateKind.FROZEN, StateKind.TRAINABLE)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The places of the parameters of one part of a unit in its flat buffer, its bucket."""

    slicing: Slicing
    """The elements of each parameter, by canonical name, and of all, padded for every rank of the
    world."""
    itemsize: int
    """Bytes of an element; 1 where matrices are encoded."""
    codec: Codec = Codec.RAW
    """The codec of the matrices, where elements are bytes; the other parameters are in the compute
    dtype."""

    @property
    def numel(self) -> int:
        return self.slicing.size

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def flat_layout(
    unit: UnitSpec, part: StateKind, world: int, dtype: str, codec: Codec = Codec.RAW
) -> FlatLayout:
    """Return the layout of one part of a unit over ``world`` ranks: elements of ``dtype``, or with
    a ``codec`` bytes."""
    params = unit.part(part is StateKind.TRAINABLE)
    if not codec.encoded:
        numels = [(param.name, param.numel * width_in(param, dtype)) for param in params]
        slicing = sliced(numels, world, ALIGN // DTYPE_BYTES["float32"])
        return FlatLayout(slicing, DTYPE_BYTES[dtype], codec)
    sizes = [
        (p.name, encoded_nbytes(p.shape, travels_as(p, dtype), written_as(p, codec)))
        for p in params
    ]
    return FlatLayout(sliced(sizes, world), 1, codec)


def part_layout(plan: Plan, model: ModelSpec, unit: UnitSpec, part: StateKind) -> FlatLayout:
    """Return the layout of one part of a unit under a plan."""
    codec = (
        plan.frozen.codec if part is StateKind.FROZEN and plan.frozen.codec.encoded else Codec.RAW
    )
    return flat_layout(unit, part, plan.mesh.world, compute_dtype(plan, model), codec)


def travels_as(param: ParamSpec, dtype: str) -> str:
    """Return the dtype that a parameter has in a flat buffer of ``dtype``: one that is computed in
    float32 keeps its bits."""
    return "float32" if param.exact else dtype


def width_in(param: ParamSpec, dtype: str) -> int:
    """Return elements of a flat buffer of ``dtype`` that an element of a parameter takes: two where
    it keeps float32's bits among those of 16. Its master, moments and gradient lie at the same
    elements of float32 buffers, and use the first of the two."""
    return DTYPE_BYTES[travels_as(param, dtype)] // DTYPE_BYTES[dtype]


def written_as(param: ParamSpec, codec: Codec) -> Codec:
    """Return the codec of a frozen parameter: matrices are encoded; vectors, and experts in three
    dimensions, are not."""
    return codec if param.quantizable and len(param.shape) == 2 else Codec.RAW


@dataclass(frozen=True, slots=True)
class Buffers:
    """The device buffers that a sharded plan reuses, in elements: (frozen, trainable) of each slot,
    and gradients."""

    slots: tuple[tuple[int, int], ...]
    gradients: tuple[int, ...]
    slot_of_end: tuple[int, int]
    """The slots of prologue and epilogue: the same one, unless a tied weight keeps both in use."""
    gradient_of_end: tuple[int, int]


def buffer_pools(plan: Plan, model: ModelSpec) -> Buffers:
    """Return one slot for every block that is on the device at once, and for prologue and epilogue;
    gradients likewise."""

    def most(units: Iterable[UnitSpec], part: StateKind) -> int:
        return max((part_layout(plan, model, unit, part).numel for unit in units), default=0)

    def pair(units: Sequence[UnitSpec]) -> tuple[int, int]:
        return most(units, StateKind.FROZEN), most(units, StateKind.TRAINABLE)

    count = plan.prefetch + 1
    ends = (model.prologue, model.epilogue)
    each = [(unit,) for unit in ends] if model.tied else [ends]
    waiting = min(count, 2)
    return Buffers(
        slots=(*[pair(model.blocks)] * count, *(pair(units) for units in each)),
        gradients=tuple(
            most(units, StateKind.TRAINABLE) for units in [*[model.blocks] * waiting, *each]
        ),
        slot_of_end=(count, count + len(each) - 1),
        gradient_of_end=(waiting, waiting + len(each) - 1),
    )


def accumulates(plan: Plan) -> bool:
    """Whether a unit's gradients are complete only after several turns, so that they are kept in
    between."""
    return plan.gradient_accumulation_steps > 1 and plan.accumulation_order == "micro_batch"


def has_node_slice(plan: Plan) -> bool:
    return plan.parameter_ranks < plan.optimizer_ranks


def hosts_node_slice(plan: Plan) -> bool:
    return has_node_slice(plan) and plan.cache.tier == "host"


def sharded_resident(plan: Plan, model: ModelSpec, device: str) -> Counter[Pool]:
    """Return bytes of one rank between steps, without slots and gradient buffers.

    On the device with 16-bit parameters, Adam and gradients that accumulate: 12n/o + 4n/g + 2n/p,
    spread over o, g and p ranks."""
    size = DTYPE_BYTES[compute_dtype(plan, model)]
    held: Counter[Pool] = Counter()
    states = 4 * (1 + len(plan.update_rule.states))
    in_place = accumulates(plan) and plan.gradient.on_device
    own_state = plan.optimizer_state.on_device
    for unit in model.units:
        frozen, flat = (part_layout(plan, model, unit, part) for part in PARTS)
        node = Pool.HOST if hosts_node_slice(plan) else Pool.DEVICE
        held[node] += (frozen.nbytes + flat.nbytes) // plan.parameter_ranks
        if not has_node_slice(plan) and size == 4 and own_state:
            held[Pool.DEVICE] -= (
                size * flat.numel // plan.parameter_ranks
            )  # the master is gathered from
        elif hosts_node_slice(plan) and not (size == 4 and own_state):
            held[Pool.DEVICE] += size * flat.numel // plan.optimizer_ranks
        held[POOLS[plan.optimizer_state.tier]] += states * flat.numel // plan.optimizer_ranks
        if plan.update.at_turn:  # what a step that is refused goes back to
            beside = Pool.DISK if device == "cpu" else POOLS[plan.optimizer_state.tier]
            held[beside] += states * flat.numel // plan.optimizer_ranks
        held[Pool.DEVICE] += (
            4 * flat.numel // (plan.gradient_ranks if in_place else plan.optimizer_ranks)
        )
        if accumulates(plan) and not in_place:
            held[Pool.HOST] += 4 * flat.numel // plan.gradient_ranks
    return +held

"""Flat buffers of sharded state: where each parameter lies, which device buffers a plan reuses,
what a rank keeps.

One part (frozen or trainable) of a unit is one flat buffer, padded so that every rank of the world
has a slice of it; who holds which slice is told in :mod:`blockwalk.program.arrive`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec, encoded_nbytes
from blockwalk.plan.placement import DTYPE_BYTES, Codec, StateKind
from blockwalk.plan.plan import Plan
from blockwalk.plan.sizes import ALIGN
from blockwalk.program.slicing import Slicing, sliced
from blockwalk.program.stages import chunk_slots, chunk_sums
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
    return flat_layout(unit, part, plan.mesh.stage_ranks, compute_dtype(plan, model), codec)


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


NO_BUFFERS = Buffers((), (), (0, 0), (0, 0))
"""The buffers of a plan that gathers nothing."""


def buffer_pools(plan: Plan, model: ModelSpec) -> Buffers:
    """Return one slot for every block that is on the device at once, and for prologue and epilogue;
    buffers for the gradients of two blocks, or of a chunk, and for theirs."""

    def largest(units: Iterable[UnitSpec], part: StateKind) -> int:
        return max((part_layout(plan, model, unit, part).numel for unit in units), default=0)

    def slot(units: Sequence[UnitSpec]) -> tuple[int, int]:
        return largest(units, StateKind.FROZEN), largest(units, StateKind.TRAINABLE)

    blocks_at_once = chunk_slots(plan, model, plan.prefetch + 1)
    gradients_at_once = chunk_sums(plan, model, min(plan.prefetch + 1, 2))
    pair = (model.prologue, model.epilogue)
    ends = [(unit,) for unit in pair] if model.tied else [pair]
    waiting = [model.blocks] * gradients_at_once
    return Buffers(
        slots=(*[slot(model.blocks)] * blocks_at_once, *map(slot, ends)),
        gradients=tuple(largest(units, StateKind.TRAINABLE) for units in [*waiting, *ends]),
        slot_of_end=(blocks_at_once, blocks_at_once + len(ends) - 1),
        gradient_of_end=(gradients_at_once, gradients_at_once + len(ends) - 1),
    )


def accumulates(plan: Plan) -> bool:
    """Return whether a unit's gradients are complete only after several turns, so that they are
    kept in between."""
    return len(plan.walks) > 1


def has_node_slice(plan: Plan) -> bool:
    """Return whether each rank keeps a slice over fewer ranks than masters are spread over."""
    return plan.parameter_ranks < plan.optimizer_ranks


def hosts_node_slice(plan: Plan) -> bool:
    """Return whether that slice lies in host memory."""
    return has_node_slice(plan) and plan.cache.off_device

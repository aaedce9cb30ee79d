"""One part of a model's state spread over ranks: each keeps slices of every unit's bucket, and
units visit slots.

GATHER completes a bucket from the slices of a group, CACHE and FETCH keep a node's slice on the
host or the device in between. Places and times are compiled in :mod:`blockwalk.program.arrive`;
collectives are in :mod:`blockwalk.ranks.groups`.

P elements of a bucket; where its matrices are encoded, an element is a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from blockwalk.engine.assembled import Assembled, Assembler
from blockwalk.engine.buckets import word_sum
from blockwalk.engine.home import Job
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.slots import Slots
from blockwalk.numerics.codecs.layout import Layout, dtype_of, name_of
from blockwalk.numerics.codecs.weights import Value, opened
from blockwalk.numerics.device import is_cpu, recorded
from blockwalk.plan.mesh import Axis, reach
from blockwalk.plan.model_spec import ModelSpec, ParamSpec
from blockwalk.plan.placement import StateKind
from blockwalk.program.flat_layout import (
    PARTS,
    FlatLayout,
    buffer_pools,
    has_node_slice,
    hosts_node_slice,
    part_layout,
    travels_as,
    width_in,
    written_as,
)
from blockwalk.program.program import Lane, Op
from blockwalk.program.slicing import Run
from blockwalk.ranks.groups import Completion, Groups
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.memory import Memory

Slice = tuple[Tensor, int]
"""This rank's slice of a bucket, and over how many ranks it is one."""


@dataclass(slots=True)
class UnitSlices:
    """The slices that a rank keeps of one part of a unit between its turns, beside masters."""

    layout: FlatLayout
    params: Mapping[str, ParamSpec]
    """Parameters by canonical name, in the order of the layout."""
    compute_dtype: torch.dtype
    source: Tensor | None = None
    """The slice in the compute dtype that gathers begin with. It may be the master itself, or lie
    in ``node``."""
    node: Tensor | None = None
    """The node's slice in the compute dtype, on the device or on the host."""

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the bucket's elements."""
        return torch.uint8 if self.layout.codec.encoded else self.compute_dtype

    def layout_of(self, name: str, dtype: torch.dtype | None = None) -> Layout:
        """Return the layout of a parameter's bytes in a bucket of a dtype, the compute dtype unless
        given; one that keeps float32's bits in a narrower one is in float32."""
        param = self.params[name]
        plain = name_of(dtype or self.compute_dtype)
        return Layout(param.shape, written_as(param, self.layout.codec), travels_as(param, plain))

    def width(self, name: str) -> int:
        """Return elements of the bucket that an element of a parameter takes."""
        return width_in(self.params[name], name_of(self.compute_dtype))

    def open(self, bucket_P: Tensor) -> dict[str, Value]:
        """Return the parameters, by name, in a whole bucket: views, and encoded matrices that are
        decoded when they are used."""
        bytes_P = bucket_P.view(torch.uint8)
        dtype = None if self.layout.codec.encoded else bucket_P.dtype
        values: dict[str, Value] = {}
        for name, start, size in self.layout.slicing.parts:
            layout = self.layout_of(name, dtype)
            width = 1 if bucket_P.dtype == self.dtype else self.width(name)
            if width > 1:  # of masters and gradients, one in as many elements
                values[name] = bucket_P[start : start + size : width].view(layout.shape)
            else:
                byte = start * bucket_P.itemsize
                part_P = bytes_P[byte : byte + layout.nbytes]
                values[name] = opened(layout, part_P, self.compute_dtype)
        return values


class ShardedPart:
    """One part of every unit (a :class:`~blockwalk.engine.home.Home`). Node slices are filled here;
    what gathers begin with where there are none, by the caller."""

    def __init__(
        self, model: ModelHandle, groups: Groups, part: StateKind, memories: Memories
    ) -> None:
        self.groups = groups
        self._part = part
        self._model = model
        self.plan = model.plan
        trainable = part is StateKind.TRAINABLE
        column = PARTS.index(part)
        self.units = self._laid_out(model.spec)
        self.all_units = self.units
        """The units of all stages; of those that another one holds the layout alone."""
        if model.stage.count > 1:
            self.all_units = self._laid_out(model.full_spec)
        self.owner = {
            name: unit for unit, slices in enumerate(self.units) for name in slices.params
        }
        """The unit of each parameter."""
        self._reads = [tuple(p.name for p in params) for params in model.reads[trainable]]
        memory = memories["host" if hosts_node_slice(self.plan) else "device"]
        for unit, slices in enumerate(self.units):
            if has_node_slice(self.plan) and slices.numel:
                slices.node = self.read(unit, memory)
        sizes = [
            sizes[column] * self.units[1].dtype.itemsize
            for sizes in buffer_pools(self.plan, model.spec).slots
        ]
        self.slots = Slots(sizes, model.device)
        self._kept: dict[int, Tensor] = {}
        """Node slices that stay on the device for the rest of a step."""

    def _laid_out(self, spec: ModelSpec) -> list[UnitSlices]:
        """Return the layouts of this part of a model's units."""
        trainable = self._part is StateKind.TRAINABLE
        return [
            UnitSlices(
                part_layout(self.plan, spec, unit, self._part),
                {p.name: p for p in unit.part(trainable)},
                self._model.compute_dtype,
            )
            for unit in spec.units
        ]

    # ---- residency -------------------------------------------------------------------------------

    def bring(self, op: Op) -> Job:
        """FETCH: copy a node slice from the host into its place in a slot."""
        node, slot_P = self._node_in_slot(op)
        return partial(_copy, slot_P, node)

    def write_back(self, op: Op) -> Job:
        raise AssertionError(f"slices of masters change, and no slot: {op}")

    def leave(self, op: Op) -> Job:
        """EVICT: forget a slice that stayed on the device, after its last use."""
        if op.device_slice:
            self._kept.pop(op.unit, None)
        return lambda: None

    def keep(self, op: Op) -> Job:
        """CACHE: copy a node slice from a slot to where it stays for the rest of the step."""
        _, slot_P = self._node_in_slot(op)
        node = self._kept[op.unit] = torch.empty_like(slot_P)
        return self._cache(node, slot_P)

    def _cache(self, node: Tensor, slot_P: Tensor) -> Job:
        begin = None if is_cpu(self._model.device) else recorded(self._model.device)

        def work() -> None:
            if begin is not None:
                # until then the compute lane may use what lay where a kept slice does
                torch.accelerator.current_stream(self._model.device).wait_event(begin)
            _copy(node, slot_P)

        return work

    def complete(self, op: Op) -> Job:
        """GATHER: complete a slice over a group of ranks, in a slot or, to refresh a node slice,
        where that lies."""
        slices = self.units[op.unit]
        axes = self.groups.named(op.axes)
        inner, outer = reach(axes)
        if op.slot < 0:
            return partial(self._refresh, slices, axes, op.lane)
        bucket_P = self._enter(op)
        begin: Tensor | None = None
        if op.device_slice:
            begin = self._kept[op.unit]
        elif outer == self.plan.optimizer_ranks:
            begin = slices.source
        elif outer == self.plan.parameter_ranks and not hosts_node_slice(self.plan):
            begin = slices.node
        slice_P = bucket_P[self.groups.slice(slices.numel, outer)]
        gathered_P = bucket_P[self.groups.slice(slices.numel, inner)]

        def work() -> Completion | None:
            if begin is not None:
                _copy(slice_P, begin)
            return self.groups.begin_gather_(gathered_P, axes, op.lane)

        return work

    def _refresh(self, slices: UnitSlices, axes: Sequence[Axis], lane: Lane) -> Completion | None:
        """Complete a part of a node slice over these axes where it lies. Behind an accelerator one
        in host memory is gathered on the device."""
        assert slices.node is not None
        inner, outer = reach(axes)
        node_ranks = self.plan.parameter_ranks
        whole_P = self.inside(slices.node, slices.numel, node_ranks, inner)
        own_P = self.inside(slices.node, slices.numel, node_ranks, outer)
        begin = slices.source if outer == self.plan.optimizer_ranks else None
        if whole_P.device.type == self._model.device.type:
            if begin is not None and begin.data_ptr() != own_P.data_ptr():
                _copy(own_P, begin)
            return self.groups.begin_gather_(whole_P, axes, lane)
        gathered_P = torch.empty_like(whole_P, device=self._model.device)
        start = own_P.storage_offset() - whole_P.storage_offset()
        _copy(gathered_P[start : start + len(own_P)], own_P if begin is None else begin)
        self.groups.gather_(gathered_P, axes, lane)
        whole_P.copy_(gathered_P, non_blocking=True)
        return None

    def _node_in_slot(self, op: Op) -> tuple[Tensor, Tensor]:
        """Return a node slice, and its place in the slot that an op fills."""
        slices = self.units[op.unit]
        assert slices.node is not None
        bucket_P = self._enter(op)
        return slices.node, bucket_P[self.groups.slice(slices.numel, self.plan.parameter_ranks)]

    def _enter(self, op: Op) -> Tensor:
        """Return the place of a unit's bucket in the slot that an op fills."""
        slices = self.units[op.unit]
        return self.slots.enter(op.unit, op.slot, slices.layout.nbytes).view(slices.dtype)

    def _open(self, unit: int) -> dict[str, Value]:
        """Return the parameters of a unit where they lie in its slot."""
        slices = self.units[unit]
        if not slices.numel:
            return {}
        return slices.open(self.slots.of(unit, slices.layout.nbytes).view(slices.dtype))

    def values(self, unit: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for owner in {self.owner[name] for name in self._reads[unit]}:
            values |= self._open(owner)
        return {name: self._as_used(name, values[name]) for name in self._reads[unit]}

    def _as_used(self, name: str, value: Value) -> Value:
        exact = isinstance(value, Tensor) and self._model.compute_dtype_of(name) == torch.float32
        return value.to(torch.float32) if exact else value  # type: ignore[union-attr]

    def value(self, name: str) -> Value:
        return self._open(self.owner[name])[name]

    # ---- slices ----------------------------------------------------------------------------------

    def read(self, unit: int, memory: Memory) -> Tensor:
        """Return this rank's slice of a unit over the ranks that hold one copy of it, as it
        travels, from where the model came from."""
        slices = self.units[unit]
        ranks = self.plan.parameter_ranks

        shapes = {"slice": ((slices.numel // ranks,), slices.dtype)}
        slice_P = memory.zeros(shapes, ("slice", self._part, unit))["slice"]
        for run in self.runs(slices, ranks):
            layout = slices.layout_of(run.name)
            out_P = slice_P[run.place : run.end]
            if layout.codec.encoded:
                bytes_P = torch.empty(layout.nbytes, dtype=torch.uint8)
                self._model.fill(run.name, layout, bytes_P)
                out_P.copy_(bytes_P[run.start : run.stop])
            else:
                # slices and parameters begin at multiples of ALIGN: no element is cut
                width = layout.code_dtype.itemsize // slices.dtype.itemsize
                part_P = self._part_of(run, layout.shape, width)
                out_P.view(layout.code_dtype).copy_(part_P)
        return slice_P

    def _part_of(self, run: Run, shape: tuple[int, ...], width: int) -> Tensor:
        """Return the elements of a parameter that a run of a bucket holds, ``width`` of the
        bucket's for each."""
        return self._model.part(run.name, shape, run.start // width, run.stop // width)

    def runs(self, slices: UnitSlices, ranks: int) -> Iterator[Run]:
        """Yield what lies of each parameter in this rank's slice over so many ranks."""
        span = self.groups.slice(slices.numel, ranks)
        return slices.layout.slicing.runs(span.start, span.stop)

    def cut_masters(self, slices: UnitSlices, ranks: int, out_P: Tensor) -> None:
        """Copy what lies in this rank's slice (zeros, float32) over so many ranks of the parameters
        as they came."""

        for run in self.runs(slices, ranks):
            width = slices.width(run.name)
            shape = slices.params[run.name].shape
            out_P[run.place : run.end : width].copy_(self._part_of(run, shape, width))

    def round_masters(
        self, slices: UnitSlices, ranks: int, master_P: Tensor, out_P: Tensor
    ) -> None:
        """Copy this rank's slice of masters (float32) over so many ranks into a slice as it
        travels: rounded to the compute dtype, but for parameters that keep float32's bits."""
        _copy(out_P, master_P)
        for run in self.runs(slices, ranks):
            width = slices.width(run.name)
            if width > 1:  # slices and parameters begin at multiples of ALIGN: no element is cut
                exact_P = out_P[run.place : run.end].view(torch.float32)
                _copy(exact_P, master_P[run.place : run.end : width])

    def inside(self, slice_P: Tensor, numel: int, outer: int, inner: int) -> Tensor:
        """Return the part of this rank's slice over ``outer`` ranks that is its slice over
        ``inner`` (more) ranks."""
        start = self.groups.slice(numel, outer).start
        span = self.groups.slice(numel, inner)
        return slice_P[span.start - start : span.stop - start]

    # ---- whole buckets, outside a program: every rank calls these together -----------------------

    def gathered(self, unit: int, own: Slice | None, dtype: torch.dtype) -> Tensor:
        """Return a unit's whole bucket [P] of a dtype, on the device, from each rank's slice; of a
        unit of another stage, which has none of it here, as that one has gathered it."""
        numel = self.all_units[unit].numel
        bucket_P = torch.empty(numel, dtype=dtype, device=self._model.device)
        if own is not None:
            slice_P, ranks = own
            bucket_P[self.groups.slice(numel, ranks)] = slice_P.to(self._model.device)
            for axis in reversed(self.groups.between(1, ranks)):
                self.groups.gather_(
                    bucket_P[self.groups.slice(numel, axis.inner)], (axis,), self.groups.lane(axis)
                )
        if self.groups.stages is not None:
            self.groups.stages.tell(bucket_P, self._model.stage_of(unit))
        return bucket_P

    def whole(self, own: Mapping[int, Tensor], ranks: int) -> dict[str, Tensor]:
        """Return whole float32 tensors by parameter, on every rank, of which ``own`` are this
        rank's slices by unit, over so many ranks: for small models and tests."""
        tensors: dict[str, Tensor] = {}
        for unit, slices in enumerate(self.all_units):
            if not slices.numel:
                continue
            held = (own[unit], ranks) if unit in own else None
            values = slices.open(self.gathered(unit, held, torch.float32))
            tensors |= {
                name: value.clone() for name, value in values.items() if isinstance(value, Tensor)
            }
        return tensors

    def assembled(
        self, own: Callable[[int], Slice], dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Return every parameter in the dtype that the model came in, its unit assembled when rows
        of it are read. ``own`` answers this rank's slice of a unit that its stage holds, in
        ``dtype``: unless given that of buckets as they travel."""

        def assemble(unit: int) -> dict[str, Value]:
            held = own(unit) if self.units[unit].numel else None
            slices = self.all_units[unit]
            return slices.open(self.gathered(unit, held, dtype or slices.dtype))

        assembler = Assembler(assemble)
        return {
            name: Assembled(assembler, unit, p.shape, dtype_of(p.dtype), itemgetter(name))
            for unit, slices in enumerate(self.all_units)
            for name, p in slices.params.items()
        }

    def weights(self) -> dict[str, Any]:
        return self.assembled(self._slice)

    def sums(self) -> list[tuple[str, int, int]]:
        """Return a checksum of this rank's slice of each unit, where others hold copies of it: the
        unit's name, the ranks that hold one copy together, the sum: 0 of what another stage
        holds."""
        ranks = self.plan.parameter_ranks
        if ranks == self.plan.mesh.stage_ranks:
            return []
        return [
            (
                f"{unit.name} (frozen)",
                ranks,
                word_sum(self._slice(n)[0]) if self.units[n].numel else 0,
            )
            for n, unit in enumerate(self._model.full_spec.units)
            if self.all_units[n].numel
        ]

    def _slice(self, unit: int) -> Slice:
        """Return this rank's slice in the compute dtype, and over how many ranks it is one."""
        slices = self.units[unit]
        slice_P = slices.node if slices.node is not None else slices.source
        assert slice_P is not None
        return slice_P, self.plan.parameter_ranks


def sharded_frozen(model: ModelHandle, groups: Groups, memories: Memories) -> ShardedPart:
    """Return the home of frozen parameters over ranks; gathers begin with node slices, or with the
    only ones there are."""
    part = ShardedPart(model, groups, StateKind.FROZEN, memories)
    for unit, slices in enumerate(part.units):
        if slices.numel and slices.node is None:
            slices.source = part.read(unit, memories["device"])
    return part


def _copy(out_P: Tensor, from_P: Tensor) -> None:
    out_P.copy_(from_P, non_blocking=True)

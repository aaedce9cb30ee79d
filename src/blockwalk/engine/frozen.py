"""Frozen parameters that are whole on this process: where they stay, and those that visit the
device at their block's turn.

On the host tier the visiting ones lie in pinned memory, a bucket a unit, or in zeroth order a slice
of it on each rank of a group, gathered in the slot; on the disk tier, behind an accelerator, they
are read from file maps into pinned staging on the way. Nothing is ever written back. A CPU reads
what is on its disk in place, and only what the disk does not hold contiguously (experts stored one
by one, or encoded) is put together in a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from blockwalk.engine.bucket_tensors import BucketLayout
from blockwalk.engine.home import NO_JOB, Brief, Job, on_bytes
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.slots import Slots
from blockwalk.numerics.codecs.layout import Layout, name_of
from blockwalk.numerics.codecs.weights import DenseWeight, EncodedWeight, Value, opened
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import Codec, StateKind
from blockwalk.program.placements import Placements
from blockwalk.program.program import Op
from blockwalk.ranks.ranks import Ranks
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.protocols import UnitTier, WeightSource


class Frozen:
    """The home of the frozen parameters (a :class:`~blockwalk.engine.home.Home`).

    Args:
        model: the model.
        group: the ranks that may hold its buckets together.
        memories: where buckets are kept that visit the device from a tier of their own.
    """

    def __init__(self, model: ModelHandle, group: Ranks, memories: Memories) -> None:
        self._model = model
        self._group = group
        plan = model.plan
        self._facts = plan.frozen.tier.facts
        self._reads_files = self._facts.mapped
        """True where a unit is read from the model's files at each visit; of a tier in memory
        hardly a page of them is there."""
        self._places = places = Placements(plan, model.spec, model.device.type)
        self._reads = model.reads[False]
        self._stored = [
            [p.name for p in params if p.name not in model.in_memory] for params in self._reads
        ]
        """The names of each unit's parameters that the source has; a frozen adapter's it has
        not."""
        self._ranks = places.sizes.ranks(StateKind.FROZEN)
        self._place = group.place_of(group.rank, self._ranks)
        self._buckets = {
            unit: BucketLayout({p.name: self._travelling(p) for p in visitors}, self._ranks)
            for unit, params in enumerate(self._reads)
            if (visitors := self._visiting(unit, params))
        }
        largest = max((bucket.nbytes for bucket in self._buckets.values()), default=0)
        self.slots = Slots([largest] * places.slot_count, model.device) if self._buckets else None
        self._tier = self._open_tier(memories, largest) if self._buckets else None
        self._arrivals: dict[tuple[int, int], dict[str, Value]] = {}
        """A unit's visitors in a slot, by name: views of its bytes, which every visit of it
        fills."""
        self.bound: dict[str, Value] = {}
        """Every parameter as its products read it, by name; one that visits as it came last."""
        for unit, params in enumerate(self._reads):
            if unit in self._buckets:
                self._arrive(unit, 0)
            for param in params:
                if param.name not in self.bound:
                    self.bound[param.name] = self._as_used(
                        param, whole=unit not in places.sizes.kept
                    )
            model.cut.bind(unit, {p.name: self.bound[p.name] for p in params})

    @property
    def _source(self) -> WeightSource:
        source = self._model.source
        assert source is not None, "frozen parameters that travel have a source"
        return source

    def _own(self, bytes_P: Tensor) -> Tensor:
        """Return the bytes of a unit (uint8 [P]) that this process keeps and fetches: its slice, or
        all of them."""
        return bytes_P.chunk(self._ranks)[self._place]

    def _visiting(self, unit: int, params: Iterable[ParamSpec]) -> tuple[ParamSpec, ...]:
        """Return the parameters that are copied to a slot when their unit's turn comes, instead of
        staying or being read where they are mapped. Those without a source (a frozen adapter's)
        stay."""
        visits = self._places.residence(unit, StateKind.FROZEN).visits
        return tuple(
            p
            for p in params
            if p.name not in self._model.in_memory and visits(self._places.sizes, unit, p)
        )

    def _travelling(self, param: ParamSpec) -> Layout:
        """Return the layout of a parameter as it travels: as the tier has it where products read it
        a range at a time, otherwise in the dtype that it is computed with; one that the source
        assembles travels whole."""
        stored = self._model.stored(param.name)
        if isinstance(stored, EncodedWeight):
            return stored.layout
        dtype = self._model.compute_dtype_of(param.name)
        if isinstance(stored, Tensor) and param.quantizable and stored.dim() == 2:
            dtype = stored.dtype
        return Layout(param.shape, Codec.RAW, name_of(dtype))

    def _as_used(self, param: ParamSpec, *, whole: bool) -> Value:
        """Return a parameter that stays, as its products read it: converted where it is small, a
        range at a time where it is a matrix, or with ``whole`` converted on an accelerator too."""
        model = self._model
        dtype = self._model.compute_dtype_of(param.name)
        weight = model.pop(param.name)
        if isinstance(weight, EncodedWeight):
            if weight.device != model.device:
                bytes_P = torch.empty(weight.layout.nbytes, dtype=torch.uint8, device=model.device)
                weight = EncodedWeight(weight.together(bytes_P), weight.layout)
            return weight.to(dtype)
        if not isinstance(weight, Tensor):
            return weight
        if self._facts.resident or (whole and model.device.type != "cpu"):
            return weight.to(model.device, dtype, copy=model.source is not None)
        weight = weight.to(model.device)
        return (
            _read_as(dtype, weight) if param.quantizable and weight.dim() == 2 else weight.to(dtype)
        )

    def _open_tier(self, memories: Memories, largest: int) -> UnitTier:
        """Return the buckets where they stay between their turns: in the model's own files, where
        the tier's bytes are files, or in its memory."""
        model = self._model
        source = self._source
        if self._reads_files:
            return memories.visited(_FromSource(model, self._buckets), largest)
        tier = memories.buckets(model.plan.frozen.tier, StateKind.FROZEN, largest)
        slice_P = torch.empty(largest // self._ranks, dtype=torch.uint8)
        for unit, bucket in self._buckets.items():
            own_P = slice_P[: bucket.nbytes // self._ranks]
            self._fill_slice(bucket, own_P)
            tier.write_unit(unit, own_P, 0)
            source.release([name for name in bucket.layouts if source.in_place(name)])
        return tier

    def _fill_slice(self, bucket: BucketLayout, own_P: Tensor) -> None:
        """Read this process's slice of a unit (uint8 [nbytes // ranks]) from the source."""
        bucket_P = own_P if self._ranks == 1 else torch.empty(bucket.nbytes, dtype=torch.uint8)
        start = self._place * len(own_P)
        names = {run.name for run in bucket.slicing.runs(start, start + len(own_P))}
        for name, layout, part_P in bucket.parts(bucket_P):
            if name in names:
                self._model.fill(name, layout, part_P)
        if bucket_P is not own_P:
            own_P.copy_(self._own(bucket_P))

    def _arrive(self, unit: int, slot: int) -> Tensor:
        """Bind a unit's visitors where they will lie; the answer is that place."""
        assert self.slots is not None
        bucket = self._buckets[unit]
        bytes_P = self.slots.enter(unit, slot, bucket.nbytes)
        arriving = self._arrivals.get((unit, slot))
        if arriving is None:
            arriving = self._arrivals[unit, slot] = {
                name: _read_as(
                    self._model.compute_dtype_of(name),
                    opened(layout, part_P, self._model.compute_dtype_of(name)),
                )
                for name, layout, part_P in bucket.parts(bytes_P)
            }
        self.bound |= arriving
        self._model.cut.bind(unit, arriving)
        return bytes_P

    def bring(self, op: Op) -> Job:
        """FETCH: copy what visits, or this process's slice of it, to its slot."""
        if self._reads_files:
            return self.will_need(op)
        if op.unit not in self._buckets:  # all that it has came in memory
            return NO_JOB
        bytes_P = self._arrive(op.unit, op.slot)
        return on_bytes(bytes_P.nbytes, self._copy, op.unit, bytes_P)

    def will_need(self, op: Op) -> Job:
        """FETCH: make the pages of a unit resident, and put together in its slot what no file has
        whole."""
        bytes_P = self._arrive(op.unit, op.slot) if op.unit in self._buckets else None
        return partial(self._read, op.unit, bytes_P)

    def _read(self, unit: int, bytes_P: Tensor | None) -> None:
        self._source.prefetch(self._stored[unit])
        if bytes_P is not None:
            self._copy(unit, bytes_P)

    def _copy(self, unit: int, bytes_P: Tensor) -> None:
        assert self._tier is not None
        self._tier.read_unit(unit, self._own(bytes_P))

    def complete(self, op: Op) -> Job:
        """GATHER: complete a unit in its slot from the slices of the other ranks."""
        assert self.slots is not None
        slot_P = self.slots.of(op.unit, self._buckets[op.unit].nbytes)
        return partial(self._group.gather_, slot_P, self._ranks)

    def leave(self, op: Op) -> Job:
        """EVICT: give the pages of a unit back."""
        release = partial(self._source.release, self._stored[op.unit])
        return release if self._reads_files else Brief(release)

    def write_back(self, op: Op) -> Job:
        raise AssertionError(f"frozen parameters are not written: {op}")

    dont_need = write_back

    def values(self, unit: int) -> Mapping[str, Value]:
        return {}  # bound for good, or when they were fetched

    def value(self, name: str) -> Value:
        return self.bound[name]

    def weights(self) -> Mapping[str, Value]:
        visitors = [name for bucket in self._buckets.values() for name in bucket.layouts]
        source = self._model.source
        return {**self.bound, **(source.weights(visitors) if source is not None else {})}


class _FromSource:
    """Units written from where the model came from, a :class:`~blockwalk.tiers.protocols.UnitTier`
    that is only read."""

    def __init__(self, model: ModelHandle, buckets: Mapping[int, BucketLayout]) -> None:
        self._model = model
        self._buckets = buckets

    def step(self, unit: int) -> int:
        return 0

    def bucket(self, unit: int) -> Tensor | None:
        return None

    def read_unit(self, unit: int, out_P: Tensor) -> int:
        for name, layout, part_P in self._buckets[unit].parts(out_P):
            self._model.fill(name, layout, part_P)
        return 0

    def write_unit(self, unit: int, data_P: Tensor, step: int) -> None:
        raise AssertionError("frozen parameters are not written")

    def close(self) -> None:
        """Do nothing: the source is closed with the model."""


def _read_as(dtype: torch.dtype, value: Value) -> Value:
    """Return a parameter as products in ``dtype`` read it: a range at a time where it lies in
    another."""
    return (
        DenseWeight(value, dtype) if isinstance(value, Tensor) and value.dtype != dtype else value
    )

"""Units whose trainables the ranks of a node hold together: each rank a slice of every unit's
bucket.

A rank fetches, updates and stores its slice: some of the parameters, and behind them the states
beside these. Its parameters are gathered, with those of the other slices side by side; its states
are read by the update alone and stay with the rank. The bucket is then the parameters as a forward
reads them.

Plain numbers are cut at equal bytes of the bucket, so that the parameters of all slices side by
side are the bucket. A codec with a scale a row is cut between rows, since a scale belongs to one
update: there they are copied into the bucket after the gather.

S bytes of a slice, G bytes of the parameters in it, n ranks, P bytes of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockwalk.engine.bucket_tensors import STATE, BucketTensor
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import spans
from blockwalk.tiers.block_store.store import ALIGN, StoredParam, StoredUnit, side_by_side


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Consecutive elements of one tensor in a slice."""

    param: StoredParam
    """The tensor, where it lies in the unit's own bucket, in which each parameter's states follow
    it."""
    first: int
    last: int
    """The elements ``first:last`` of the tensor; whole rows of a codec with scales."""
    at: int
    """The byte of the slice at which they begin."""

    @property
    def layout(self) -> Layout:
        """The layout of the run by itself."""
        whole = self.param.layout(32)
        count = self.last - self.first
        return replace(
            whole, shape=(count // whole.columns, whole.columns) if whole.groups else (count,)
        )

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def copies(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Yield triples (place in the slice, place in a bucket whose tensor begins at ``start``,
        bytes) of its scales and of its codes."""
        whole = self.param.layout(32)
        own = self.layout
        scale = own.groups * own.scale_dtype.itemsize
        size = own.code_dtype.itemsize
        if scale:
            yield self.at, start + self.first // whole.columns * scale, own.scale_bytes
        codes = start + whole.scale_bytes + self.first * whole.code_columns // whole.columns * size
        yield self.at + own.scale_bytes, codes, own.nbytes - own.scale_bytes


class BucketSlices:
    """The slices that one unit's bucket is cut into.

    Args:
        unit: as one process would hold it, states beside their parameters.
        count: ranks.
    """

    def __init__(self, unit: StoredUnit, count: int) -> None:
        self.unit = unit
        self.count = count
        params = [param for param in unit.params if STATE not in param.name]
        self.apart = not all(param.dense for param in params)
        """Whether the gathered parameters must be copied into the bucket: side by side they are not
        the bucket itself."""
        step = ALIGN if self.apart else ALIGN * count
        placed, end = side_by_side(params)
        self.bucket = replace(unit, nbytes=-(-end // step) * step, params=placed)
        parameters = [self._parameters(place) for place in range(count)]
        self.gathered = max(
            (_aligned(own[-1].at + own[-1].nbytes) for own in parameters if own), default=0
        )
        if not self.apart:
            self.gathered = self.bucket.nbytes // count
        self.runs = [[*own, *self._states(own)] for own in parameters]
        ends = [_aligned(each[-1].at + each[-1].nbytes) for each in self.runs if each]
        self.nbytes = max([self.gathered, *ends])
        """S, bytes of a slice; ``gathered`` is G."""

    def _parameters(self, place: int) -> list[TensorRun]:
        """Return the parameters in a rank's slice."""
        own = {param.name: param for param in self.unit.params}
        low = place * self.bucket.nbytes // self.count
        high = (place + 1) * self.bucket.nbytes // self.count
        runs = []
        end = 0
        for param in self.bucket.params:
            layout = param.layout(32)
            if self.apart:
                first, last = (
                    layout.rows * i // self.count * layout.columns for i in (place, place + 1)
                )
                at = end
            else:
                size = layout.code_dtype.itemsize
                first = max(low - param.offset, 0) // size
                last = min(high - param.offset, param.nbytes) // size
                at = param.offset + first * size - low
            if first < last:
                runs.append(TensorRun(own[param.name], first, last, at))
                end = _aligned(at + runs[-1].nbytes)
        return runs

    def _states(self, own: Sequence[TensorRun]) -> list[TensorRun]:
        """Return the states beside the parameters in a slice."""
        runs = []
        end = self.gathered
        for run in own:
            for param in self.unit.params:
                if param.name.startswith(run.param.name + STATE):
                    runs.append(TensorRun(param, run.first, run.last, end))
                    end = _aligned(end + runs[-1].nbytes)
        return runs

    @property
    def stored(self) -> StoredParam:
        """The slice as the one parameter that it is of a store's unit."""
        return StoredParam(
            f"{self.unit.name}{STATE}slice", Codec.RAW, (self.nbytes,), "uint8", 0, self.nbytes, 0
        )

    # ---- in a slot -------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes of a slot: the bucket, the gathered parameters where they are not the bucket, and
        the slice where it has states."""
        gathered = self.count * self.gathered if self.apart else 0
        return self.bucket.nbytes + gathered + (self.nbytes if self.nbytes > self.gathered else 0)

    def side_by_side(self, slot_P: Tensor) -> Tensor:
        """Return the parameters of all slices in a slot (uint8 [room]), as they are gathered: uint8
        [n·G]."""
        start = self.bucket.nbytes if self.apart else 0
        return slot_P[start : start + self.count * self.gathered]

    def in_slot(self, slot_P: Tensor, place: int) -> Tensor:
        """Return a rank's slice in a slot (uint8 [room])."""
        if self.nbytes > self.gathered:
            return slot_P[self.room - self.nbytes : self.room]
        return self.side_by_side(slot_P)[place * self.gathered : (place + 1) * self.gathered]

    def to_gather(self, slot_P: Tensor, place: int) -> Tensor:
        """Return a buffer (uint8 [n·G]) with the parameters of this rank's slice in their place,
        ready to be gathered."""
        slices_P = self.side_by_side(slot_P)
        if self.nbytes > self.gathered:
            own_G = self.in_slot(slot_P, place)[: self.gathered]
            slices_P[place * self.gathered : (place + 1) * self.gathered].copy_(own_G)
        return slices_P

    def assemble(self, slot_P: Tensor) -> None:
        """Copy gathered parameters into the bucket, where they are not the bucket itself."""
        if self.apart:
            offsets = {param.name: param.offset for param in self.bucket.params}
            for place, slice_G in enumerate(self.side_by_side(slot_P).chunk(self.count)):
                for run in self.runs[place]:
                    if run.param.name in offsets:
                        _copy(run.copies(offsets[run.param.name]), slice_G, slot_P)

    # ---- between a slice and the whole unit ------------------------------------------------------

    def cut(self, whole_P: Tensor, place: int) -> Tensor:
        """Return a rank's slice, uint8 [S], of a unit as one process would hold it."""
        slice_S = torch.zeros(self.nbytes, dtype=torch.uint8)
        for run in self.runs[place]:
            for at, there, nbytes in run.copies(run.param.offset):
                slice_S[at : at + nbytes] = whole_P[there : there + nbytes]
        return slice_S

    def join(self, slices_P: Tensor) -> Tensor:
        """Return the unit as one process would hold it (uint8 [P]), from all slices side by side
        (uint8 [n·S])."""
        whole_P = torch.zeros(self.unit.nbytes, dtype=torch.uint8)
        for place, slice_S in enumerate(slices_P.chunk(self.count)):
            for run in self.runs[place]:
                _copy(run.copies(run.param.offset), slice_S, whole_P)
        return whole_P

    def updates(
        self, slice_S: Tensor, place: int, largest: int
    ) -> Iterator[tuple[str, dict[str, BucketTensor]]]:
        """Yield each parameter in a slice with its states, by name: cells of at most ``largest``
        elements, or of one row."""
        runs: dict[str, dict[str, TensorRun]] = {}
        for run in self.runs[place]:
            name, _, state = run.param.name.partition(STATE)
            runs.setdefault(name, {})[state] = run
        for name, of_states in runs.items():
            whole = of_states[""]
            some = (
                whole.last - whole.first if whole.layout.groups else largest
            )  # scaled rows are cut by the update
            for first, last in spans(whole.first, whole.last, some):
                shape = whole.layout.shape if whole.layout.groups else (last - first,)
                yield name, {s: _cell(run, first, shape, slice_S) for s, run in of_states.items()}


def _cell(run: TensorRun, first: int, shape: tuple[int, ...], slice_S: Tensor) -> BucketTensor:
    """Return the cell of a run from element ``first`` on, in the shape that its parameter is
    updated in."""
    layout = replace(run.layout, shape=shape)
    at = run.at + (first - run.first) * layout.code_dtype.itemsize
    return BucketTensor(layout, slice_S[at : at + layout.nbytes], origin=first)


def _copy(copies: Iterable[tuple[int, int, int]], slice_S: Tensor, out_P: Tensor) -> None:
    for at, there, nbytes in copies:
        out_P[there : there + nbytes].copy_(slice_S[at : at + nbytes])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN

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
from blockwalk.program.slicing import share, slice_size, sliced
from blockwalk.tiers.block_store.store import StoredParam, StoredUnit, side_by_side


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Consecutive elements of one tensor in a slice: those from ``start`` to ``stop``, whole rows
    of a codec with scales."""

    param: StoredParam
    """The tensor, where it lies in the unit's own bucket, in which each parameter's states follow
    it."""
    start: int
    stop: int
    byte: int
    """The byte of the slice at which they begin."""

    @property
    def layout(self) -> Layout:
        """The layout of the run by itself."""
        tensor = self.param.layout(32)
        count = self.stop - self.start
        shape = (count // tensor.columns, tensor.columns) if tensor.groups else (count,)
        return replace(tensor, shape=shape)

    @property
    def end(self) -> int:
        """The byte of the slice from which on there is room for another run."""
        return slice_size(self.byte + self.layout.nbytes)

    def copies(self, tensor_byte: int) -> Iterator[tuple[int, int, int]]:
        """Yield triples (byte of the slice, byte of a bucket in which the tensor begins at
        ``tensor_byte``, bytes) of its scales and of its codes."""
        tensor = self.param.layout(32)
        run = self.layout
        scale = run.groups * run.scale_dtype.itemsize
        if scale:
            yield self.byte, tensor_byte + self.start // tensor.columns * scale, run.scale_bytes
        code_start = self.start * tensor.code_columns // tensor.columns * run.code_dtype.itemsize
        codes = tensor_byte + tensor.scale_bytes + code_start
        yield self.byte + run.scale_bytes, codes, run.nbytes - run.scale_bytes


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
        self.between_rows = not all(param.dense for param in params)
        """Whether parameters are cut between rows. The gathered ones must then be copied into the
        bucket: side by side they are not the bucket itself."""
        placed, _ = side_by_side(params)
        self._slicing = sliced(
            ((param.name, param.nbytes) for param in params), 1 if self.between_rows else count
        )
        self.bucket = replace(unit, nbytes=self._slicing.size, params=placed)
        self._tensors = {param.name: param for param in unit.params}
        runs_of = self._row_runs if self.between_rows else self._byte_runs
        parameters = [list(runs_of(rank)) for rank in range(count)]
        self.gathered = self.bucket.nbytes // count
        if self.between_rows:
            self.gathered = max((runs[-1].end for runs in parameters if runs), default=0)
        self.runs = [[*runs, *self._states(runs)] for runs in parameters]
        ends = [runs[-1].end for runs in self.runs if runs]
        self.nbytes = max([self.gathered, *ends])
        """S, bytes of a slice; ``gathered`` is G."""

    def _byte_runs(self, rank: int) -> Iterator[TensorRun]:
        """Yield the parameters in a rank's slice, where the bucket is cut at equal bytes."""
        nbytes = self.bucket.nbytes // self.count
        for run in self._slicing.runs(rank * nbytes, (rank + 1) * nbytes):
            param = self._tensors[run.name]
            size = param.layout(32).code_dtype.itemsize
            yield TensorRun(param, run.start // size, run.stop // size, run.place)

    def _row_runs(self, rank: int) -> Iterator[TensorRun]:
        """Yield the parameters in a rank's slice, where each is cut between rows."""
        byte = 0
        for param in self.bucket.params:
            layout = param.layout(32)
            start, stop = (row * layout.columns for row in share(layout.rows, self.count, rank))
            if start < stop:
                run = TensorRun(self._tensors[param.name], start, stop, byte)
                byte = run.end
                yield run

    def _states(self, parameters: Sequence[TensorRun]) -> Iterator[TensorRun]:
        """Yield the states beside the parameters in a slice."""
        byte = self.gathered
        for parameter in parameters:
            for param in self.unit.params:
                if param.name.startswith(parameter.param.name + STATE):
                    run = TensorRun(param, parameter.start, parameter.stop, byte)
                    byte = run.end
                    yield run

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
        gathered = self.count * self.gathered if self.between_rows else 0
        return self.bucket.nbytes + gathered + (self.nbytes if self.nbytes > self.gathered else 0)

    def side_by_side(self, slot_P: Tensor) -> Tensor:
        """Return the parameters of all slices in a slot (uint8 [room]), as they are gathered: uint8
        [n·G]."""
        start = self.bucket.nbytes if self.between_rows else 0
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
        if self.between_rows:
            offsets = {param.name: param.offset for param in self.bucket.params}
            for place, slice_G in enumerate(self.side_by_side(slot_P).chunk(self.count)):
                for run in self.runs[place]:
                    if run.param.name in offsets:
                        _copy(run.copies(offsets[run.param.name]), slice_G, slot_P)

    # ---- between a slice and the whole unit ------------------------------------------------------

    def cut(self, unit_P: Tensor, place: int) -> Tensor:
        """Return a rank's slice, uint8 [S], of a unit as one process would hold it."""
        slice_S = torch.zeros(self.nbytes, dtype=torch.uint8)
        for run in self.runs[place]:
            for byte, unit_byte, nbytes in run.copies(run.param.offset):
                slice_S[byte : byte + nbytes] = unit_P[unit_byte : unit_byte + nbytes]
        return slice_S

    def join(self, slices_P: Tensor) -> Tensor:
        """Return the unit as one process would hold it (uint8 [P]), from all slices side by side
        (uint8 [n·S])."""
        unit_P = torch.zeros(self.unit.nbytes, dtype=torch.uint8)
        for place, slice_S in enumerate(slices_P.chunk(self.count)):
            for run in self.runs[place]:
                _copy(run.copies(run.param.offset), slice_S, unit_P)
        return unit_P

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
            parameter = of_states[""]
            scaled = parameter.layout.groups > 0  # its rows are cut by the update
            size = parameter.stop - parameter.start if scaled else largest
            for start, stop in spans(parameter.start, parameter.stop, size):
                shape = parameter.layout.shape if scaled else (stop - start,)
                yield name, {s: _cell(run, start, shape, slice_S) for s, run in of_states.items()}


def _cell(run: TensorRun, start: int, shape: tuple[int, ...], slice_S: Tensor) -> BucketTensor:
    """Return the cell of a run from element ``start`` on, in the shape that its parameter is
    updated in."""
    layout = replace(run.layout, shape=shape)
    byte = run.byte + (start - run.start) * layout.code_dtype.itemsize
    return BucketTensor(layout, slice_S[byte : byte + layout.nbytes], origin=start)


def _copy(copies: Iterable[tuple[int, int, int]], slice_S: Tensor, out_P: Tensor) -> None:
    for byte, out_byte, nbytes in copies:
        out_P[out_byte : out_byte + nbytes].copy_(slice_S[byte : byte + nbytes])

"""Encoded tensors where they lie in a bucket, with the states beside them, and how they are
filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import Layout, dtype_of
from blockwalk.numerics.codecs.weights import Value, opened
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import Codec
from blockwalk.program.slicing import sliced
from blockwalk.tiers.block_store.store import StoredUnit, crc32
from blockwalk.tiers.block_store.writer import encode
from blockwalk.tiers.protocols import TensorSource

STATE = "\0"
"""The separator between a parameter's name and that of a state kept beside it."""


@dataclass(frozen=True)
class BucketTensor:
    """One encoded tensor where it lies now: ``bytes_P`` is a view of its bytes in a bucket, on any
    device. Views of it are made once, for every forward and update reads them."""

    layout: Layout
    bytes_P: Tensor
    origin: int = 0
    """The index of its first element in the parameter that it is a range of."""

    @cached_property
    def dense(self) -> bool:
        """Whether its elements are numbers as they stand, without scales."""
        return not self.layout.groups

    @cached_property
    def codes(self) -> Tensor:
        """The codes, or plain numbers, by rows: see :meth:`Layout.codes`."""
        return self.layout.codes(self.bytes_P)

    @cached_property
    def tensor(self) -> Tensor:
        """The elements themselves, in the parameter's shape: dense codecs only. Writing to it
        writes the parameter."""
        assert self.dense
        return self.codes.view(self.layout.shape)

    @property
    def value(self) -> Value:
        """The elements as they lie there, see :func:`~blockwalk.numerics.codecs.weights.opened`."""
        return opened(self.layout, self.bytes_P)

    @property
    def scales(self) -> BucketTensor:
        """The scales of a codec of codes, [R, groups], as a tensor of plain numbers over the same
        bytes."""
        layout = self.layout
        columns = max(self.layout.columns, 1)
        of_scales = Layout((layout.rows, layout.groups), Codec.RAW, layout.codec.facts.scales[0])
        origin = self.origin // columns * layout.groups
        return BucketTensor(of_scales, self.bytes_P[: layout.scale_bytes], origin)

    def load(self, first: int, last: int, scratch: ScratchArena, name: str) -> Tensor:
        """Return rows ``first:last`` in float32, to be changed in place: the elements themselves
        where they are float32."""
        rows_RD = self.rows(first, last, scratch, name)
        if rows_RD.dtype == torch.float32:
            return rows_RD
        return scratch.take(name, *rows_RD.shape, like=rows_RD, dtype=torch.float32).copy_(rows_RD)

    def save(self, first: int, rows_RD: Tensor, rounding: NoiseKey | None) -> None:
        """Encode the rows that :meth:`load` gave; nothing to do where those were the elements
        themselves."""
        if self.dense and self.layout.code_dtype == torch.float32:
            return
        codecs.encode_rows(
            rows_RD,
            self.bytes_P,
            self.layout,
            first,
            rounding=rounding,
            origin=self.origin,
            check=False,
        )

    def rows(self, first: int, last: int, scratch: ScratchArena, name: str) -> Tensor:
        """Return rows ``first:last`` to be read: a view in the elements' own dtype, or decoded to
        float32."""
        return self._part((first, last), (0, self.layout.columns), scratch, name)

    def columns(self, first: int, last: int, scratch: ScratchArena, name: str) -> Tensor:
        """Return columns ``first:last`` to be read, like :meth:`rows`."""
        return self._part((0, self.layout.rows), (first, last), scratch, name)

    def _part(
        self, rows: tuple[int, int], columns: tuple[int, int], scratch: ScratchArena, name: str
    ) -> Tensor:
        if self.dense:
            if rows == (0, self.layout.rows) and columns == (0, self.layout.columns):
                return self.codes
            return self.codes[slice(*rows), slice(*columns)]
        shape = (rows[1] - rows[0], columns[1] - columns[0])
        out = scratch.take(name, *shape, like=self.bytes_P, dtype=torch.float32)
        return codecs.decode_rows(self.bytes_P, self.layout, *rows, out, columns=columns)

    def gather(self, index_n: Tensor) -> Tensor:
        """Return the rows named, freshly allocated, in the elements' own dtype or decoded to
        float32."""
        if self.dense:
            return self.codes[index_n]
        shape = (len(index_n), self.layout.columns)
        out = torch.empty(shape, dtype=torch.float32, device=self.bytes_P.device)
        return codecs.gather_rows(self.bytes_P, self.layout, index_n, out)


class BucketLayout:
    """The places of named tensors in a bucket, one after the other.

    Args:
        layouts: each tensor's, by name.
        ranks: the ranks that hold the bucket together, each a slice of ``nbytes // ranks`` bytes.
    """

    def __init__(self, layouts: Mapping[str, Layout], ranks: int = 1) -> None:
        self.layouts = layouts
        self.slicing = sliced(((name, layout.nbytes) for name, layout in layouts.items()), ranks)
        self.nbytes = self.slicing.size

    def parts(self, bucket_P: Tensor) -> Iterator[tuple[str, Layout, Tensor]]:
        """Yield name, layout and bytes of each tensor in a bucket (uint8 [nbytes])."""
        for name, start, nbytes in self.slicing.parts:
            yield name, self.layouts[name], bucket_P[start : start + nbytes]


BucketTensors = dict[str, dict[str, BucketTensor]]
"""BucketTensors by canonical parameter name, then by state; the parameter itself is the state
``""``."""


def tensors_in(unit: StoredUnit, bytes_P: Tensor, group_size: int = 32) -> BucketTensors:
    """Return the cells of a bucket: views of its bytes (uint8 [nbytes] or longer)."""
    cells: BucketTensors = {}
    for param in unit.params:
        name, _, state = param.name.partition(STATE)
        part_P = bytes_P[param.offset : param.offset + param.nbytes]
        cells.setdefault(name, {})[state] = BucketTensor(param.layout(group_size), part_P)
    return cells


def trainable_spec(
    model: ModelSpec, codec: Codec, states: Mapping[str, Codec]
) -> tuple[ModelSpec, Codec]:
    """Return the trainables alone, states beside them, as a model of its own; and the codec that
    its quantizable ones take.

    A plain codec is written into each parameter's dtype, so that the states keep theirs.
    """
    plain = codec.facts.dtype

    def expand(unit: UnitSpec) -> UnitSpec:
        params: list[ParamSpec] = []
        for p in unit.part(True):
            params.append(replace(p, dtype=plain or p.dtype))
            params += [
                ParamSpec(f"{p.name}{STATE}{state}", p.shape, written_as.dtype_of("float32"))
                for state, written_as in states.items()
            ]
        return replace(unit, params=tuple(params))

    spec = replace(model, tied=()).with_units(map(expand, model.units))
    return spec, Codec.RAW if plain else codec


class Initial:
    """The source of buckets at the start (a TensorSource): the model's weights, and the values that
    states begin with."""

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource | None,
        held: Mapping[str, Tensor],
        begin: Mapping[str, float],
    ) -> None:
        """``held`` are parameters that are in memory already; ``begin`` is the value that each
        state is filled with."""
        self._specs = {param.name: param for param in spec.params()}
        self._source = source
        self._held = held
        self._begin = begin

    def names(self) -> Sequence[str]:
        return tuple(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return dtype_of(self._specs[name].dtype)

    def weights(self, names: Iterable[str]) -> dict[str, Value]:
        out: dict[str, Value] = {}
        for name in names:
            _, _, state = name.partition(STATE)
            if state:
                out[name] = torch.tensor(self._begin[state]).expand(self.shape(name))
            elif name in self._held:
                out[name] = self._held[name].detach().cpu()  # buckets are encoded there
            else:
                assert self._source is not None, f"{name} has no source"
                out |= self._source.weights([name])
        return out

    def release(self, names: Iterable[str]) -> None:
        mapped = [name for name in names if STATE not in name and name not in self._held]
        if self._source is not None and mapped:
            self._source.release(mapped)


def fill(unit: StoredUnit, source: TensorSource, out_P: Tensor, group_size: int = 32) -> StoredUnit:
    """Encode a unit's parameters from ``source`` into ``out_P`` (CPU uint8); returns the unit with
    their checksums."""
    filled = []
    for param in unit.params:
        part_P = out_P[param.offset : param.offset + param.nbytes]
        for _ in encode(source.weights([param.name])[param.name], param, group_size, part_P):
            pass
        source.release([param.name])
        filled.append(replace(param, crc32=crc32(part_P)))
    return replace(unit, params=tuple(filled))

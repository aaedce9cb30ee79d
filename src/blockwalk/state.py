"""Kinds of state, where each may live, and what a model is made of, as plain values.

Nothing here imports torch at run time: planning and simulation read these values without it. Bytes are bytes, shapes
are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Tier(StrEnum):
    """A memory that state can live in, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """The form of one codec's elements: plain numbers of a dtype, or codes of a few bits in groups that share scales."""

    dtype: str | None = None
    """torch's name of the dtype, where every element is a number by itself; None keeps the parameter's own or has codes."""
    codes: str = "uint8"
    """The dtype that codes are stored in; codes of four bits share an element of it."""
    bits: int = 0
    """Bits of a code; 0 where elements are numbers."""
    scales: tuple[str, ...] = ()
    """The dtypes of the numbers that each group of codes is decoded with."""
    group_sizes: tuple[int, ...] = ()
    """Elements of a row that may form a group; without any, a row is one group."""
    interleaved: bool = False
    """True where a group's scales stand before its codes; else all scales of a parameter come first, then all codes."""
    trainable: bool = False
    """True where a trainable parameter may be kept in these codes, rounded stochastically (zeroth order only)."""


_AS_IT_IS = CodecFacts()


class Codec(StrEnum):
    """How a parameter's elements are written on its tier. ``RAW`` keeps the dtype that the model came in.

    A codec is a row here and, where its elements are codes, a file of its name beside :mod:`blockwalk.tiers.codecs`.
    """

    facts: CodecFacts

    def __new__(cls, value: str, facts: CodecFacts = _AS_IT_IS) -> Codec:
        member = str.__new__(cls, value)
        member._value_, member.facts = value, facts
        return member

    RAW = "raw", _AS_IT_IS
    FP32 = "fp32", CodecFacts("float32")
    BF16 = "bf16", CodecFacts("bfloat16")
    FP16 = "fp16", CodecFacts("float16")
    FP8 = "fp8", CodecFacts(codes="float8_e4m3fn", bits=8, scales=("float32",), trainable=True)
    INT8 = "int8", CodecFacts(codes="int8", bits=8, scales=("float32",), trainable=True)
    INT4 = "int4", CodecFacts(bits=4, scales=("float16",), group_sizes=(32, 64))
    INT4A = "int4a", CodecFacts(bits=4, scales=("float16", "float16"), group_sizes=(32,), interleaved=True)
    NF4 = "nf4", CodecFacts(bits=4, scales=("float32",), group_sizes=(32, 64))

    @property
    def encoded(self) -> bool:
        """True where a matrix is codes and scales, which are decoded when they are read."""
        return self.facts.bits > 0

    def dtype_of(self, dtype: str) -> str:
        """The dtype of the numbers that a parameter of ``dtype`` is written as; of an encoded one, its own."""
        return self.facts.dtype or dtype


class Group(StrEnum):
    """The ranks that a piece of state is spread over; a nested group's size stands beside it in the plan."""

    NOBODY = "nobody"
    NODE = "node"
    NESTED = "nested"
    WORLD = "world"


class StateKind(StrEnum):
    """What a training step reads and writes."""

    FROZEN = "frozen"
    TRAINABLE = "trainable"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one kind of state lives: a slice on a tier, in a codec, gathered over a group."""

    tier: Tier = Tier.DEVICE
    codec: Codec = Codec.RAW
    group: Group = Group.NOBODY

    def __str__(self) -> str:
        return f"{self.tier} × {self.codec} × {self.group}"


DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by torch's name of the dtype without its ``torch.`` prefix."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its canonical name, shape (elements), dtype (torch's name) and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False
    quantizable: bool = False
    """True where a block codec may be used: the 2-D weight of a linear or embedding layer, or fused 3-D experts."""
    assembled: bool = False
    """True where its tier does not hold it in one piece, to be read where it lies: experts stored one by one, or encoded. It
    is made at its block's turn. What a model's configuration alone tells is a guess; the source of the weights knows."""
    group_size: int = 32
    """Elements of a row that share a scale where its source has it in int4."""
    exact: bool = False
    """True where the model computes with it in float32 whatever the compute dtype: a router's gate, say."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the dtype that the model came in."""
        return self.numel * DTYPE_BYTES[self.dtype]


def encoded_nbytes(shape: tuple[int, ...], dtype: str, codec: Codec, group_size: int = 32) -> int:
    """Bytes that a parameter of this shape takes in a codec, scales included (without padding between parameters). A row that
    the group size does not divide is padded to whole groups."""
    facts, numel = codec.facts, math.prod(shape)
    if not codec.encoded:
        return numel * DTYPE_BYTES[codec.dtype_of(dtype)]
    row = shape[-1] if shape else 1
    group = group_size if facts.group_sizes else row
    groups = numel // row * -(-row // group) if row else 0
    return groups * (group * facts.bits // 8 + sum(DTYPE_BYTES[scale] for scale in facts.scales))


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One stop of the walk: the prologue, a block or the epilogue, with the parameters that it owns.

    Units of equal ``kind`` run the same code on the same shapes: what is measured of one holds for all.
    """

    name: str
    kind: str
    params: tuple[ParamSpec, ...]

    def numel(self, *, trainable: bool | None = None) -> int:
        return sum(p.numel for p in self.params if trainable is None or p.trainable == trainable)

    def nbytes(self, codec: Codec = Codec.RAW, *, trainable: bool | None = None) -> int:
        """Bytes of the unit's parameters where the quantizable ones are in ``codec`` and the others as they came."""
        return sum(
            encoded_nbytes(p.shape, p.dtype, codec if p.quantizable or not codec.encoded else Codec.RAW, p.group_size)
            for p in self.params
            if trainable is None or p.trainable == trainable
        )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the walk sees it: units in execution order, and the few dimensions that costs depend on."""

    name: str
    prologue: UnitSpec
    blocks: tuple[UnitSpec, ...]
    epilogue: UnitSpec
    hidden_size: int
    vocab_size: int
    dtype: str = "float32"
    tied: tuple[tuple[str, str], ...] = field(default=())
    """Pairs (alias, canonical name) of parameters that are one tensor with two turns."""

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return (self.prologue, *self.blocks, self.epilogue)

    def params(self) -> Iterator[ParamSpec]:
        for unit in self.units:
            yield from unit.params

    def numel(self, *, trainable: bool | None = None) -> int:
        return sum(unit.numel(trainable=trainable) for unit in self.units)

    def as_stored(self, group_size: int, assembled: Callable[[str], bool] | None = None) -> ModelSpec:
        """The same model with what its source says: the group size, and by name what is ``assembled``."""

        def marked(unit: UnitSpec) -> UnitSpec:
            known = {p.name: p.assembled if assembled is None else assembled(p.name) for p in unit.params}
            return replace(
                unit, params=tuple(replace(p, assembled=known[p.name], group_size=group_size) for p in unit.params)
            )

        blocks = tuple(map(marked, self.blocks))
        return replace(self, prologue=marked(self.prologue), blocks=blocks, epilogue=marked(self.epilogue))


class Weight(Protocol):
    """One 2-D parameter that is materialised a range at a time, in ``dtype``: the weight provider of the design.

    What :meth:`rows` and :meth:`columns` return is scratch: it holds until the next call.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop``, shape [stop − start, D]."""
        ...

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """Columns ``start:stop``, shape [N, stop − start]."""
        ...

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """The rows named by ``index`` (any shape, int64): shape [*index.shape, D], freshly allocated."""
        ...

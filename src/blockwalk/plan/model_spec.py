"""A model as plain values: its parameters with shape and dtype, its units in the order of their
turns.

Bytes are bytes, shapes are in elements. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from blockwalk.plan.placement import DTYPE_BYTES, Codec


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter: its canonical name, shape (elements), dtype (torch's name) and whether it is
    trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False
    quantizable: bool = False
    """True where a block codec may be used: the 2-D weight of a linear or embedding layer, or fused
    3-D experts."""
    assembled: bool = False
    """True where its source does not hold it in one piece, to be read where it lies: experts stored
    one by one. It is made at its block's turn, unless a plan's codec has it packed. A model's
    configuration alone gives a guess; the source knows."""
    codec: Codec = Codec.RAW
    """The codec that its source has it in, which a plan's raw leaves as it is."""
    group_size: int = 32
    """Elements of a row that share a scale where its source has it in codes."""
    parted_nbytes: int = 0
    """Bytes that its source has it in, where those are several tensors of a file."""
    exact: bool = False
    """True where the model computes with it in float32 whatever the compute dtype: a router's gate,
    say."""
    numel: int = field(init=False, compare=False, repr=False, default=0)
    """Elements: asked for again and again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))

    def stored_in(self, codec: Codec) -> Codec:
        """Return the codec that it lies in where the plan says ``codec``."""
        if codec.facts.as_it_came and not self.trainable:
            return self.codec
        return codec if self.quantizable or not codec.encoded else Codec.RAW

    def whole_in(self, codec: Codec) -> bool:
        """Whether it is made whole at its turn under a plan's ``codec`` of frozen parameters."""
        return self.assembled and not self.trainable and not self.stored_in(codec).encoded

    @property
    def nbytes(self) -> int:
        """Bytes in the dtype that the model came in."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def nbytes_in(self, codec: Codec) -> int:
        """Return bytes where the plan says ``codec``."""
        stored = self.stored_in(codec)
        if stored.facts.parted:
            return self.parted_nbytes
        return encoded_nbytes(self.shape, self.dtype, stored, self.group_size)


def encoded_nbytes(shape: tuple[int, ...], dtype: str, codec: Codec, group_size: int = 32) -> int:
    """Return bytes that a parameter of this shape takes in a codec, scales included (without
    padding between parameters). A row that the group size does not divide is padded to whole
    groups."""
    facts = codec.facts
    numel = math.prod(shape)
    if not codec.encoded:
        return numel * DTYPE_BYTES[codec.dtype_of(dtype)]
    row = shape[-1] if shape else 1
    group = group_size if facts.group_sizes else row
    groups = numel // row * -(-row // group) if row else 0
    block = facts.block_bytes or group * facts.bits // 8 + sum(
        DTYPE_BYTES[scale] for scale in facts.scales
    )
    return groups * block


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One stop of the walk: the prologue, a block or the epilogue, with the parameters that it
    owns.

    Units of equal ``kind`` run the same code on the same shapes: what is measured of one holds for
    all."""

    name: str
    kind: str
    params: tuple[ParamSpec, ...]
    _numels: tuple[int, int] = field(init=False, compare=False, repr=False, default=(0, 0))
    """Elements of its frozen parameters, and of its trainable ones: asked for again and again."""

    def __post_init__(self) -> None:
        numels = [sum(p.numel for p in self.part(trainable)) for trainable in (False, True)]
        object.__setattr__(self, "_numels", tuple(numels))

    def part(self, trainable: bool | None) -> list[ParamSpec]:
        """Return its trainable parameters or its frozen ones; with None all of them."""
        return [p for p in self.params if trainable is None or p.trainable == trainable]

    def numel(self, *, trainable: bool | None = None) -> int:
        return sum(self._numels) if trainable is None else self._numels[trainable]

    def nbytes(self, codec: Codec = Codec.RAW, *, trainable: bool | None = None) -> int:
        """Return bytes of the unit's parameters where the quantizable ones are in ``codec`` and the
        others as they came."""
        return sum(p.nbytes_in(codec) for p in self.part(trainable))

    def decoded(self, codec: Codec) -> int:
        """Return elements of its frozen parameters where some are decoded under the plan's
        ``codec``; else 0."""
        if any(p.stored_in(codec).encoded for p in self.part(False)):
            return self.numel(trainable=False)
        return 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the walk sees it: units in execution order, and the few dimensions that costs
    depend on."""

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

    def params(self, *, trainable: bool | None = None) -> Iterator[ParamSpec]:
        for unit in self.units:
            yield from unit.part(trainable)

    def numel(self, *, trainable: bool | None = None) -> int:
        return sum(unit.numel(trainable=trainable) for unit in self.units)

    def as_stored(self, known: Callable[[ParamSpec], ParamSpec]) -> ModelSpec:
        """Return a copy of the model with the facts that a parameter's source knows of it: codec,
        group size, whether it is ``assembled``."""
        return self.with_units(
            replace(unit, params=tuple(map(known, unit.params))) for unit in self.units
        )

    def with_units(self, units: Iterable[UnitSpec]) -> ModelSpec:
        """Return the model with other units, as many, in execution order."""
        prologue, *blocks, epilogue = units
        return replace(self, prologue=prologue, blocks=tuple(blocks), epilogue=epilogue)

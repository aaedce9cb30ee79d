"""The layout of an encoded parameter's bytes.

**Layout** (format version 1). A parameter of shape [..., D] is R rows of D elements (R = product of
the leading dimensions; a 1-D parameter is one row). Its bytes are the scales of all rows, then the
codes of all rows, with no padding between: exactly
:func:`blockwalk.plan.model_spec.encoded_nbytes`. All numbers are little-endian.

    codec             scales              codes                      value
    raw               –                   R × D, the model's dtype   itself
    fp32, bf16, fp16  –                   R × D                      itself
    fp8, int8         float32 [R]         [R, D]                     scale · code
    int4, nf4         [R, G]              uint8 [R, G, group/2]      its own file's, beside this one
    int4a             float16 [R, G, 2]   uint8 [R, G, 16]           its own file's
    q8_0, q4_0, ...   –                   uint8 [R, G, block]        ``blocks.py``

Codecs with groups have G = ⌈D / group⌉ groups of consecutive elements in a row, the last one padded
with zeros. An interleaved codec (int4a) puts each group's scales directly before its codes instead;
where a group is a block of another tool's format, its bytes are all codes. Rows may stand in
another order in the bytes than in the parameter. The bytes of a parted codec are several tensors,
each aligned to eight bytes where they lie together, and a reader says what they mean
(:class:`Parts`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from blockwalk.numerics.codecs.readers import Reader
from blockwalk.plan.model_spec import encoded_nbytes
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import side_by_side

FORMAT_VERSION = 1
"""The version of the layout above; it stands in every file that holds encoded parameters."""

Bytes = Tensor | tuple[Tensor, ...]
"""The bytes of a parameter: uint8 [nbytes], or the tensors of a parted codec where each lies by
itself."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The dtypes and shapes of the tensors that a parted parameter consists of, and the reader that
    is made of them. Experts in three dimensions are read one by one, each out of its part of every
    tensor."""

    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    reader: Callable[[Sequence[Tensor]], Reader]

    def places(self) -> tuple[list[int], int]:
        """Return the first byte of each tensor where they lie together, and the end."""
        return side_by_side((math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors), 8)


@dataclass(frozen=True)
class Layout:
    """The layout of one parameter's bytes.

    ``dtype`` (torch's name without ``torch.``) is that of the raw codec; ``group_size`` is that of
    codecs with groups. Numbers that follow from the fields are computed once: every product asks
    for them."""

    shape: tuple[int, ...]
    codec: Codec
    dtype: str = "float32"
    group_size: int = 32
    order: Tensor | None = field(default=None, compare=False)
    """The place in the bytes of each row of the parameter, int64 [R]; None: they stand in their
    order. Its bytes are read, and never written."""
    parts: Parts | None = field(default=None, compare=False)
    """The tensors that a parted codec's bytes are."""

    def __post_init__(self) -> None:
        sizes = self.codec.facts.group_sizes
        if sizes and self.group_size not in sizes:
            choices = " or ".join(map(str, sizes))
            raise ValueError(
                f"group_size is {self.group_size}; {self.codec} has groups of {choices}"
            )

    @cached_property
    def columns(self) -> int:
        """D: elements in a row."""
        return self.shape[-1] if self.shape else 1

    @cached_property
    def rows(self) -> int:
        """R: all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @cached_property
    def groups(self) -> int:
        """Groups in a row that have scales of their own; 0 where elements are plain numbers."""
        if not self.codec.encoded:
            return 0
        return -(-self.columns // self.group_size) if self.codec.facts.group_sizes else 1

    @cached_property
    def scale_dtype(self) -> torch.dtype:
        return dtype_of(self.codec.facts.scales[0]) if self.codec.facts.scales else torch.float32

    @cached_property
    def code_dtype(self) -> torch.dtype:
        facts = self.codec.facts
        return dtype_of(facts.codes if self.codec.encoded else self.codec.dtype_of(self.dtype))

    @cached_property
    def code_columns(self) -> int:
        """Elements of ``code_dtype`` in a row."""
        facts = self.codec.facts
        if not facts.group_sizes:
            return self.columns
        return self.groups * self.group_size * facts.bits // 8

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of all scales: where the codes begin, unless they are interleaved."""
        return self.rows * self.groups * len(self.codec.facts.scales) * self.scale_dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        if self.parts is not None:
            return self.parts.places()[1]
        return encoded_nbytes(self.shape, self.dtype, self.codec, self.group_size)

    def scales(self, buffer: Tensor) -> Tensor:
        """Return the scales in an encoded parameter's bytes as a view: [R, groups], or [R, groups,
        2] of a codec with two."""
        scales = len(self.codec.facts.scales)
        if self.codec.facts.interleaved:
            part = self._blocks(buffer)[..., : scales * self.scale_dtype.itemsize]
            return part.view(self.scale_dtype) if scales else part
        flat = buffer[: self.scale_bytes].view(self.scale_dtype)
        return flat.view(self.rows, self.groups, *([scales] if scales > 1 else []))

    def codes(self, buffer: Tensor) -> Tensor:
        """Return the codes in an encoded parameter's bytes as a view: [R, code_columns], or
        interleaved [R, groups, bytes]."""
        if self.codec.facts.interleaved:
            scales = len(self.codec.facts.scales) * self.scale_dtype.itemsize
            return self._blocks(buffer)[..., scales:].view(self.code_dtype)
        codes = buffer[self.scale_bytes : self.nbytes].view(self.code_dtype)
        return codes.view(self.rows, self.code_columns)

    def split(self, buffer: Bytes) -> tuple[Tensor, ...]:
        """Return the tensors of a parted codec in its bytes."""
        if isinstance(buffer, tuple):
            return buffer
        assert self.parts is not None
        starts, _ = self.parts.places()
        return tuple(
            buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(starts, self.parts.tensors, strict=True)
        )

    def _blocks(self, buffer: Tensor) -> Tensor:
        """Return the bytes of an interleaved parameter by group, [R, groups, bytes of one]."""
        facts = self.codec.facts
        scaled = self.group_size * facts.bits // 8 + len(facts.scales) * self.scale_dtype.itemsize
        size = facts.block_bytes or scaled
        return buffer.view(self.rows, self.groups, size)


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without its ``torch.``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of a name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype

"""The parts of a codec's own file: how rows become scales and codes, and back.

A file ``<codec>.py`` beside this one exports ``CODEC``, a :class:`MatrixCodec`;
:func:`matrix_codec` finds it by the codec's name. Chunks, checks and the C kernels' calls are
:mod:`blockwalk.numerics.codecs.codecs`'; conformance is a test class to inherit."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.noise.key import Key
from blockwalk.plan.placement import Codec


@dataclass(frozen=True, slots=True)
class Rounding:
    """The draws of stochastic rounding: their key, and the first element's place in the
    parameter."""

    key: Key
    first_element: int


Encode = Callable[[Tensor, Tensor, Tensor, Layout, Rounding | None], None]
"""(values float32 [R, D], scales, codes, layout, rounding): writes scales and codes, views of the
rows' bytes."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Rows of scales and codes, and the columns ``start:stop`` of them that are asked for."""

    scales: Tensor
    codes: Tensor
    layout: Layout
    start: int
    stop: int

    @property
    def groups(self) -> slice:
        """The groups of a row that the columns touch."""
        size = self.layout.group_size
        return slice(self.start // size, -(-self.stop // size))

    def bytes_of_groups(self) -> Tensor:
        """Return the codes of four bits of those groups, uint8 [R, groups, group / 2]."""
        layout = self.layout
        return self.codes.view(len(self.codes), layout.groups, layout.group_size // 2)[
            :, self.groups
        ]

    def columns(self, values_RGK: Tensor) -> Tensor:
        """Return the columns out of the values of those groups, [R, stop − start]."""
        begin = self.groups.start * self.layout.group_size
        return values_RGK.flatten(1)[:, self.start - begin : self.stop - begin]


Decode = Callable[[Coded], Tensor]
"""The values of the columns that are asked for, float32 [R, stop − start]."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The grids of a codec of groups, codes of four bits in :func:`halves`: groups of values are
    float32 [R, G, K]."""

    fit: Callable[[Tensor], Tensor]
    """(groups): their scales, [R, G] or [R, G, 2]."""
    nearest: Callable[[Tensor, Tensor], Tensor]
    """(groups, scales): the nearest codes, uint8."""
    values: Callable[[Tensor, Tensor], Tensor]
    """(codes, scales as stored): their values."""


@dataclass(frozen=True, slots=True)
class MatrixCodec:
    """One codec whose elements are codes."""

    encode: Encode | None
    """None: the codec is read and never written."""
    decode: Decode
    limit: float = 0.0
    """The largest magnitude that can be encoded."""
    native: int | None = None
    """The codec's number in ``codecs.c``, where that decodes it."""
    encoder: int | None = None
    """Its number there, where that encodes it."""
    table: Tensor | None = None
    """The numbers that the C encoder reads beside the values, float32 on the CPU."""
    grid: Grid | None = None
    """The codec's grids, if matrices can be rounded to it with more than their own values in
    view."""


def matrix_codec(codec: Codec) -> MatrixCodec:
    """Return the codec that a row brings, or that of the file of its name."""
    matrix: MatrixCodec = codec.facts.implementation or _of_file(codec)
    return matrix


@functools.cache
def _of_file(codec: Codec) -> MatrixCodec:
    matrix = importlib.import_module(f"{__package__}.{codec}").CODEC
    assert isinstance(matrix, MatrixCodec)
    return matrix


def grid_codec(grid: Grid, limit: float, native: int | None = None) -> MatrixCodec:
    """Return the codec that rounds each group to its nearest codes on a grid. ``native`` is its
    number in ``codecs.c``, which encodes it too; the others as :class:`MatrixCodec` has them."""

    def encode(
        x_RD: Tensor, scales: Tensor, codes: Tensor, layout: Layout, rounding: Rounding | None
    ) -> None:
        x_RGK = grouped(x_RD, layout)
        fitted = grid.fit(x_RGK)
        scales.copy_(fitted)
        codes.copy_(halves(grid.nearest(x_RGK, fitted)).view_as(codes))

    def decode(coded: Coded) -> Tensor:
        bytes_RGH = coded.bytes_of_groups()
        nibbles_RGK = torch.cat((bytes_RGH & 15, bytes_RGH >> 4), dim=2)
        return coded.columns(grid.values(nibbles_RGK, coded.scales[:, coded.groups]))

    return MatrixCodec(encode, decode, limit, native, native, grid=grid)


def halves(codes_RGK: Tensor) -> Tensor:
    """Return codes of four bits in bytes: the first half of a group in the low nibbles, the second
    in the high ones."""
    low_RGH, high_RGH = codes_RGK.chunk(2, dim=2)
    return low_RGH | high_RGH << 4


def grouped(x_RD: Tensor, layout: Layout) -> Tensor:
    """Return rows cut into the layout's groups, [R, G, group], the last one padded with zeros."""
    padding = layout.groups * layout.group_size - layout.columns
    padded = torch.nn.functional.pad(x_RD, (0, padding)) if padding else x_RD
    return padded.view(x_RD.shape[0], layout.groups, layout.group_size)

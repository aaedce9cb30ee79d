# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Rows of an encoded parameter decoded, and perturbed on the way, in one pass: the values of
``numerics/codecs``, bit for bit.

A byte of two elements is loaded once where groups are read whole and no noise is added. Elsewhere
each element's code is loaded by itself: the two elements of a byte are a cache line apart at most,
and noise costs more."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.nf4 import LEVELS
from blockwalk.numerics.kernels.noise import (
    _COUNTERS,
    _cast,
    _cubics,
    _key_words,
    _on,
    _programs,
    _values,
    options,
)
from blockwalk.numerics.noise.numpy_words import DRAWS, KIND_NUMBERS
from blockwalk.plan.placement import Codec

if TYPE_CHECKING:
    from blockwalk.numerics.noise.key import Key, NoiseKind

FORMATS = {Codec.FP8: 0, Codec.INT8: 1, Codec.INT4: 2, Codec.NF4: 3, Codec.INT4A: 4, Codec.Q4_0: 5}
"""The codecs that the kernel below decodes, by the number that it knows each by."""
PAIRED = (2, 3, 4, 5)
"""The numbers of those with two elements in a byte."""


@triton.jit
def _half(buffer, byte, inside):
    """The float16 numbers at some even bytes of a buffer, in float32."""
    return tl.load((buffer + byte).to(tl.pointer_type(tl.float16)), mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def _e4m3(code):
    """The value of e4m3's codes, uint32: by integers, for not every GPU converts them."""
    magnitude = code & 0x7F
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)  # 120 more in the exponent
    small = magnitude.to(tl.int32).to(tl.float32) * 0.001953125
    value = tl.where(magnitude < 8, small, normal)
    pattern = tl.where(magnitude == 0x7F, 0x7FC00000, value.to(tl.uint32, bitcast=True))
    return (pattern | (code >> 7) << 31).to(tl.float32, bitcast=True)


@triton.jit
def _decoded(
    buffer,
    levels,
    row,
    column,
    inside,
    rows,
    groups,
    width,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The elements of a row at some columns, float32; ``width`` is the parameter's columns."""
    if FORMAT < 2:
        code = tl.load(buffer + rows * 4 + row * width + column, mask=inside, other=0)
        scale = tl.load((buffer + row * 4).to(tl.pointer_type(tl.float32)))
        if FORMAT == 0:
            return _e4m3(code.to(tl.uint32)) * scale
        else:
            return code.to(tl.int8, bitcast=True).to(tl.float32) * scale
    else:
        place = row * groups + column // GROUP
        k = column % GROUP
        if FORMAT == 3:  # the earlier element in the high half of a byte
            code = tl.load(
                buffer + rows * groups * 4 + place * (GROUP // 2) + k // 2, mask=inside, other=0
            )
            nibble = tl.where(k % 2 == 0, code >> 4, code & 15).to(tl.int32)
            scale = tl.load(
                (buffer + place * 4).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0
            )
            return tl.load(levels + nibble) * scale
        else:
            half = k % (GROUP // 2)
            if FORMAT == 2:
                code = tl.load(
                    buffer + rows * groups * 2 + place * (GROUP // 2) + half, mask=inside, other=0
                )
                scale = _half(buffer, place * 2, inside)
            else:  # scales stand before a group's codes
                SCALES: tl.constexpr = 4 if FORMAT == 4 else 2
                code = tl.load(
                    buffer + place * (GROUP // 2 + SCALES) + SCALES + half, mask=inside, other=0
                )
                scale = _half(buffer, place * (GROUP // 2 + SCALES), inside)
            nibble = tl.where(k < GROUP // 2, code & 15, code >> 4).to(tl.int32)
            if FORMAT == 4:
                least = _half(buffer, place * (GROUP // 2 + SCALES) + 2, inside)
                return nibble.to(tl.float32) * scale + least
            else:
                return (nibble - 8).to(tl.float32) * scale


@triton.jit
def _of_nibble(nibble, less: tl.constexpr):
    """Convert a number below 16, less another one, to float32: by integers, for conversions take
    four times as long."""
    return (nibble.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + less)


@triton.jit
def _decoded_tile(
    buffer,
    levels,
    row,
    start,
    rows,
    groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    C: tl.constexpr,
):
    """Decode C columns, whole groups of them from ``start`` on, of R rows of 4-bit codes: float32
    [R, C]. Each byte is loaded once for its two elements, each scale once for its group. Beyond the
    last group stands the last group again."""
    HALF: tl.constexpr = GROUP // 2
    R: tl.constexpr = row.shape[0]
    group = tl.minimum(start // GROUP + tl.arange(0, C // GROUP), groups - 1)
    place = row[:, None] * groups + group[None, :]
    j = tl.arange(0, HALF)[None, None, :]
    if FORMAT == 3:
        code = tl.load(buffer + rows * groups * 4 + place[:, :, None] * HALF + j)
        scale = tl.load((buffer + place * 4).to(tl.pointer_type(tl.float32)))[:, :, None]
        early = tl.load(levels + (code >> 4).to(tl.int32)) * scale
        late = tl.load(levels + (code & 15).to(tl.int32)) * scale
        return tl.reshape(tl.join(early, late), (R, C))
    else:
        if FORMAT == 2:
            code = tl.load(buffer + rows * groups * 2 + place[:, :, None] * HALF + j)
            scale = tl.load((buffer + place * 2).to(tl.pointer_type(tl.float16)))
        else:
            SCALES: tl.constexpr = 4 if FORMAT == 4 else 2
            code = tl.load(buffer + place[:, :, None] * (HALF + SCALES) + SCALES + j)
            scale = tl.load((buffer + place * (HALF + SCALES)).to(tl.pointer_type(tl.float16)))
        scale = scale.to(tl.float32)[:, :, None]
        LESS: tl.constexpr = 0 if FORMAT == 4 else 8
        early = _of_nibble(code & 15, LESS) * scale
        late = _of_nibble(code >> 4, LESS) * scale
        if FORMAT == 4:
            least = tl.load((buffer + place * (HALF + 4) + 2).to(tl.pointer_type(tl.float16))).to(
                tl.float32
            )[:, :, None]
            early += least
            late += least
        return tl.reshape(tl.permute(tl.join(early, late), (0, 1, 3, 2)), (R, C))


@triton.jit(do_not_specialize=["k0", "k1", "first_row", "first_column", "rows", "origin"])
def _decode_kernel(
    buffer,  # uint8
    out,  # float [rows of out, out_width]
    row_index,  # int64: the parameter's row of each row of out, or not read
    order,  # int64: the place of each row of the parameter in the bytes, or not read
    levels,  # float32 [16], of nf4
    cubics,  # float32 [4, 32]
    first_row,
    first_column,
    out_width,
    tiles,  # programs for each row
    rows,
    groups,
    width,  # columns of the parameter
    origin,  # the parameter's first element, where it is a range of another
    k0,
    k1,
    scale,  # float32, of the noise
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    KIND: tl.constexpr,
    COUNTERS: tl.constexpr,
    DRAWS: tl.constexpr,
    IN_PAIRS: tl.constexpr,  # two elements a byte, and every tile begins with a group
):
    SIZE: tl.constexpr = COUNTERS * DRAWS
    program = tl.program_id(0).to(tl.int64)
    out_row = program // tiles
    tile = program % tiles
    row = tl.load(row_index + out_row) if HAS_ROWS else out_row + first_row.to(tl.int64)
    begin = origin.to(tl.int64) + row * width + first_column
    position = tile * SIZE + tl.arange(0, SIZE)
    if KIND != 0:
        position -= begin % DRAWS
    inside = (position >= 0) & (position < out_width)
    place = tl.load(order + row) if HAS_ORDER else row
    if IN_PAIRS:
        start = first_column.to(tl.int64) + tile * SIZE
        one = place + tl.zeros([1], tl.int64)
        x = tl.reshape(
            _decoded_tile(
                buffer, levels, one, start, rows.to(tl.int64), groups, FORMAT, GROUP, SIZE
            ),
            (SIZE,),
        )
    else:
        column = tl.where(inside, position + first_column, 0)
        x = _decoded(
            buffer, levels, place, column, inside, rows.to(tl.int64), groups, width, FORMAT, GROUP
        )
    if KIND != 0:
        x += _values(begin // DRAWS + tile * COUNTERS, k0, k1, cubics, KIND, COUNTERS) * scale
    tl.store(
        out + out_row * out_width + position,
        _cast(x, 0, 0, 0, out.dtype.element_ty, False, SIZE),
        mask=inside,
    )


def decode(
    out: Tensor,
    buffer: Tensor,
    layout: Layout,
    rows: Tensor | None,
    first_row: int,
    first_column: int,
    key: Key | None,
    origin: int,
    scale: float,
    kind: NoiseKind | None,
) -> None:
    """``out`` [n, m] = cast(value + scale·z) of rows ``first_row`` …, or of those that ``rows``
    names, from ``first_column`` on."""
    code = KIND_NUMBERS[kind]
    draws = DRAWS[kind] if kind else 16
    tiles = _programs(out.shape[1], draws, _COUNTERS[code], kind is None)
    whole_groups = (
        first_column % layout.group_size == 0 and _COUNTERS[code] * draws % layout.group_size == 0
    )
    with _on(out):
        _decode_kernel[(out.shape[0] * tiles,)](
            buffer,
            out,
            rows if rows is not None else out,
            layout.order if layout.order is not None else out,
            nf4_levels(out.device),
            _cubics(out.device),
            first_row,
            first_column,
            out.shape[1],
            tiles,
            layout.rows,
            layout.groups,
            layout.columns,
            origin,
            *_key_words(key),
            scale,
            FORMAT=FORMATS[layout.codec],
            GROUP=layout.group_size,
            HAS_ROWS=rows is not None,
            HAS_ORDER=layout.order is not None,
            KIND=code,
            COUNTERS=_COUNTERS[code],
            DRAWS=draws,
            IN_PAIRS=FORMATS[layout.codec] in PAIRED and kind is None and whole_groups,
            **options(out.device),
        )


@functools.cache
def nf4_levels(device: torch.device) -> Tensor:
    """Return the values of nf4's codes on a device: sent once, for the host waits for that copy."""
    return torch.tensor(LEVELS, device=device)

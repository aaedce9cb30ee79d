# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Updates of many tensors in one launch: pending zeroth-order entries, perturbations, and AdamW.

A launch's tensors stand in a table in device memory, a row each, sent in one copy; a program finds
the row that its tile belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from blockwalk.numerics.device import sent
from blockwalk.numerics.kernels.codecs import _e4m3
from blockwalk.numerics.kernels.noise import (
    _COUNTERS,
    COMPILE_OPTIONS,
    _cast,
    _cubics,
    _draws,
    _on,
    _programs,
    _values,
    options,
)
from blockwalk.numerics.noise.numpy_words import DRAWS, KIND_NUMBERS

if TYPE_CHECKING:
    from blockwalk.numerics.noise.key import NoiseKind


@triton.jit
def _number(table, place):
    """The float32 in the low half of an entry of a table."""
    return tl.load(table + place).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _advance_kernel(
    table,  # int64 [segments, row]
    cubics,  # float32 [4, 32]
    segments,
    row,  # numbers in a row
    entries,
    MASTER: tl.constexpr,
    OUT: tl.constexpr,
    QUERIES: tl.constexpr,
    PERTURBS: tl.constexpr,
    ROUNDING: tl.constexpr,
    KIND: tl.constexpr,
    SEGMENTS: tl.constexpr,  # a power of two, at least as many
    COUNTERS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """A tile of a tensor: every entry in turn, rounded as its tier keeps it; or a perturbation,
    into another tensor.

    A row is its head (first tile, addresses of master and out, elements, first element), then of
    every entry the rounding's key, the decay and the queries' keys and factors; or the
    perturbation's key and scale."""
    SIZE: tl.constexpr = COUNTERS * DRAWS
    program = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SEGMENTS)
    firsts = tl.load(table + every * row, mask=every < segments, other=9223372036854775807)
    segment = table + (tl.sum((firsts <= program).to(tl.int32), 0) - 1).to(tl.int64) * row
    tile = program - tl.load(segment)
    master = tl.load(segment + 1).to(tl.pointer_type(MASTER))
    count = tl.load(segment + 3)
    start = tl.load(segment + 4)
    position = tile * SIZE + tl.arange(0, SIZE) - start % DRAWS
    inside = (position >= 0) & (position < count)
    counter = start // DRAWS + tile * COUNTERS
    x = tl.load(master + position, mask=inside, other=0.0).to(tl.float32)
    entry = segment + 5
    for _ in range(entries):
        x *= _number(entry, 2)
        for query in tl.static_range(QUERIES):
            k0 = tl.load(entry + 3 + 3 * query)
            k1 = tl.load(entry + 4 + 3 * query)
            x += _values(counter, k0, k1, cubics, KIND, COUNTERS) * _number(entry, 5 + 3 * query)
        r0 = tl.load(entry)
        r1 = tl.load(entry + 1)
        x = _cast(x, counter * DRAWS, r0, r1, MASTER, ROUNDING, SIZE).to(tl.float32)
        entry += 3 + 3 * QUERIES
    if PERTURBS:
        out = tl.load(segment + 2).to(tl.pointer_type(OUT))
        k0 = tl.load(entry)
        k1 = tl.load(entry + 1)
        x += _values(counter, k0, k1, cubics, KIND, COUNTERS) * _number(entry, 2)
        tl.store(out + position, _cast(x, 0, 0, 0, OUT, False, SIZE), mask=inside)
    else:
        # the master's own bits
        tl.store(master + position, _cast(x, 0, 0, 0, MASTER, False, SIZE), mask=inside)


def _numbers(words: Sequence[int], factors: Sequence[float], tensors: int) -> npt.NDArray[np.int64]:
    """Return numbers that a kernel reads of each draw, int64 [tensors, 3 · draws]: the two words of
    its key, and the float32 bits of its factor."""
    keys = np.array(words, dtype=np.int64).reshape(-1, 2)
    bits = np.array(factors, dtype=np.float32).view(np.int32).astype(np.int64).reshape(-1, 1)
    return np.concatenate([keys, bits], axis=1).reshape(tensors, -1)


def advance(
    masters: Sequence[Tensor],
    outs: Sequence[Tensor],
    starts: Sequence[int],
    words: Sequence[int],
    factors: Sequence[float],
    entries: int,
    queries: int,
    rounding: bool,
    kind: NoiseKind,
) -> None:
    """The operator ``advance_`` (:mod:`blockwalk.numerics.operators`), a launch for each pair of
    dtypes."""
    code = KIND_NUMBERS[kind]
    draws = DRAWS[kind]
    pairs = [
        (master.dtype, outs[n].dtype if outs else master.dtype) for n, master in enumerate(masters)
    ]
    numbers = _numbers(words, factors, len(masters))
    for pair in dict.fromkeys(pairs):
        chosen = [n for n, dtypes in enumerate(pairs) if dtypes == pair]
        heads = []
        tiles = 0
        for n in chosen:
            master = masters[n]
            out = outs[n].data_ptr() if outs else 0
            count = master.numel()
            heads.append((tiles, master.data_ptr(), out, count, starts[n]))
            tiles += _programs(count, draws, _COUNTERS[code], starts[n] % draws == 0)
        rows = np.concatenate([np.array(heads, dtype=np.int64), numbers[chosen]], axis=1)
        table = sent(torch.from_numpy(rows), masters[0].device)
        with _on(masters[0]):
            _advance_kernel[(tiles,)](
                table,
                _cubics(table.device),
                len(rows),
                len(rows[0]),
                entries,
                MASTER=_TYPES[pair[0]],
                OUT=_TYPES[pair[1]],
                QUERIES=queries,
                PERTURBS=bool(outs),
                ROUNDING=rounding,
                KIND=code,
                SEGMENTS=triton.next_power_of_2(len(rows)),
                COUNTERS=_COUNTERS[code],
                DRAWS=draws,
                **options(table.device),
            )


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# ---- rows of eight-bit codes that share a scale --------------------------------------------------


@triton.jit
def _nearest(x):
    """``x``, of at most 2^22, to the nearest whole number, to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_e4m3(x):
    """The codes, uint32, of numbers of at most 448, to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(
        tl.uint32, bitcast=True
    ) - 0x46800000
    normal = (magnitude - 0x3C000000 + 0x7FFFF + (magnitude >> 20 & 1)) >> 20
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return tl.where(magnitude > 0x7F800000, 0x7F, code) | bits >> 31 << 7


@triton.jit
def _advanced(codes, scale, begin, tile, width, table, cubics, QUERIES, FP8, KIND, COUNTERS, DRAWS):
    """A tile of a row after an entry, float32; its positions in the row, and which of them are
    inside."""
    SIZE: tl.constexpr = COUNTERS * DRAWS
    position = tile * SIZE + tl.arange(0, SIZE) - begin % DRAWS
    inside = (position >= 0) & (position < width)
    code = tl.load(codes + position, mask=inside, other=0)
    x = (
        _e4m3(code.to(tl.uint32)) * scale
        if FP8
        else code.to(tl.int8, bitcast=True).to(tl.float32) * scale
    )
    x *= _number(table, 2)
    for query in tl.static_range(QUERIES):
        k0 = tl.load(table + 3 + 3 * query)
        k1 = tl.load(table + 4 + 3 * query)
        x += _values(begin // DRAWS + tile * COUNTERS, k0, k1, cubics, KIND, COUNTERS) * _number(
            table, 5 + 3 * query
        )
    return x, position, inside


@triton.jit(do_not_specialize=["origin"])
def _advance_rows_kernel(
    scales,  # float32 [rows]
    codes,  # uint8 [rows, width]
    # int64: of every entry the rounding's key and the decay, then each query's key and factor
    table,
    cubics,
    width,
    tiles,  # of a row
    origin,
    entries,
    largest,  # float32, of the codes
    QUERIES: tl.constexpr,
    FP8: tl.constexpr,
    ROUNDING: tl.constexpr,
    KIND: tl.constexpr,
    COUNTERS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """One row: its new scale is its largest magnitude's, which a first pass finds; the second makes
    the same numbers again."""
    SIZE: tl.constexpr = COUNTERS * DRAWS
    row = tl.program_id(0).to(tl.int64)
    codes += row * width
    begin = origin.to(tl.int64) + row * width
    entry = table
    for _ in range(entries):
        scale = tl.load(scales + row)
        largest_magnitude = tl.zeros([SIZE], tl.float32)
        for tile in range(tiles):
            x, position, inside = _advanced(
                codes, scale, begin, tile, width, entry, cubics, QUERIES, FP8, KIND, COUNTERS, DRAWS
            )
            largest_magnitude = tl.maximum(largest_magnitude, tl.where(inside, tl.abs(x), 0.0))
        new = tl.math.div_rn(tl.max(largest_magnitude, 0), largest)
        divisor = tl.where(new == 0, float("inf"), new)
        for tile in range(tiles):
            x, position, inside = _advanced(
                codes, scale, begin, tile, width, entry, cubics, QUERIES, FP8, KIND, COUNTERS, DRAWS
            )
            steps = tl.math.div_rn(x, tl.zeros([SIZE], tl.float32) + divisor)
            if ROUNDING:
                magnitude = tl.abs(steps)
                grid = tl.full([SIZE], 1.0, tl.float32)
                if FP8:
                    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 121)
                    grid = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
                units = tl.math.div_rn(magnitude, grid)
                floor = tl.floor(units)
                draws = _draws(
                    (begin // DRAWS + tile * COUNTERS) * (DRAWS // 16),
                    tl.load(entry),
                    tl.load(entry + 1),
                    SIZE // 16,
                )
                remainder = _nearest((units - floor) * 65536.0).to(tl.int32)
                up = remainder + draws.to(tl.int32) >= 65536
                rounded = (floor + up.to(tl.float32)) * grid
                sign = steps.to(tl.uint32, bitcast=True) & 0x80000000
                steps = (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
            elif not FP8:
                steps = _nearest(steps)
            steps = tl.minimum(tl.maximum(steps, -largest), largest)
            code = (
                _to_e4m3(steps).to(tl.uint8)
                if FP8
                else steps.to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
            )
            tl.store(codes + position, code, mask=inside)
        tl.store(scales + row, new)
        tl.debug_barrier()  # the next entry's reads may be other threads'
        entry += 3 + 3 * QUERIES


def advance_rows(
    scales: Tensor,
    codes: Tensor,
    origin: int,
    words: Sequence[int],
    factors: Sequence[float],
    entries: int,
    queries: int,
    rounding: bool,
    kind: NoiseKind,
) -> None:
    """The operator ``advance_rows_``: a matrix in fp8 or int8, scales [R] and codes [R, D]."""
    code = KIND_NUMBERS[kind]
    draws = DRAWS[kind]
    rows, width = codes.shape
    table = sent(torch.from_numpy(_numbers(words, factors, 1)[0]), codes.device)
    fp8 = codes.dtype.is_floating_point
    with _on(codes):
        _advance_rows_kernel[(rows,)](
            scales,
            codes.view(torch.uint8),
            table,
            _cubics(codes.device),
            width,
            _programs(width, draws, _COUNTERS[code], width % draws == 0 and origin % draws == 0),
            origin,
            entries,
            448.0 if fp8 else 127.0,
            QUERIES=queries,
            FP8=fp8,
            ROUNDING=rounding,
            KIND=code,
            COUNTERS=_COUNTERS[code],
            DRAWS=draws,
            **options(codes.device),
        )


# ---- AdamW ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["r0", "r1"])
def _adamw_kernel(
    param, grad, first, second, count, decay, weight, beta2, rest2, root, eps, rate, r0, r1,
    ROUNDING: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A tile of :func:`blockwalk.numerics.updates.adamw`, each operation rounded by itself."""
    program = tl.program_id(0).to(tl.int64)
    position = program * SIZE + tl.arange(0, SIZE)
    inside = position < count
    p = tl.load(param + position, mask=inside, other=0.0).to(tl.float32) * decay
    g = tl.load(grad + position, mask=inside, other=0.0)
    m = tl.load(first + position, mask=inside, other=0.0)
    m += (g - m) * weight
    v = tl.load(second + position, mask=inside, other=0.0) * beta2 + rest2 * g * g
    divisor = tl.math.div_rn(tl.math.sqrt_rn(v), tl.zeros([SIZE], tl.float32) + root) + eps
    p += tl.math.div_rn(m * rate, divisor)
    dtype: tl.constexpr = param.dtype.element_ty
    tl.store(first + position, m, mask=inside)
    tl.store(second + position, v, mask=inside)
    tl.store(param + position, _cast(p, program * SIZE, r0, r1, dtype, ROUNDING, SIZE), mask=inside)


def adamw(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: Sequence[float],
    rounding: Sequence[int],
) -> None:
    """The operator ``adamw_``: ``numbers`` as the kernel takes them, from the decay to the rate."""
    size = 1024
    with _on(param):
        _adamw_kernel[(triton.cdiv(param.numel(), size),)](
            param, grad, first, second, param.numel(), *numbers, *(rounding or (0, 0)),
            ROUNDING=bool(rounding), SIZE=size, **COMPILE_OPTIONS,
        )  # fmt: skip

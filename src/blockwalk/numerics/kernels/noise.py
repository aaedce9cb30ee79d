# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The noise of ``noise/noise.py`` as Triton kernels, with the same bits as on a CPU.

Products and sums must round separately, as everywhere: every launch turns the fusing of multiply
and add off. Words are made once for each counter and laid out in element order, so that memory is
read and written in order, each element once. The kernels also run in Triton's interpreter, on CPU
tensors, which is how their bits are tested without a GPU.

Import these modules only where an accelerator's tensors are: they need triton, which comes with
torch's CUDA builds for Linux."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.noise.numpy_words import DRAWS, KIND_NUMBERS, cubic_coefficients

if TYPE_CHECKING:
    from blockwalk.numerics.noise.key import Key, Write


_COUNTERS = {0: 128, 1: 128, 2: 16}
"""Counters of one program, by kind: 2048 or 4096 elements, each thread a few of them in a row."""

COMPILE_OPTIONS = {"enable_fp_fusion": False}
"""Triton's options of every kernel that computes in floating point."""


def options(device: torch.device) -> dict[str, Any]:
    """Give these options as many threads as a program has counters: two wavefronts of 64 threads
    (ROCm's GPUs for servers) in place of Triton's four warps of 32, of which four would draw all
    noise twice."""
    wavefronts = not is_cpu(device) and _threads_together(device) == 64
    return {**COMPILE_OPTIONS, "num_warps": 2} if wavefronts else COMPILE_OPTIONS


@functools.cache
def _threads_together(device: torch.device) -> int:
    """Ask torch for the threads of a warp: 32 where it does not tell."""
    module = torch.get_device_module(device)
    properties_of = getattr(module, "get_device_properties", lambda _: None)
    return int(getattr(properties_of(device), "warp_size", 32))


_KEYS = ("k0", "k1", "r0", "r1", "u0", "u1", "start")
"""Arguments whose values change all the time: compiled once for all of them."""


@triton.jit
def _words(counter, k0, k1, COUNTERS: tl.constexpr):
    """Philox 4x64-10 of ``counter`` … + COUNTERS − 1: uint64 [4·COUNTERS], the four words of a
    counter side by side."""
    MULTIPLIER_0: tl.constexpr = 0xD2E7470EE14C6C93
    MULTIPLIER_1: tl.constexpr = 0xCA5A826395121157
    WEYL_0: tl.constexpr = 0x9E3779B97F4A7C15
    WEYL_1: tl.constexpr = 0xBB67AE8584CAA73B
    multiplier_0 = tl.full([COUNTERS], MULTIPLIER_0, tl.uint64)
    multiplier_1 = tl.full([COUNTERS], MULTIPLIER_1, tl.uint64)
    key_0 = tl.zeros([COUNTERS], tl.uint64) + k0.to(tl.int64).to(tl.uint64)
    key_1 = tl.zeros([COUNTERS], tl.uint64) + k1.to(tl.int64).to(tl.uint64)
    a = (counter + tl.arange(0, COUNTERS)).to(tl.uint64)
    b = tl.zeros([COUNTERS], tl.uint64)
    c = tl.zeros([COUNTERS], tl.uint64)
    d = tl.zeros([COUNTERS], tl.uint64)
    for _ in tl.static_range(10):
        high_a = tl.umulhi(a, multiplier_0)
        high_c = tl.umulhi(c, multiplier_1)
        low_a = a * multiplier_0
        low_c = c * multiplier_1
        a = high_c ^ b ^ key_0
        b = low_c
        c = high_a ^ d ^ key_1
        d = low_a
        key_0 += tl.full([COUNTERS], WEYL_0, tl.uint64)
        key_1 += tl.full([COUNTERS], WEYL_1, tl.uint64)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _draws(counter, k0, k1, COUNTERS: tl.constexpr):
    """16-bit draws in element order, as uint32 [16·COUNTERS]."""
    words = _words(counter, k0, k1, COUNTERS)
    shifts = (16 * tl.arange(0, 4)).to(tl.uint64)
    draws = (words[:, None] >> shifts[None, :]).to(tl.uint32) & 0xFFFF
    return tl.reshape(draws, [16 * COUNTERS])


@triton.jit
def _values(counter, k0, k1, cubics, KIND: tl.constexpr, COUNTERS: tl.constexpr):
    """z in element order, float32 [draws a counter · COUNTERS]."""
    if KIND == 1:
        draws = _draws(counter, k0, k1, COUNTERS)
        pattern = ((draws * 2) & 0xFFFF | 1).to(tl.int32).to(tl.float32).to(tl.uint32, bitcast=True)
        segment = pattern >> 22 & 31
        t = (pattern & 0x3FFFFF | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        value = tl.load(cubics + 96 + segment) * t + tl.load(cubics + 64 + segment)
        value = value * t + tl.load(cubics + 32 + segment)
        value = value * t + tl.load(cubics + segment)
        return (value.to(tl.uint32, bitcast=True) | (draws >> 15) << 31).to(
            tl.float32, bitcast=True
        )
    else:
        words = _words(counter, k0, k1, COUNTERS)
        shifts = tl.arange(0, 64).to(tl.uint64)
        bits = (words[:, None] >> shifts[None, :]).to(tl.int32) & 1
        return tl.reshape(1 - 2 * bits, [256 * COUNTERS]).to(tl.float32)


@triton.jit
def _to_bfloat16(x, carry):
    """``x`` with ``carry`` added below the bits that stay: to nearest even by it, whatever the
    conversion of a device."""
    bits = x.to(tl.uint32, bitcast=True)
    pattern = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, (bits + carry) >> 16)
    return pattern.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _to_float16(x, draws):
    """``x`` rounded stochastically to float16; noise_numpy.py says how."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    normal = magnitude >= 0x38800000
    shift = tl.where(normal, 13, tl.where(exponent >= 86, 126 - exponent, 40)).to(tl.uint32)
    significand = tl.where(normal, magnitude - 0x38000000, (magnitude & 0x7FFFFF) | 0x800000)
    inside = tl.minimum(
        shift, 31
    )  # a shift by 32 or more is not defined; by 31 nothing is kept already
    kept = significand >> inside
    dropped = significand - (kept << inside)
    coarser = tl.where(shift < 16, 16 - shift, 0).to(tl.uint32)
    finer = tl.where(shift < 16, 0, shift - 16).to(tl.uint32)
    pattern = kept + (((dropped << coarser >> finer) + draws) >> 16)
    pattern = tl.where(magnitude >= 0x47800000, 0x7C00, pattern)
    pattern = tl.where(magnitude > 0x7F800000, 0x7E00, pattern) | (bits >> 16 & 0x8000)
    return pattern.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _cast(x, first, r0, r1, dtype: tl.constexpr, ROUNDING: tl.constexpr, SIZE: tl.constexpr):
    """``x``, whose first element is element ``first`` (a multiple of 16) of its parameter, in
    ``dtype``."""
    if dtype == tl.bfloat16:
        if ROUNDING:
            return _to_bfloat16(x, _draws(first // 16, r0, r1, SIZE // 16))
        else:
            return _to_bfloat16(x, 0x7FFF + (x.to(tl.uint32, bitcast=True) >> 16 & 1))
    elif dtype == tl.float16 and ROUNDING:
        return _to_float16(x, _draws(first // 16, r0, r1, SIZE // 16))
    else:
        return x.to(dtype)


@triton.jit(do_not_specialize=_KEYS)
def _write_kernel(
    source,  # float [rows, width], rows source_stride elements apart, or not read
    out,  # float [rows, width], rows out_stride elements apart
    row_index,  # int64 [rows], or not read
    cubics,  # float32 [4, 32]
    start,  # element of the parameter at [0, 0], before row_index
    pitch,  # elements between rows in the parameter
    width,
    tiles,  # programs for each row
    source_stride,
    out_stride,
    k0,
    k1,
    scale,  # float32
    r0,
    r1,
    KIND: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ROUNDING: tl.constexpr,
    ALIGNED: tl.constexpr,  # every row starts at a multiple of DRAWS
    COUNTERS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    SIZE: tl.constexpr = COUNTERS * DRAWS
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = program % tiles
    begin = start.to(tl.int64) + (tl.load(row_index + row) if HAS_ROWS else row) * pitch
    position = tile * SIZE + tl.arange(0, SIZE)
    counter = begin // DRAWS + tile * COUNTERS
    if not ALIGNED:
        position -= begin % DRAWS
    inside = (position >= 0) & (position < width)
    dtype: tl.constexpr = out.dtype.element_ty
    if HAS_SOURCE:
        x = tl.load(source + row * source_stride + position, mask=inside, other=0.0).to(tl.float32)
        if KIND != 0:
            x += _values(counter, k0, k1, cubics, KIND, COUNTERS) * scale
    else:
        x = _values(counter, k0, k1, cubics, KIND, COUNTERS) * scale
    rounded = _cast(x, counter * DRAWS, r0, r1, dtype, ROUNDING, SIZE)
    tl.store(out + row * out_stride + position, rounded, mask=inside)


@triton.jit(do_not_specialize=_KEYS)
def _draws_kernel(out, start, count, k0, k1, COUNTERS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    draws = _draws(start.to(tl.int64) // 16 + program * COUNTERS, k0, k1, COUNTERS)
    position = program * (16 * COUNTERS) + tl.arange(0, 16 * COUNTERS) - start.to(tl.int64) % 16
    tl.store(
        out + position, draws.to(out.dtype.element_ty), mask=(position >= 0) & (position < count)
    )


def write(w: Write) -> Tensor:
    """Return the operation behind ``noise.py``'s; answers ``out``."""
    source = w.source
    out = w.out
    place = w.place
    code = KIND_NUMBERS[w.kind]
    draws = DRAWS[w.kind] if w.kind else 16
    aligned = w.start % draws == 0 and place.pitch % draws == 0
    tiles = _programs(place.width, draws, _COUNTERS[code], aligned)
    single = place.rows == 1 and w.rows is None
    with _on(out):
        _write_kernel[(place.rows * tiles,)](
            source if source is not None else out,
            out,
            w.rows.contiguous() if w.rows is not None else out,
            _cubics(out.device),
            w.start,
            place.pitch,
            place.width,
            tiles,
            0 if single or source is None else source.stride(0),
            0 if single else out.stride(0),
            *_key_words(w.key),
            w.scale,
            *_key_words(w.rounding),
            KIND=code,
            HAS_SOURCE=source is not None,
            HAS_ROWS=w.rows is not None,
            ROUNDING=w.rounding is not None,
            ALIGNED=aligned,
            COUNTERS=_COUNTERS[code],
            DRAWS=draws,
            **options(out.device),
        )
    return out


def random_uint16(key: Key, start: int, out: Tensor) -> Tensor:
    """``noise.random_uint16``; its arguments are checked there."""
    counters = _COUNTERS[0]
    count = out.numel()
    with _on(out):
        _draws_kernel[(_programs(count, 16, counters, False),)](
            out, start, count, *_key_words(key), COUNTERS=counters, **options(out.device)
        )
    return out


def _programs(elements: int, draws: int, counters: int, aligned: bool) -> int:
    """Return programs that cover a row of elements which may begin anywhere in its first
    counter."""
    return -(-(elements + (0 if aligned else draws - 1)) // (draws * counters))


def _key_words(key: Key | None) -> tuple[int, int]:
    """Return a key's words as signed integers: Triton would compile anew for those above 2^63."""
    k0, k1 = key.philox_key() if key is not None else (0, 0)
    return (k0 + 2**63) % 2**64 - 2**63, (k1 + 2**63) % 2**64 - 2**63


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return Triton launches on the current device."""
    return (
        contextlib.nullcontext()
        if tensor.is_cpu
        else torch.accelerator.device_index(tensor.device.index)
    )


@functools.cache
def _cubics(device: torch.device) -> Tensor:
    return torch.from_numpy(cubic_coefficients()).to(device)

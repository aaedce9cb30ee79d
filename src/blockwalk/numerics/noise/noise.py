"""Counter-based perturbations: z as a function of (seed, step, query, parameter name, element), the same bits anywhere.

A :class:`NoiseKey` is hashed to the key of a Philox 4x64-10 generator, whose counter is the index of the element in its
parameter's flattened order over the draws that one counter gives. So any slice of any parameter can be had alone, on any
tier, device, slice or thread. Values are Gaussian (16 bits a draw through an inverse-CDF table with variance 1, no tail
beyond 4.325) or Rademacher (one bit a sign): ``noise_numpy.py`` defines the words, the table and the rounding, and says
what the table does to the tails.

Everywhere ``start`` is the index of the tensor's first element in the flattened parameter. With ``pitch`` (the length of
the parameter's rows) a 2-D tensor [R, W] is a window: row r begins at ``start + r·pitch``, or at ``start +
rows[r]·pitch`` where ``rows`` (int64 [R], same device) names rows. In a parameter [N, D], columns a:b are ``start=a,
pitch=D``, rows a:b are ``start=a·D``, and the rows of an embedding's tokens are ``start=0, pitch=D, rows=tokens``.

On a CPU a C kernel does the work, or numpy where there is no compiler (``native=False`` forces it); on CUDA, Triton.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from blockwalk.numerics import native as native_code
from blockwalk.numerics.noise import numpy_words
from blockwalk.numerics.noise.key import NoiseKey, NoiseKind, Window, window
from blockwalk.numerics.noise.numpy_words import KINDS, cubic_coefficients, gaussian_table

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint16: 3, torch.int32: 4}
_THREAD_ELEMENTS = 1 << 14
"""Elements for each thread below which sharing them out costs more than it saves."""


def fill_(
    out: torch.Tensor,
    key: NoiseKey,
    start: int = 0,
    kind: NoiseKind = "gaussian",
    *,
    pitch: int | None = None,
    rows: torch.Tensor | None = None,
    native: bool = True,
) -> torch.Tensor:
    """``out`` = z, for ``out`` in float32 (or rounded to nearest even in bfloat16 or float16). Returns ``out``."""
    return _write(None, out, key, start, 1.0, kind, None, pitch, rows, native)


def add_scaled_(
    target: torch.Tensor,
    key: NoiseKey,
    start: int,
    scale: float,
    kind: NoiseKind = "gaussian",
    *,
    rounding: NoiseKey | None = None,
    pitch: int | None = None,
    rows: torch.Tensor | None = None,
    native: bool = True,
) -> torch.Tensor:
    """``target`` += scale·z, in float32: ``scale`` is rounded to float32, then the product, then the sum.

    A target in bfloat16 or float16 is then rounded to nearest even or, with a ``rounding`` key, stochastically: the
    magnitude rounds up where its remainder, in 2^-16 of the last place and truncated to that, plus the element's 16-bit
    draw reaches 2^16. ``rounding`` has no effect on a float32 target. Returns ``target``.
    """
    return _write(target, target, key, start, scale, kind, rounding, pitch, rows, native)


def perturbed(
    source: torch.Tensor,
    out: torch.Tensor,
    key: NoiseKey,
    start: int,
    scale: float,
    kind: NoiseKind = "gaussian",
    *,
    rounding: NoiseKey | None = None,
    pitch: int | None = None,
    rows: torch.Tensor | None = None,
    native: bool = True,
) -> torch.Tensor:
    """``out`` = cast(float32(source) + scale·z), as :func:`add_scaled_` but out of place; returns ``out``.

    ``source`` and ``out`` are float32, bfloat16 or float16, of one shape, and may be one tensor; ``rows`` names the
    noise's rows, the source has them gathered.
    """
    return _write(source, out, key, start, scale, kind, rounding, pitch, rows, native)


def stochastic_round(
    source: torch.Tensor,
    out: torch.Tensor,
    rounding: NoiseKey,
    start: int = 0,
    *,
    pitch: int | None = None,
    rows: torch.Tensor | None = None,
    native: bool = True,
) -> torch.Tensor:
    """``out`` (bfloat16 or float16) = ``source`` rounded stochastically, as :func:`add_scaled_` rounds; returns ``out``."""
    return _write(source, out, None, start, 0.0, None, rounding, pitch, rows, native)


def random_uint16(key: NoiseKey, start: int, count: int, out: torch.Tensor, *, native: bool = True) -> torch.Tensor:
    """Draws start … start + count − 1 of ``key``, uniform in 0 … 65535, into ``out`` (uint16 or int32, 1-D); returns it."""
    if out.dtype not in (torch.uint16, torch.int32) or out.shape != (count,) or not out.is_contiguous():
        raise ValueError(
            f"random_uint16 needs a contiguous uint16 or int32 tensor of {count} elements, not {out.dtype} {out.shape}"
        )
    _check_start(start)
    if out.device.type == "cuda":
        from blockwalk.numerics.noise import cuda as noise_cuda

        return noise_cuda.random_uint16(key, start, count, out)
    _check_cpu(out)
    library = _library() if native else None
    if library is None:
        out.copy_(torch.from_numpy(numpy_words.draws(key.philox_key(), start, count)))
        return out
    k0, k1 = key.philox_key()
    threads = _thread_count(count)
    library.blockwalk_draws(out.data_ptr(), _DTYPES[out.dtype], count, start, k0, k1, native_code.team(), threads)
    return out


def _write(
    source: torch.Tensor | None,
    out: torch.Tensor,
    key: NoiseKey | None,
    start: int,
    scale: float,
    kind: NoiseKind | None,
    rounding: NoiseKey | None,
    pitch: int | None,
    rows: torch.Tensor | None,
    native: bool,
) -> torch.Tensor:
    """The one operation that the public ones name: out = cast(float32(source) + scale·z)."""
    _check_kind(kind)
    _check_start(start)
    place = window(out if source is None else source, out, pitch, rows)
    if place.rows * place.width == 0:
        return out
    if out.device.type == "cuda":
        from blockwalk.numerics.noise import cuda as noise_cuda

        return noise_cuda.write(source, out, key, start, scale, kind, rounding, place, rows)
    _check_cpu(out)
    library = _library() if native else None
    if library is not None:
        _write_native(library, source, out, key, start, scale, kind, rounding, place, rows)
    else:
        _write_numpy(source, out, key, start, scale, kind, rounding, place, rows)
    return out


def _write_native(
    library: ctypes.CDLL,
    source: torch.Tensor | None,
    out: torch.Tensor,
    key: NoiseKey | None,
    start: int,
    scale: float,
    kind: NoiseKind | None,
    rounding: NoiseKey | None,
    place: Window,
    rows: torch.Tensor | None,
) -> None:
    k0, k1 = key.philox_key() if key is not None else (0, 0)
    r0, r1 = rounding.philox_key() if rounding is not None else (0, 0)
    index = rows.contiguous() if rows is not None else None
    table = gaussian_table().ctypes.data
    cubics = cubic_coefficients().ctypes.data
    library.blockwalk_noise(
        source.data_ptr() if source is not None else None,
        _DTYPES[source.dtype] if source is not None else 0,
        source.stride(0) if source is not None and place.rows > 1 else 0,
        out.data_ptr(),
        _DTYPES[out.dtype],
        out.stride(0) if place.rows > 1 else 0,
        place.rows,
        place.width,
        start,
        place.pitch,
        index.data_ptr() if index is not None else None,
        KINDS[kind],
        k0,
        k1,
        scale,
        rounding is not None,
        r0,
        r1,
        cubics,
        table,
        native_code.team(),
        _thread_count(place.rows * place.width),
    )


def _write_numpy(
    source: torch.Tensor | None,
    out: torch.Tensor,
    key: NoiseKey | None,
    start: int,
    scale: float,
    kind: NoiseKind | None,
    rounding: NoiseKey | None,
    place: Window,
    rows: torch.Tensor | None,
) -> None:
    """The words row by row through numpy's Philox: bit for bit those of the kernels."""
    for r in range(place.rows):
        first = start + (int(rows[r]) if rows is not None else r) * place.pitch
        into = out[r] if place.pitch else out.view(-1)
        x = torch.zeros(place.width)
        if source is not None:
            x.copy_(source[r] if place.pitch else source.view(-1))
        if key is not None:
            values = numpy_words.gaussian if kind == "gaussian" else numpy_words.rademacher
            x += torch.from_numpy(values(key.philox_key(), first, place.width)).mul_(scale)
        if rounding is None or into.dtype == torch.float32:
            into.copy_(x)
        else:
            rounded = numpy_words.round_bfloat16 if into.dtype == torch.bfloat16 else numpy_words.round_float16
            half = rounded(x.numpy(), numpy_words.draws(rounding.philox_key(), first, place.width))
            into.view(torch.int16).copy_(torch.from_numpy(half.view("int16")))


def _thread_count(elements: int) -> int:
    return min(torch.get_num_threads(), elements // _THREAD_ELEMENTS)


def _check_cpu(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"noise is made on cpu and cuda, not on {tensor.device.type}")


def _check_kind(kind: NoiseKind | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"noise {kind!r} is not counter-based; choose gaussian or rademacher")


def _check_start(start: int) -> None:
    if start < 0:
        raise ValueError(f"start is {start}; elements are counted from 0")


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, long, word = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
    library.blockwalk_noise.restype = None
    library.blockwalk_noise.argtypes = [
        *(pointer, integer, long),  # source
        *(pointer, integer, long),  # out
        *(long, long, long, long, pointer),  # rows, width, start, pitch, row index
        *(integer, word, word, ctypes.c_float),  # kind, key, scale
        *(integer, word, word),  # rounding
        *(pointer, pointer),  # coefficients, table
        *(pointer, integer),  # the team, its threads
    ]
    library.blockwalk_draws.restype = None
    library.blockwalk_draws.argtypes = [pointer, integer, long, long, word, word, pointer, integer]
    return library


def _library() -> ctypes.CDLL | None:
    library = native_code.load("noise")
    return None if library is None else _declared(library)

"""The noise of ``noise.py`` on a CPU: a C kernel, or numpy where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockwalk.numerics import native as native_code
from blockwalk.numerics.noise import numpy_words
from blockwalk.numerics.noise.key import Key, NoiseKind, Write
from blockwalk.numerics.noise.numpy_words import KIND_NUMBERS, cubic_coefficients, gaussian_table

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint16: 3, torch.int32: 4}
_THREAD_ELEMENTS = 1 << 14
"""Elements for each thread below which sharing them out costs more than it saves."""


_RUN = np.dtype(
    [
        *((name, np.int64) for name in ("source", "out", "count", "start")),
        *((name, np.int64) for name in ("k0", "k1", "r0", "r1")),
        *((name, np.float32) for name in ("scale", "decay")),
        *((name, np.int32) for name in ("source_dtype", "out_dtype", "rounding", "unused")),
    ]
)
"""The kernel's ``run_t``."""


def random_uint16(key: Key, start: int, out: Tensor) -> Tensor:
    """``noise.random_uint16``; its arguments are checked there."""
    count = out.numel()
    library = native_code.load("noise")
    if library is None:
        return out.copy_(torch.from_numpy(numpy_words.draws(key.philox_key(), start, count)))
    k0, k1 = key.philox_key()
    threads = _thread_count(count)
    library.blockwalk_draws(
        out.data_ptr(), _DTYPES[out.dtype], count, start, k0, k1, native_code.team(), threads
    )
    return out


def add_products(
    out_RD: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], scales: Sequence[float]
) -> bool:
    """Return ``noise.add_products_`` in one pass over ``out_RD``; False without a kernel."""
    library = native_code.load("noise")
    if library is None:
        return False
    assert (out_RD.is_contiguous(), out_RD.dtype) == (True, torch.float32), (
        out_RD.stride(),
        out_RD.dtype,
    )
    scales_Q = torch.tensor(scales, dtype=torch.float32)
    a_QRr = torch.stack(tuple(lefts))
    b_QrD = torch.stack([b_Dr.t() for b_Dr in rights])
    factors = a_QRr.data_ptr(), b_QrD.data_ptr(), scales_Q.data_ptr()
    shape = *out_RD.shape, *a_QRr.shape[::2]
    library.blockwalk_add_products(
        out_RD.data_ptr(), *shape, *factors, native_code.team(), _thread_count(out_RD.numel())
    )
    return True


def write(w: Write) -> Tensor:
    """Return the operation behind ``noise.py``'s; answers ``out``."""
    library = native_code.load("noise")
    if library is not None:
        _write_native(library, w)
    else:
        _write_numpy(w)
    return w.out


def _write_native(library: ctypes.CDLL, w: Write) -> None:
    source = w.source
    out = w.out
    place = w.place
    index = w.rows.contiguous() if w.rows is not None else None
    library.blockwalk_noise(
        source.data_ptr() if source is not None else None,
        _DTYPES[source.dtype] if source is not None else 0,
        source.stride(0) if source is not None and place.rows > 1 else 0,
        out.data_ptr(),
        _DTYPES[out.dtype],
        out.stride(0) if place.rows > 1 else 0,
        place.rows,
        place.width,
        w.start,
        place.pitch,
        index.data_ptr() if index is not None else None,
        KIND_NUMBERS[w.kind],
        *(w.key.philox_key() if w.key is not None else (0, 0)),
        w.scale,
        w.rounding is not None,
        *(w.rounding.philox_key() if w.rounding is not None else (0, 0)),
        *_tables(),
        native_code.team(),
        _thread_count(place.rows * place.width),
    )


@functools.cache
def _tables() -> tuple[int, int]:
    """Return the addresses of the Gaussian tables, which live as long as the process."""
    return cubic_coefficients().ctypes.data, gaussian_table().ctypes.data


class Run(NamedTuple):
    """One tensor of many that are written in one call: ``out`` = cast(``source``·decay + scale·z),
    each product and sum rounded by itself."""

    source: Tensor
    """Contiguous tensor in float32, bfloat16 or float16."""
    out: Tensor
    """Tensor of the source's shape that is written to; it may be the source."""
    start: int
    """The element of the parameter at which it begins."""
    key: tuple[int, int]
    """The key's words, signed."""
    scale: float
    decay: float = 1.0
    rounding: tuple[int, int] | None = None
    """The words, signed, of the draws of stochastic rounding; None: to nearest even."""


def has_runs() -> bool:
    """Return whether :func:`write_runs` works: a kernel is there."""
    return native_code.load("noise") is not None


def write_runs(runs: Sequence[Run], kind: NoiseKind) -> None:
    """Write noise of one kind into many tensors, one after the other, in one call of the kernel."""
    library = native_code.load("noise")
    assert library is not None, "ask has_runs first"
    rows = [
        (
            *(run.source.data_ptr(), run.out.data_ptr(), run.out.numel(), run.start),
            *run.key,
            *(run.rounding or (0, 0)),
            *(run.scale, run.decay, _DTYPES[run.source.dtype], _DTYPES[run.out.dtype]),
            *(run.rounding is not None, 0),
        )
        for run in runs
    ]
    table = np.array(rows, dtype=_RUN)
    library.blockwalk_noise_runs(
        table.ctypes.data,
        len(rows),
        KIND_NUMBERS[kind],
        *_tables(),
        native_code.team(),
        torch.get_num_threads(),
        _THREAD_ELEMENTS,
    )


def _write_numpy(w: Write) -> None:
    """Write the words row by row through numpy's Philox: bit for bit those of the kernels."""
    source = w.source
    place = w.place
    for r in range(place.rows):
        start = w.start + (int(w.rows[r]) if w.rows is not None else r) * place.pitch
        out = w.out[r] if place.pitch else w.out.view(-1)
        x = torch.zeros(place.width)
        if source is not None:
            x.copy_(source[r] if place.pitch else source.view(-1))
        if w.key is not None:
            values = numpy_words.gaussian if w.kind == "gaussian" else numpy_words.rademacher
            x += torch.from_numpy(values(w.key.philox_key(), start, place.width)).mul_(w.scale)
        if w.rounding is None or out.dtype == torch.float32:
            out.copy_(x)
        else:
            draws = numpy_words.draws(w.rounding.philox_key(), start, place.width)
            patterns = _ROUND[out.dtype](x.numpy(), draws)
            out.view(torch.int16).copy_(torch.from_numpy(patterns.view("int16")))


_ROUND = {torch.bfloat16: numpy_words.round_bfloat16, torch.float16: numpy_words.round_float16}


def _thread_count(elements: int) -> int:
    return min(torch.get_num_threads(), elements // _THREAD_ELEMENTS)

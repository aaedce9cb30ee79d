"""Codecs: a parameter as bytes on a tier, and back, any range of rows at a time.

The bytes are described in :mod:`blockwalk.numerics.codecs.layout`.

Values are float32 products rounded to nearest even in the output's dtype: the C kernel, torch on
the CPU and torch on CUDA give the same bits.

**Rounding** to codes is to nearest even or, where a ``rounding`` key is given, stochastic: the
magnitude rounds up where its remainder, in 2^-16 of the code's step, plus the element's 16-bit draw
reaches 2^16. The draw is a function of the key and of the element's index in the parameter, so that
any slice rounds alone as it does within the whole. The expected value is the value to within 2^-16
of a step, exactly so for bf16 and for float16's normal numbers. At a learning rate of 1e-7 an
update is far below a step: rounded to nearest it would always be lost."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockwalk.numerics import native as native_code
from blockwalk.numerics.codecs.layout import Bytes, Layout
from blockwalk.numerics.codecs.matrix_codec import Coded, Rounding, matrix_codec
from blockwalk.numerics.codecs.readers import Index
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.device import sent as to_device
from blockwalk.numerics.noise import cpu
from blockwalk.numerics.noise.key import NoiseKey, NoiseKind, Write, window
from blockwalk.numerics.noise.noise import random_uint16, stochastic_round
from blockwalk.numerics.operators import received, register, sent
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import spans

_NATIVE_DTYPE = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_CPU_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 26
WITH_KERNELS = frozenset({Codec.FP8, Codec.INT8, Codec.INT4, Codec.INT4A, Codec.NF4, Codec.Q4_0})
"""The codecs that accelerators decode in one launch (:mod:`blockwalk.numerics.kernels.codecs`)."""
_THREAD_ELEMENTS = 1 << 15
"""Elements that torch's path works on at a time (its temporaries take some 16 bytes each), and that
pay for a thread."""


def _piece(where: Tensor, columns: int) -> int:
    """Return rows of so many columns that are worked on at a time."""
    return max((_CPU_PIECE if is_cpu(where.device) else _DEVICE_PIECE) // max(columns, 1), 1)


def decode_whole(buffer: Bytes, layout: Layout, out: Tensor) -> None:
    """Decode the whole parameter into ``out`` (contiguous, of its shape; any float dtype)."""
    if layout.parts is not None and len(layout.shape) > 2:
        matrix = dataclasses.replace(layout, shape=layout.shape[1:])
        for expert, out_RD in enumerate(out):
            parts = tuple(part[expert] for part in layout.split(buffer))
            decode_rows(parts, matrix, 0, len(out_RD), out_RD)
    else:
        decode_rows(buffer, layout, 0, layout.rows, out.view(layout.rows, layout.columns))


def encode_rows(
    rows_RD: Tensor,
    buffer: Tensor,
    layout: Layout,
    start: int,
    *,
    rounding: NoiseKey | None = None,
    origin: int = 0,
    name: str = "the parameter",
    check: bool = True,
    threads: int | None = None,
) -> Tensor:
    """Write rows ``start`` … of a parameter, [rows, D] of any float dtype, into its bytes; returns
    ``buffer``.

    ``origin`` is the place in the parameter of the layout's first element, where the layout is that
    of a range of rows. Scales are computed anew from the values. Memory beyond the arguments is a
    few MB, however many rows there are. The C kernel takes so many ``threads``: torch's, unless
    they are named.

    Raises:
        ValueError: a value that the codec cannot hold: not finite, or beyond float16 for fp16 and
            for int4's scales. ``raw``, ``fp32`` and a source in the codec's own dtype are copied as
            they are. ``check=False`` leaves the look at the values out, which on CUDA is a
            synchronisation.
    """
    facts = (name, buffer.dtype, buffer.shape, layout)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (layout.nbytes,)), facts
    stop = start + len(rows_RD)
    assert rows_RD.shape == (stop - start, layout.columns), (name, rows_RD.shape, layout)
    assert 0 <= start <= stop <= layout.rows, (name, start, stop, layout)
    assert layout.order is None, f"{name} is only read: its rows stand in another order"
    if layout.groups:
        _require_written(layout, rounded=rounding is not None)
    if not rows_RD.numel():
        return buffer
    codes = layout.codes(buffer)
    scales = layout.scales(buffer)
    if rows_RD.dtype == layout.code_dtype and not layout.groups:
        codes[start:stop].copy_(rows_RD)
        return buffer
    for a, b in spans(start, stop, _piece(rows_RD, layout.columns)):
        x_RD = rows_RD[a - start : b - start].contiguous()
        if check and layout.code_dtype != torch.float32:
            _check_values(x_RD, layout, a, name)
        place = origin + a * layout.columns
        if layout.groups:
            draws = None if rounding is None else Rounding(rounding, place)
            _encode_groups(x_RD, scales[a:b], codes[a:b], layout, draws, threads)
        elif rounding is not None and layout.code_dtype in (torch.bfloat16, torch.float16):
            stochastic_round(x_RD.float(), codes[a:b], rounding, place)
        else:
            codes[a:b].copy_(x_RD)
    return buffer


def _require_written(layout: Layout, *, rounded: bool) -> None:
    """Raise ValueError for a codec of groups that nothing writes, or not with these roundings."""
    if matrix_codec(layout.codec).encode is None:
        written = ", ".join(name for name in CODECS.written if CODECS[name].encoded)
        raise ValueError(
            f"{layout.codec} is read from files that have it, and not written; choose of {written}"
        )
    if rounded and not layout.codec.facts.trainable:
        trained = ", ".join(name for name, facts in CODECS.items() if facts.trains)
        raise ValueError(
            f"{layout.codec} is for frozen parameters: it has no stochastic rounding; choose of"
            f" {trained}"
        )


def _encode_groups(
    x_RD: Tensor,
    scales: Tensor,
    codes: Tensor,
    layout: Layout,
    rounding: Rounding | None,
    threads: int | None,
) -> None:
    """Encode rows of a codec with groups, by the C kernel where it can."""
    if not _encode_native(x_RD, scales, codes, layout, rounding, threads):
        encode = matrix_codec(layout.codec).encode
        assert encode is not None
        encode(x_RD.float(), scales, codes, layout, rounding)


def decode_rows(
    buffer: Bytes,
    layout: Layout,
    start: int,
    stop: int,
    out: Tensor,
    *,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    """Decode rows ``start:stop`` of an encoded parameter into ``out``, [stop − start, D], any float
    dtype; returns ``out``.

    ``columns`` (begin, end) decodes these columns only: ``out`` is [stop − start, end − begin].
    Nothing is allocated where the C kernel serves."""
    begin, end = columns or (0, layout.columns)
    assert 0 <= start <= stop <= layout.rows, (start, stop, layout)
    assert 0 <= begin <= end <= layout.columns, (columns, layout)
    assert out.shape == (stop - start, end - begin), (out.shape, start, stop, begin, end)
    if not isinstance(buffer, Tensor) or layout.parts is not None:
        return _read(buffer, layout, slice(start, stop), slice(begin, end), out)
    if has_kernel(layout, buffer) and out.is_contiguous():
        decode_on_device(buffer, layout, out, first_row=start, first_column=begin)
        return out
    order = None if layout.order is None else layout.order[start:stop]
    if _decode_native(buffer, layout, order, start, begin, end, out):
        return out
    codes = layout.codes(buffer)
    scales = layout.scales(buffer)
    if not layout.groups:
        return out.copy_(codes[:, begin:end][slice(start, stop) if order is None else order])
    for a, b in spans(start, stop, _piece(out, end - begin)):
        rows = slice(a, b) if order is None else order[a - start : b - start]
        coded = Coded(scales[rows], codes[rows], layout, begin, end)
        out[a - start : b - start].copy_(matrix_codec(layout.codec).decode(coded))
    return out


def gather_rows(buffer: Bytes, layout: Layout, index: Tensor, out: Tensor) -> Tensor:
    """Decode the rows named by ``index`` (int64, 1-D, contiguous, in any order) into ``out``,
    [len(index), D]; returns ``out``.

    Raises:
        IndexError: on a CPU, an index outside 0 … R − 1 (torch's own kernels check on CUDA).
    """
    if index.numel() and is_cpu(index.device):
        least, largest = (int(value) for value in torch.aminmax(index))
        if least < 0 or largest >= layout.rows:
            raise IndexError(
                f"rows {least} to {largest} are asked of a parameter of {layout.rows} rows"
            )
    if not isinstance(buffer, Tensor) or layout.parts is not None:
        return _read(buffer, layout, index, slice(0, layout.columns), out)
    if has_kernel(layout, buffer):
        decode_on_device(buffer, layout, out, rows=index)
        return out
    if layout.order is not None:
        index = layout.order.to(index.device)[index]
    if _decode_native(buffer, layout, index, 0, 0, layout.columns, out):
        return out
    codes = layout.codes(buffer)
    if not layout.groups:
        return out.copy_(codes[index])
    # index_select does not know float8: its rows are taken as bytes.
    chosen = codes.view(torch.uint8)[index].view(layout.code_dtype)
    coded = Coded(layout.scales(buffer)[index], chosen, layout, 0, layout.columns)
    return out.copy_(matrix_codec(layout.codec).decode(coded))


def _read(buffer: Bytes, layout: Layout, rows: Index, columns: slice, out: Tensor) -> Tensor:
    """Read rows and columns of a parted codec into ``out``, some rows at a time."""
    assert layout.parts is not None
    reader = layout.parts.reader(layout.split(buffer))
    for a, b in spans(0, out.shape[0], _piece(out, out.shape[1])):
        part = slice(rows.start + a, rows.start + b) if isinstance(rows, slice) else rows[a:b]
        out[a:b].copy_(reader(part, columns))
    return out


def has_kernel(layout: Layout, buffer: Bytes) -> bool:
    """Return whether an operator decodes it, in one launch: what the C kernel decodes, and nf4."""
    if not isinstance(buffer, Tensor) or layout.parts is not None or not layout.groups:
        return False
    return layout.codec in WITH_KERNELS and not is_cpu(buffer.device)


def decode_on_device(
    buffer: Tensor,
    layout: Layout,
    out: Tensor,
    *,
    rows: Tensor | None = None,
    first_row: int = 0,
    first_column: int = 0,
    key: NoiseKey | None = None,
    scale: float = 0.0,
    kind: NoiseKind | None = None,
    origin: int = 0,
) -> Tensor:
    """Write cast(value + scale·z) into ``out`` [n, m], contiguous: of the rows that begin at
    ``first_row``, or that ``rows`` names, from ``first_column`` on. ``origin`` is the place of the
    layout's first element in its parameter. Returns ``out``."""
    order = None if layout.order is None else to_device(layout.order, buffer.device)
    bytes_of = (buffer, order, rows, layout.codec, (layout.rows, layout.columns), layout.group_size)
    torch.ops.blockwalk.decode_(
        out, *bytes_of, first_row, first_column, sent(key), origin, scale, kind
    )
    return out


def _check_values(x_RD: Tensor, layout: Layout, start: int, name: str) -> None:
    """Refuse what the codec cannot hold; ``start`` is the number of the first row."""
    if not x_RD.dtype.is_floating_point:
        return
    limit = (
        matrix_codec(layout.codec).limit if layout.groups else torch.finfo(layout.code_dtype).max
    )
    if _largest(x_RD) <= limit:
        return
    magnitude_R = x_RD.abs().amax(dim=1).double()  # float16 takes a larger limit for infinity
    row = int((~(magnitude_R <= limit)).nonzero()[0])
    value = magnitude_R[row].item()
    place = f"{name}, row {start + row}"
    if not math.isfinite(value):
        raise ValueError(
            f"{place} holds a value that is not finite: only raw and fp32 can store it"
        )
    raise ValueError(
        f"{place} holds {value:.6g}; {layout.codec} goes to {limit:.6g}: choose codec bf16 or fp32"
        " for it"
    )


def _library_for(x_RD: Tensor) -> ctypes.CDLL | None:
    """Return the C kernels that read values where they lie; None off the processor, and where they
    were not compiled."""
    return native_code.load("codecs") if is_cpu(x_RD.device) else None


def _largest(x_RD: Tensor) -> float:
    """Return the largest magnitude of some values; NaN where one of them is."""
    library = _library_for(x_RD)
    dtype = _NATIVE_DTYPE.get(x_RD.dtype)
    if library is None or dtype is None:
        least, largest = (float(value) for value in torch.aminmax(x_RD))
        return math.nan if math.isnan(least) else max(-least, largest)
    assert x_RD.is_contiguous(), x_RD.stride()
    out = ctypes.c_float()
    library.blockwalk_largest(dtype, x_RD.data_ptr(), x_RD.numel(), ctypes.byref(out))
    return out.value


def encodes_groups(layout: Layout, x_RD: Tensor) -> bool:
    """Return whether the C kernel checks and encodes such values, and torch does nothing: threads
    may then encode a parameter's rows side by side, each with one thread of the kernel."""
    is_native = matrix_codec(layout.codec).encoder is not None if layout.groups else False
    is_read = x_RD.dtype in _NATIVE_DTYPE and x_RD.is_contiguous()
    in_groups = bool(layout.codec.facts.group_sizes)
    return is_native and is_read and in_groups and _library_for(x_RD) is not None


def _encode_native(
    x_RD: Tensor,
    scales: Tensor,
    codes: Tensor,
    layout: Layout,
    rounding: Rounding | None,
    threads: int | None,
) -> bool:
    """Encode rows with the C kernel where it can: False, and nothing written, where torch must."""
    library = _library_for(x_RD)
    codec = matrix_codec(layout.codec)
    if library is None or codec.encoder is None:
        return False
    pays_for = x_RD.numel() // _THREAD_ELEMENTS
    team = (native_code.team(), min(threads or torch.get_num_threads(), pays_for))
    if layout.codec.facts.group_sizes:
        dtype = _NATIVE_DTYPE.get(x_RD.dtype)
        if dtype is None:
            return False
        library.blockwalk_encode_groups(
            *(codec.encoder, layout.group_size, dtype, x_RD.data_ptr()),
            None if codec.table is None else codec.table.data_ptr(),
            *(scales.data_ptr(), *_group_bytes(scales, layout)),
            *(codes.data_ptr(), *_group_bytes(codes, layout)),
            *(*x_RD.shape, *team),
        )
        return True
    draws = None
    if rounding is not None:
        draws = torch.empty(x_RD.numel(), dtype=torch.uint16)
        random_uint16(rounding.key, rounding.first_element, draws)
    values_RD = x_RD.float()
    library.blockwalk_encode(
        *(codec.encoder, values_RD.data_ptr(), None if draws is None else draws.data_ptr()),
        *(scales.data_ptr(), codes.data_ptr(), *x_RD.shape, *team),
    )
    return True


def _group_bytes(values: Tensor, layout: Layout) -> tuple[int, int]:
    """Return the bytes from a row's scales or codes to the next row's, and from a group's to the
    next group's."""
    of_group = values.shape[1] // layout.groups * values.stride(1)
    return values.stride(0) * values.itemsize, of_group * values.itemsize


class NativeSource(NamedTuple):
    """An encoded parameter as the C kernel takes it."""

    codec: int
    half: int
    """Half of the numbers of a group."""
    scales: int
    codes: int
    """Addresses."""
    row_bytes: int
    row_scales: int


def native_source(buffer: Bytes, layout: Layout) -> NativeSource | None:
    """Return what the C kernel decodes a parameter from; None where torch must."""
    return None if native_code.load("codecs") is None else _native_source(buffer, layout)


def _native_source(buffer: Bytes, layout: Layout) -> NativeSource | None:
    """Return :func:`native_source` where the kernel is there."""
    codec = matrix_codec(layout.codec).native if layout.groups else None
    if codec is None or not isinstance(buffer, Tensor) or buffer.device.type != "cpu":
        return None
    if layout.parts is not None:
        return None
    assert buffer.is_contiguous(), buffer.stride()
    assert buffer.numel() == layout.nbytes, (buffer.shape, layout)
    address = buffer.data_ptr()
    facts = layout.codec.facts
    return NativeSource(
        codec,
        layout.group_size // 2 if facts.group_sizes else 0,
        address,
        address if facts.interleaved else address + layout.scale_bytes,
        layout.nbytes // layout.rows if facts.interleaved else layout.code_columns,
        layout.groups,
    )


def _decode_native(
    buffer: Tensor,
    layout: Layout,
    index: Tensor | None,
    start: int,
    begin: int,
    end: int,
    out: Tensor,
) -> bool:
    """Decode columns ``begin:end`` with the C kernel where it can: False, and nothing written,
    where torch must."""
    library = native_code.load("codecs")  # once: it asks for an environment variable
    source = None if library is None else _native_source(buffer, layout)
    dtype = _NATIVE_DTYPE.get(out.dtype)
    if library is None or source is None or dtype is None or not out.is_contiguous():
        return False
    threads = min(torch.get_num_threads(), out.numel() // _THREAD_ELEMENTS)
    library.blockwalk_decode(
        *(source.codec, source.half, dtype),
        *(source.scales, source.codes, source.row_bytes, source.row_scales),
        None if index is None else index.data_ptr(),
        *(start, out.shape[0], begin, end),
        *(out.data_ptr(), native_code.team(), threads),
    )
    return True


def _decode(
    kernels: Any,
    out: Tensor,
    buffer: Tensor,
    order: Tensor | None,
    rows: Tensor | None,
    codec: str,
    shape: list[int],
    group: int,
    first_row: int,
    first_column: int,
    key: list[int],
    origin: int,
    scale: float,
    kind: NoiseKind | None,
) -> None:
    layout = Layout(tuple(shape), Codec(codec), group_size=group, order=order)
    if kernels:
        arguments = (rows, first_row, first_column, received(key), origin, scale, kind)
        kernels.codecs.decode(out, buffer, layout, *arguments)
        return
    value = out if kind is None else torch.empty(out.shape)
    if rows is not None:
        gather_rows(buffer, layout, rows, value)
    else:
        columns = (first_column, first_column + out.shape[1])
        decode_rows(buffer, layout, first_row, first_row + len(out), value, columns=columns)
    if kind is not None:
        start = origin + first_row * layout.columns + first_column
        place = window(value, out, layout.columns, rows)
        cpu.write(Write(value, out, received(key), start, scale, kind, None, place, rows))


register("decode_", _decode, "out")

"""Products of bfloat16 matrices by a kernel of our own in C, on a processor that adds up pairs of
such numbers.

It is as fast as oneDNN's, takes any layout of the three matrices as it lies, and keeps nothing for
a shape: products need no tiles of a few fixed numbers of rows, nor rows of zeros that fill up the
last one. A sum's order depends on its length alone, so a row has its bits whatever lies beside it.

P rows, I summands, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockwalk.numerics import native
from blockwalk.numerics.scratch import shared_arena
from blockwalk.plan.sizes import UNTILED_ROWS

if TYPE_CHECKING:
    from blockwalk.numerics.codecs.codecs import NativeSource

WIDE = 32
"""Columns of the kernel's panel."""
_JOINT = 2
"""The kernel's JOINT: panels of columns in codes that are decoded at once."""
DECODED = _JOINT * WIDE
"""Columns in codes that are decoded at once."""
_CHUNK = 256
"""Rows of a task: enough that packing a panel costs little beside its products, few enough that
they stay in a core's cache."""
_TASKS = 4
"""Tasks of each thread, at least, where the rows are enough for them."""

_PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors whose data lie where they say."""


@functools.cache
def is_there() -> bool:
    """Return whether this machine has the kernel."""
    library = native.load("products")
    return library is not None and hasattr(library, "blockwalk_product")


def makes(dtype: torch.dtype) -> bool:
    """Return whether products of numbers of a processor in ``dtype`` are the kernel's."""
    return dtype == torch.bfloat16 and is_there()


def fits(a_PI: Tensor, b_IO: Tensor, out_PO: Tensor) -> bool:
    """Return whether the kernel is there and makes this product: of matrices with data in bfloat16,
    each row by row or column by column, and not of a few rows."""
    return takes(a_PI, out_PO) and _is_plain(b_IO) and 1 in b_IO.stride()


def takes(a_PI: Tensor, out_PO: Tensor) -> bool:
    """Return whether the kernel is there and makes products of this matrix with such results."""
    if not (_is_plain(a_PI) and _is_plain(out_PO)):
        return False
    lies_well = out_PO.stride(1) == 1 and 1 in a_PI.stride()
    # a few rows, as generation has, are soon multiplied; a sum over tokens is one of many lengths
    many = len(out_PO) > UNTILED_ROWS or a_PI.stride(1) != 1
    return lies_well and many and 0 not in a_PI.shape and not _is_watched()


def _is_watched() -> bool:
    """Return whether something watches torch's operations, a meter or a compiler: it is to see a
    product."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.compiler.is_compiling()


def _is_plain(matrix: Tensor) -> bool:
    return type(matrix) in _PLAIN and matrix.is_cpu and makes(matrix.dtype)


class _Encoded(ctypes.Structure):
    """The kernel's ``encoded_t``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("decode", "scales", "codes")),
        *((name, ctypes.c_int64) for name in ("row_bytes", "row_scales", "first_row")),
        *((name, ctypes.c_int) for name in ("codec", "half")),
    )


Thin = tuple[Tensor, Tensor]
"""Two matrices [P, R] and [R, O], the first by rows: their product goes into a larger one's
sums."""
_NO_THIN = (None, 0, None, 0, False, 0)


def product(
    a_PI: Tensor,
    b_IO: Tensor,
    out_PO: Tensor,
    bias_O: Tensor | None = None,
    *,
    alpha: float = 1.0,
    adds: bool = False,
    thin: Thin | None = None,
) -> None:
    """Write ``alpha``·a·b + bias into ``out_PO``, or add ``alpha``·a·b to it; ``thin``'s product is
    added to a·b."""
    chunks = -(-len(a_PI) // _CHUNK)
    run(a_PI, (*_placed(b_IO), None), out_PO, bias_O, thin, chunks, alpha=alpha, adds=adds)


def product_of_codes(
    a_PI: Tensor,
    source: NativeSource,
    first_row: int,
    out_PO: Tensor,
    bias_O: Tensor | None = None,
    *,
    by_rows: bool,
    thin: Thin | None = None,
) -> None:
    """Write a·Wᵀ + bias into ``out_PO``, or a·W where not ``by_rows``: W in codes, from its row
    ``first_row``, is decoded a panel at a time, and never whole. ``thin``'s product is added."""
    library = native.load("codecs")
    assert library is not None
    encoded = _Encoded(
        ctypes.cast(library.blockwalk_decode, ctypes.c_void_p).value,
        *(source.scales, source.codes, source.row_bytes, source.row_scales, first_row),
        *(source.codec, source.half),
    )
    run(a_PI, (None, 0, by_rows, ctypes.addressof(encoded)), out_PO, bias_O, thin, 1)


def run(
    a_PI: Tensor,
    b: tuple[int | None, int, bool, int | None],
    out_PO: Tensor,
    bias_O: Tensor | None,
    thin: Thin | None,
    chunks: int,
    *,
    alpha: float = 1.0,
    adds: bool = False,
) -> None:
    """Call the kernel on b as it takes one, with the rows in so many parts at least: what every
    product here comes to."""
    kernel = native.load("products")
    assert kernel is not None
    rows, inner = a_PI.shape
    columns = out_PO.shape[1]
    threads = torch.get_num_threads()
    _, _, turned, encoded = b
    at_once = WIDE if encoded is None or turned else DECODED
    if threads > 1:
        chunks = max(chunks, _TASKS * threads // -(-columns // at_once))
    chunk = -(-rows // (chunks * WIDE)) * WIDE
    bias_O = None if bias_O is None else bias_O.contiguous()
    units = (2 + _JOINT) * _units(inner)
    placed: tuple[object, ...] = _NO_THIN
    if thin is not None:
        thin_PR, thin_RO = thin
        rank = len(thin_RO)
        assert (thin_PR.shape, thin_PR.stride(1)) == ((rows, rank), 1), thin_PR.shape
        placed = (*_placed(thin_PR)[:2], *_placed(thin_RO), rank)
        units += _units(rank)
    scratch = shared_arena(a_PI.device).take("panels", threads, units, like=a_PI, dtype=torch.int32)
    kernel.blockwalk_product(
        *_placed(a_PI),
        *b,
        *placed,
        None if bias_O is None else bias_O.data_ptr(),
        *(out_PO.data_ptr(), out_PO.stride(0)),
        *(rows, inner, columns, chunk),
        *(scratch.data_ptr(), alpha, adds, native.team(), threads),
    )


def _units(inner: int) -> int:
    """Return the units of a panel of so many summands."""
    return (inner + 1) // 2 * WIDE


def _placed(matrix: Tensor) -> tuple[int, int, bool]:
    """Return a matrix's address, the elements from row to row as it lies, and whether those rows
    are its columns."""
    pitch, step = matrix.stride()
    return (matrix.data_ptr(), pitch, False) if step == 1 else (matrix.data_ptr(), step, True)

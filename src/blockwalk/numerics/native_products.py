"""Products of bfloat16 matrices by a kernel of our own in C, on a processor that adds up pairs of
such numbers.

It is as fast as oneDNN's, takes any layout of the three matrices as it lies, and keeps nothing for
a shape: products need no tiles of a few fixed numbers of rows, nor rows of zeros that fill up the
last one. A sum's order depends on its length alone, so a row has its bits whatever lies beside it.

P rows, I summands, O outputs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from blockwalk.numerics import native
from blockwalk.numerics.scratch import shared_arena
from blockwalk.plan.sizes import UNTILED_ROWS

_WIDE = 32
"""Columns of the kernel's panel."""
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
    each row by row or column by column, of more than a few rows."""
    matrices = (a_PI, b_IO, out_PO)
    if any(type(m) not in _PLAIN or not m.is_cpu or not makes(m.dtype) for m in matrices):
        return False
    lies_well = out_PO.stride(1) == 1 and 1 in a_PI.stride() and 1 in b_IO.stride()
    return lies_well and len(out_PO) > UNTILED_ROWS and 0 not in a_PI.shape


def product(
    a_PI: Tensor,
    b_IO: Tensor,
    out_PO: Tensor,
    bias_O: Tensor | None = None,
    *,
    alpha: float = 1.0,
    adds: bool = False,
) -> None:
    """Write ``alpha``·a·b + bias into ``out_PO``, or add ``alpha``·a·b to it."""
    kernel = native.load("products")
    assert kernel is not None
    rows, inner = a_PI.shape
    columns = b_IO.shape[1]
    assert (len(b_IO), out_PO.shape) == (inner, (rows, columns)), (a_PI.shape, b_IO.shape)
    threads = torch.get_num_threads()
    panels = -(-columns // _WIDE)
    chunks = max(-(-rows // _CHUNK), -(-_TASKS * threads // panels) if threads > 1 else 1)
    chunk = -(-rows // (chunks * _WIDE)) * _WIDE
    units = (inner + 1) // 2 * _WIDE
    scratch = shared_arena(a_PI.device).take(
        "panels", threads, 2 * units, like=a_PI, dtype=torch.int32
    )
    kernel.blockwalk_product(
        *_placed(a_PI),
        *_placed(b_IO),
        None if bias_O is None else bias_O.contiguous().data_ptr(),
        *(out_PO.data_ptr(), out_PO.stride(0)),
        *(rows, inner, columns, chunk),
        *(scratch.data_ptr(), alpha, adds, native.team(), threads),
    )


def _placed(matrix: Tensor) -> tuple[int, int, bool]:
    """Return a matrix's address, the elements from row to row as it lies, and whether those rows
    are its columns."""
    pitch, step = matrix.stride()
    return (matrix.data_ptr(), pitch, False) if step == 1 else (matrix.data_ptr(), step, True)

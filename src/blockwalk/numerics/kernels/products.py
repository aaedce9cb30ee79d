# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Products with an encoded matrix that is decoded a tile at a time, inside the product: x·Wᵀ
forward, and dy·W backward.

A tile's values are rounded to the input's dtype, as a decoded matrix is, and summed in float32:
results differ from the undivided product's by the order of a sum."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.kernels.codecs import FORMATS, _decoded, _decoded_tile, nf4_levels
from blockwalk.numerics.kernels.noise import _on

_TILE = {"M": 64, "N": 128, "K": 64}
"""Rows of the input, outputs, and summands of a program's tile."""

PRODUCT_OPTIONS = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}
"""Triton's options of a product. With its default of three stages nf4 asks for 160 to 192 KiB of
shared memory, which an RTX, an A10 or an L4 has not (99 KiB). Fusion is named since its default
changes from version to version."""


@triton.jit(do_not_specialize=["rows"])  # a matrix of one row has the same code
def _product_kernel(
    x,  # float [m, depth]
    buffer,  # uint8
    bias,  # float [n], or not read
    levels,
    out,  # float [m, n], rows out_stride elements apart
    m,
    n,
    depth,
    out_stride,
    rows,
    groups,
    width,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BY_ROWS: tl.constexpr,  # outputs are the matrix's rows (x·Wᵀ), or its columns (x·W)
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    program = tl.program_id(0)
    across = tl.cdiv(m, M)
    at_m = (program % across) * M + tl.arange(0, M)  # neighbours share a tile of the matrix
    at_n = (program // across) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    IN_PAIRS: tl.constexpr = FORMAT >= 2 and K % GROUP == 0 and N % GROUP == 0
    for start in range(0, depth, K):
        at_k = start + tl.arange(0, K)
        if (
            IN_PAIRS and BY_ROWS
        ):  # beyond the edges are numbers that nothing reads, or that x multiplies with zero
            row = tl.minimum(at_n, n - 1).to(tl.int64)
            w = tl.trans(
                _decoded_tile(
                    buffer, levels, row, start, rows.to(tl.int64), groups, FORMAT, GROUP, K
                )
            )
        elif IN_PAIRS:
            row = tl.minimum(at_k, depth - 1).to(tl.int64)
            w = _decoded_tile(
                buffer,
                levels,
                row,
                (program // across) * N,
                rows.to(tl.int64),
                groups,
                FORMAT,
                GROUP,
                N,
            )
        else:
            inside = (at_k < depth)[:, None] & (at_n < n)[None, :]
            near_k = tl.minimum(at_k, depth - 1).to(tl.int64)[:, None]
            near_n = tl.minimum(at_n, n - 1).to(tl.int64)[None, :]
            row = near_n + 0 * near_k if BY_ROWS else near_k + 0 * near_n
            column = near_k + 0 * near_n if BY_ROWS else near_n + 0 * near_k
            w = _decoded(
                buffer, levels, row, column, inside, rows.to(tl.int64), groups, width, FORMAT, GROUP
            )
            w = tl.where(inside, w, 0.0)
        w = w.to(x.dtype.element_ty)
        reads = (at_m < m)[:, None] & (at_k < depth)[None, :]
        places = at_m.to(tl.int64)[:, None] * depth + at_k[None, :]
        part = tl.load(x + places, mask=reads, other=0.0)
        total = tl.dot(part, w, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + at_n, mask=at_n < n, other=0.0).to(tl.float32)[None, :]
    writes = (at_m < m)[:, None] & (at_n < n)[None, :]
    outs = at_m.to(tl.int64)[:, None] * out_stride + at_n[None, :]
    tl.store(out + outs, total.to(out.dtype.element_ty), mask=writes)


def product(
    x_MK: Tensor,
    buffer: Tensor,
    layout: Layout,
    bias_N: Tensor | None,
    out_MN: Tensor,
    by_rows: bool,
) -> None:
    """Write x·Wᵀ + bias into ``out`` where ``by_rows``, else x·W, for W [R, D] encoded in
    ``buffer``, ``x`` contiguous."""
    m, depth = x_MK.shape
    n = out_MN.shape[1]
    with _on(x_MK):
        _product_kernel[(triton.cdiv(m, _TILE["M"]) * triton.cdiv(n, _TILE["N"]),)](
            x_MK,
            buffer,
            x_MK if bias_N is None else bias_N,
            nf4_levels(x_MK.device),
            out_MN,
            m,
            n,
            depth,
            out_MN.stride(0),
            layout.rows,
            layout.groups,
            layout.columns,
            FORMAT=FORMATS[layout.codec],
            GROUP=layout.group_size,
            BY_ROWS=by_rows,
            HAS_BIAS=bias_N is not None,
            **_TILE,
            **PRODUCT_OPTIONS,
        )

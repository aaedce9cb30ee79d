"""Products of 16-bit matrices with float32 results, on devices whose library writes those itself:
nothing is rounded to 16 bits on the way, and neither a copy in 16 bits nor a lift of it takes
memory or launches."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def has(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device makes such products of numbers of ``dtype``: a small one is tried, once a
    process."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    side = 16
    ones = torch.ones(side, side, dtype=dtype, device=device)
    sums = torch.ones(side, side, device=device)
    try:
        mm(ones, ones, sums)
        add_product(sums, ones, ones, 0.5)
        return bool((sums == 1.5 * side).all())
    # TypeError: torch 2.11 fails in what it tries in place of an operator that is not there
    except (RuntimeError, TypeError):
        return False


def mm(a_PI: Tensor, b_IO: Tensor, out_PO: Tensor) -> None:
    """Write a·b into ``out_PO``, float32."""
    torch.ops.aten.mm.dtype_out(a_PI, b_IO, torch.float32, out=out_PO)


def add_product(out_PO: Tensor, a_PI: Tensor, b_IO: Tensor, alpha: float = 1.0) -> None:
    """Add ``alpha``·a·b to ``out_PO``, float32."""
    torch.ops.aten.addmm.dtype_out(out_PO, a_PI, b_IO, torch.float32, alpha=alpha, out=out_PO)

"""Causal attention of 16-bit numbers on a processor that multiplies in float32: of copies of one
head at a time, where those of all would be most of a long sequence's memory.

B batch, H heads of queries, S sequence, F features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockwalk.numerics.attention_pieces import Pieces, by_pieces, of_heads

LEAST_BYTES = 32 << 20
"""Bytes of the float32 copy of all queries from which on attention goes by heads: below, one call
for all heads costs less."""


def goes_by_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether causal attention without a mask is computed here."""
    four = query.dim() == key.dim() == value.dim() == 4
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    return four and alike and 4 * query.numel() >= LEAST_BYTES


def by_heads(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return causal attention [B, H, S, F] of float32 copies, rounded once."""
    heads = of_heads(query, key, slice(0, query.shape[2]))
    return by_pieces(query, key, value, Pieces(heads, torch.float32, scale))

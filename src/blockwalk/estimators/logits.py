"""Next-token logits, a range of the vocabulary at a time: the head is never decoded whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from blockwalk.blocks import CutModel, Prologue
from blockwalk.state import Weight

CHUNK = 8192
"""Vocabulary rows of one range."""


@torch.no_grad()
def next_logits(
    cut: CutModel,
    prologue: Prologue,
    hidden_BSD: torch.Tensor,
    batch: Mapping[str, Any],
    head: Weight | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Logits after each sequence's last position, float32 [B, V]. Without ``head`` the model's own, of every position first."""
    if head is None:
        return cut.logits(prologue, hidden_BSD, batch)[:, -1].float()
    last_BD = cut.head_input(prologue, hidden_BSD, batch)[:, -1]
    return head_logits(last_BD, head, bias=bias, scale=cut.head.scale, soft_cap=cut.head.soft_cap)


@torch.no_grad()
def head_logits(
    hidden_ND: torch.Tensor,
    head: Weight,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """soft_cap·tanh(scale·(hidden·headᵀ + bias)/soft_cap), float32 [N, V]; without a cap scale·(hidden·headᵀ + bias).

    Args:
        hidden_ND: hidden states after the final norm, in the head's dtype.
        head: the output matrix [V, D].
    """
    vocab_size = head.shape[0]
    logits_NV = torch.empty(len(hidden_ND), vocab_size, dtype=torch.float32, device=hidden_ND.device)
    for start in range(0, vocab_size, CHUNK):
        stop = min(start + CHUNK, vocab_size)
        logits_NV[:, start:stop] = hidden_ND @ head.rows(start, stop).T
    if bias is not None:
        logits_NV += bias
    if scale != 1.0:
        logits_NV *= scale
    return logits_NV if soft_cap is None else (logits_NV / soft_cap).tanh_().mul_(soft_cap)

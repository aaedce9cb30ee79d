"""Oracle: ``F.scaled_dot_product_attention`` and autograd in float64. Attention of 16-bit numbers
goes by heads of float32 copies where all copies at once would be large, without our kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk.numerics import row_tiles, wide_attention
from blockwalk.walk.meter import Meter


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Queries of four heads, keys and values of two, as a model has them, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    return [
        torch.randn(2, 150, h, 16, generator=generator).to(dtype).transpose(1, 2) for h in heads
    ]


def attention(parts: list[Tensor]) -> list[Tensor]:
    """The answer, and the gradients of queries, keys and values."""
    *leaves, grad = (part.detach() for part in parts)
    for leaf in leaves:
        leaf.requires_grad_()
    with row_tiles.narrow_products(grad):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def test_attention_by_heads_has_float64s_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKWALK_NATIVE", "0")
    monkeypatch.setattr(row_tiles, "multiplied_in", lambda dtype: torch.float32)
    monkeypatch.setattr(wide_attention, "LEAST_BYTES", 0)
    parts = tensors(torch.bfloat16)
    exact = attention([part.double() for part in parts])
    with Meter() as meter:
        by_heads = attention(parts)
    for found, expected in zip(by_heads, exact, strict=True):
        error = float((found.double() - expected).norm() / expected.norm())
        assert error < 4e-3, error
        assert found.stride() == expected.stride()
    monkeypatch.setattr(wide_attention, "LEAST_BYTES", 1 << 40)
    with Meter() as at_once:
        together = attention(parts)
    assert torch.equal(by_heads[0], together[0])
    assert meter.peak < 0.7 * at_once.peak

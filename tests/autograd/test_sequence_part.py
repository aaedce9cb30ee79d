"""Oracle: attention of whole rows, of all heads at once, and its gradients by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.walk import context_check

B, S, D = 2, 24, 8


def windowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key > query - 7)


def grouped(heads: int, key_heads: int) -> nn.Module:
    module = nn.Module()
    module.num_key_value_groups = heads // key_heads  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(("heads", "key_heads", "count"), [(4, 4, 2), (4, 2, 2), (8, 4, 4)])
def test_attention_by_heads_has_the_bits_of_whole_rows(
    heads: int, key_heads: int, count: int
) -> None:
    torch.manual_seed(heads + count)
    shapes = [(B, heads, S, D), (B, key_heads, S, D), (B, key_heads, S, D)]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    seed_BSHD = torch.randn(B, S, heads, D)
    mask = RuleMask([(windowed, B)], [slice(0, S)], (0, S), "cpu")
    out_BSHD, _ = sdpa_attention_forward(grouped(heads, key_heads), *leaves, mask)  # type: ignore[arg-type]
    expected = torch.autograd.grad(out_BSHD, leaves, seed_BSHD)

    board = context_check._Board(count)
    batch = {"input_ids": torch.zeros(B, S, dtype=torch.long), "labels": torch.zeros(B, S)}
    answers: list[Any] = [None] * count

    def attend(number: int) -> None:
        part = board.part(batch, number, "heads")["part"]
        of_part = [torch.cat([leaf[:, :, t] for t in part.pieces], 2) for leaf in leaves]
        module = grouped(heads, key_heads)
        rule = part.mask(windowed, B, "cpu")
        answers[number], _ = part.attend(sdpa_attention_forward, module, *of_part, rule)

    board.run(attend)
    pieces = [board.part(batch, number, "heads")["part"].pieces for number in range(count)]
    places_S = torch.cat([torch.arange(S)[tokens] for of_part in pieces for tokens in of_part])
    of_parts = torch.cat(answers, 1)[:, places_S.argsort()]
    assert torch.equal(of_parts, out_BSHD)
    gradients = torch.autograd.grad(of_parts, leaves, seed_BSHD)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))

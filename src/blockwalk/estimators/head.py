"""Next-token logits, a range of the vocabulary at a time: the head is never decoded whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from blockwalk.cutting.anatomy import HeadSpec
from blockwalk.cutting.calls import Prologue
from blockwalk.cutting.cut_model import CutModel
from blockwalk.numerics.codecs.weights import JoinedWeight, Weight
from blockwalk.numerics.loss import head_logits

Matrix = Callable[[str], Weight]
"""A 2-D parameter by its canonical name, to be read a range at a time."""
Vector = Callable[[str | None], torch.Tensor | None]
"""A small parameter by its canonical name, whole."""


def factors(
    head: HeadSpec, hidden_XD: torch.Tensor, matrix: Matrix, vector: Vector
) -> tuple[torch.Tensor, Weight, torch.Tensor | None]:
    """Hidden states, matrix and bias whose product the logits are: what the head is given, and W. With a LoRA of factor s
    W·h + s·B·A·h is the product of [h, s·A·h] and [W, B]."""
    weight, bias = matrix(head.weight), vector(head.bias)
    if head.lora is None:
        return hidden_XD, weight, bias
    a, b, scale = head.lora
    a_RD = vector(a)
    assert a_RD is not None
    return torch.cat([hidden_XD, scale * (hidden_XD @ a_RD.T)], -1), JoinedWeight(weight, matrix(b)), bias


@torch.no_grad()
def next_logits(
    cut: CutModel,
    prologue: Prologue,
    hidden_BSD: torch.Tensor,
    batch: Mapping[str, Any],
    matrix: Matrix,
    vector: Vector,
    *,
    chunked: bool,
) -> torch.Tensor:
    """Logits after each sequence's last position, float32 [B, V]. Where they are not ``chunked`` the model's own, of every
    position first."""
    if not chunked:
        return cut.logits(prologue, hidden_BSD, batch)[:, -1].float()
    last_BD = cut.head_input(prologue, hidden_BSD, batch)[:, -1]
    hidden_BK, weight, bias = factors(cut.head, last_BD, matrix, vector)
    return head_logits(hidden_BK, weight, bias=bias, scale=cut.head.scale, soft_cap=cut.head.soft_cap)

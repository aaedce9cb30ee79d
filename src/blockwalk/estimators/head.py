"""The head without a graph: losses and next-token logits, a range of the vocabulary at a time where the loss is chunked. The
head is then never decoded whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blockwalk.cutting.anatomy import HeadSpec
from blockwalk.cutting.calls import Prologue
from blockwalk.cutting.cut_model import CutModel
from blockwalk.data.batching import row_losses
from blockwalk.estimators.asked import Asked
from blockwalk.numerics.codecs.weights import JoinedWeight, Weight
from blockwalk.numerics.loss import chunked_cross_entropy, head_logits
from blockwalk.numerics.scratch import ScratchArena

Matrix = Callable[[str], Weight]
"""A 2-D parameter by its canonical name, to be read a range at a time."""
Vector = Callable[[str | None], Tensor | None]
"""A small parameter by its canonical name, whole."""
OwnLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""A function of (logits [B, S, V], batch) that takes the place of the model's own loss."""


def factors(head: HeadSpec, hidden_XD: Tensor, matrix: Matrix, vector: Vector) -> tuple[Tensor, Weight, Tensor | None]:
    """Hidden states, matrix and bias whose product the logits are: what the head is given, and W. With a LoRA of factor s
    W·h + s·B·A·h is the product of [h, s·A·h] and [W, B]."""
    weight, bias = matrix(head.weight), vector(head.bias)
    if head.lora is None:
        return hidden_XD, weight, bias
    a, b, scale = head.lora
    a_RD = vector(a)
    assert a_RD is not None
    return torch.cat([hidden_XD, scale * (hidden_XD @ a_RD.T)], -1), JoinedWeight(weight, matrix(b)), bias


def own_loss(
    cut: CutModel,
    prologue: Prologue,
    hidden_BSD: Tensor,
    batch: Mapping[str, Tensor],
    objective: OwnLoss | None,
    seed: int | None = None,
) -> Tensor:
    """The model's own mean loss, or what an objective makes of its logits."""
    if objective is None:
        return cut.own_loss(prologue, hidden_BSD, batch, seed)
    return objective(cut.logits(prologue, hidden_BSD, batch, seed), batch)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one micro-batch's forward without a graph, and the parameters that the head reads."""

    cut: CutModel
    prologue: Prologue
    hidden_BSD: Tensor
    """The hidden state after the last block."""
    batch: Mapping[str, Any]
    labels_BS: Tensor
    """The batch's labels, on the CPU."""
    matrix: Matrix
    vector: Vector
    chunked: bool
    """True where the loss is Blockwalk's own; otherwise the model's, or the objective's."""
    objective: OwnLoss | None = None
    scratch: ScratchArena | None = None

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Logits after each sequence's last position, float32 [B, V]. Where they are not ``chunked`` the model's own, of every
        position first."""
        cut, given = self.cut, (self.prologue, self.hidden_BSD, self.batch)
        if not self.chunked:
            return cut.logits(*given)[:, -1].float()
        hidden_BK, weight, bias = factors(cut.head, cut.head_input(*given)[:, -1], self.matrix, self.vector)
        return head_logits(hidden_BK, weight, bias=bias, scale=cut.head.scale, soft_cap=cut.head.soft_cap)

    @torch.no_grad()
    def loss(self, *, by_row: bool) -> Tensor:
        """The loss: chunked its sum, float64 0-d; otherwise the model's own mean, or what the objective makes of the logits;
        ``by_row`` the sum over each sequence [B]."""
        cut, given = self.cut, (self.prologue, self.hidden_BSD, self.batch)
        if not self.chunked and by_row:
            return row_losses(cut.logits(*given), self.batch["labels"])
        if not self.chunked:
            return own_loss(cut, *given, self.objective)
        normed_BSD, weight, bias = factors(cut.head, cut.head_input(*given), self.matrix, self.vector)
        hidden_ND = normed_BSD[:, :-1].reshape(-1, normed_BSD.shape[-1])
        losses_N = hidden_ND.new_zeros(len(hidden_ND), dtype=torch.float64) if by_row else None
        result = chunked_cross_entropy(
            hidden_ND,
            self.labels_BS[:, 1:].reshape(-1),
            weight,
            grad_scale=None,
            bias=bias,
            scale=cut.head.scale,
            soft_cap=cut.head.soft_cap,
            losses_N=losses_N,
            scratch=self.scratch,
        )
        return result.loss_sum if losses_N is None else losses_N.view(len(normed_BSD), -1).sum(1)


@dataclass(slots=True)
class Answers:
    """The answers of an evaluation."""

    row_losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses [B] of the micro-batches, summed over each sequence, float64; over all in one where it is the model's own."""
    logits_BV: Tensor | None = None
    """Logits [B, V] after the last position, where ``next_token`` asks for them instead of a loss."""

    def take(self, ending: Ending, asked: Asked, micro_batch: int, counted: int) -> None:
        """Answer for one micro-batch, in which so many labels count."""
        if asked.next_token:
            self.logits_BV = ending.next_logits()
            return
        by_row = ending.chunked or asked.by_row
        value = ending.loss(by_row=by_row).double()
        if not by_row:  # the model's own is a mean over these, where there are any
            value = value.view(1) * counted if counted else value.new_zeros(1)
        self.row_losses[micro_batch] = value

"""The head without a graph: losses and next-token logits, a range of the vocabulary at a time where
the loss is chunked. The head is then never decoded whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk.cutting.anatomy import HeadSpec
from blockwalk.cutting.calls import Prologue
from blockwalk.cutting.cut_model import CutModel
from blockwalk.data.label_words import row_losses
from blockwalk.estimators.asked import Asked
from blockwalk.numerics.codecs.weights import DenseWeight, JoinedWeight, LowRankSum, Weight
from blockwalk.numerics.loss import chunked_losses, head_logits
from blockwalk.numerics.scratch import ScratchArena

Matrix = Callable[[str], Weight]
"""A 2-D parameter by its canonical name, to be read a range at a time."""
Vector = Callable[[str | None], Tensor | None]
"""A small parameter by its canonical name, whole."""
OwnLoss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""A function of (logits [B, S, V], batch) that takes the place of the model's own loss."""


Factors = tuple[Tensor, Weight, Tensor | None]
"""Hidden states, matrix and bias whose product the logits are."""


def factors(head: HeadSpec, hidden_XD: Tensor, matrix: Matrix, vector: Vector) -> Factors:
    """Return hidden states, matrix and bias whose product the logits are: what the head is given,
    and W. With a LoRA of factor s W·h + s·B·A·h is the product of [h, s·A·h] and [W, B]."""
    weight = matrix(head.weight)
    bias = vector(head.bias)
    if head.lora is None:
        return hidden_XD, weight, bias
    a, b, scale = head.lora
    a_RD = vector(a)
    assert a_RD is not None
    return (
        torch.cat([hidden_XD, scale * (hidden_XD @ a_RD.T)], -1),
        JoinedWeight(weight, matrix(b)),
        bias,
    )


def joined(of_passes: Mapping[int, Factors], count: int) -> Factors:
    """Return the factors of some of a step's ``count`` forwards as those of one batch, so that the
    W that they share is read once: where their heads are W + A·Bᵀ, the product of [h, h·B] and [W,
    A] with columns for each of the step's forwards."""
    hidden_XD, head, bias = next(iter(of_passes.values()))
    if not isinstance(head, LowRankSum):
        return torch.cat([hidden for hidden, _, _ in of_passes.values()]), head, bias
    rank = head.a_NR.shape[1]
    rows = []
    a_NK = head.a_NR.new_zeros(head.shape[0], count * rank)
    for p, (hidden_XD, each, _) in of_passes.items():
        assert isinstance(each, LowRankSum)
        a_NK[:, p * rank : (p + 1) * rank] = each.a_NR
        rows.append(
            torch.cat(
                [hidden_XD, F.pad(hidden_XD @ each.b_DR, (p * rank, (count - 1 - p) * rank))], -1
            )
        )
    return torch.cat(rows), JoinedWeight(head.base, DenseWeight(a_NK)), bias


def own_loss(
    cut: CutModel,
    prologue: Prologue,
    hidden_BSD: Tensor,
    batch: Mapping[str, Tensor],
    objective: OwnLoss | None,
    seed: int | None = None,
) -> Tensor:
    """Return the model's own mean loss, or what an objective makes of its logits."""
    if objective is None:
        return cut.own_loss(prologue, hidden_BSD, batch, seed)
    return objective(cut.logits(prologue, hidden_BSD, batch, seed), batch)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one micro-batch's forward without a graph, and the parameters that the head
    reads."""

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
        """Return logits after each sequence's last position, float32 [B, V]. Where they are not
        ``chunked`` the model's own, of every position first."""
        cut = self.cut
        given = (self.prologue, self.hidden_BSD, self.batch)
        if not self.chunked:
            return cut.logits(*given)[:, -1].float()
        hidden_BK, weight, bias = factors(
            cut.head, cut.head_input(*given)[:, -1], self.matrix, self.vector
        )
        return head_logits(
            hidden_BK, weight, bias=bias, scale=cut.head.scale, soft_cap=cut.head.soft_cap
        )

    @torch.no_grad()
    def loss(self, *, by_row: bool) -> Tensor:
        """Return the loss: chunked its sum, float64 0-d; otherwise the model's own mean, or what
        the objective makes of the logits; ``by_row`` the sum over each sequence [B]."""
        cut = self.cut
        given = (self.prologue, self.hidden_BSD, self.batch)
        if not self.chunked and by_row:
            return row_losses(cut.logits(*given), self.batch["labels"])
        if not self.chunked:
            return own_loss(cut, *given, self.objective)
        (losses_B,) = row_losses_of(cut.head, [(self.factors(), self.labels_BS)], self.scratch)
        return losses_B if by_row else losses_B.sum()

    @torch.no_grad()
    def factors(self) -> Factors:
        """Return hidden states [B, S, D], matrix and bias whose product the logits are: the last
        norm's part of the forward."""
        normed_BSD = self.cut.head_input(self.prologue, self.hidden_BSD, self.batch)
        return factors(self.cut.head, normed_BSD, self.matrix, self.vector)


def row_losses_of(
    head: HeadSpec, batches: Sequence[tuple[Factors, Tensor]], scratch: ScratchArena | None
) -> list[Tensor]:
    """Return the chunked losses of batches that share one matrix and bias, which is read once for
    all: the sum over each sequence, float64 [B], of each batch's factors and labels [B, S]."""
    _, weight, bias = batches[0][0]
    pairs = [
        (h_BSD[:, :-1].reshape(-1, h_BSD.shape[-1]), labels_BS[:, 1:].reshape(-1))
        for (h_BSD, *_), labels_BS in batches
    ]
    of_batches = chunked_losses(
        pairs, weight, bias=bias, scale=head.scale, soft_cap=head.soft_cap, scratch=scratch
    )
    return [
        each.view(len(labels_BS), -1).sum(1)
        for each, (_, labels_BS) in zip(of_batches, batches, strict=True)
    ]


@dataclass(slots=True)
class Answers:
    """The answers of an evaluation."""

    row_losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses [B] of the micro-batches, summed over each sequence, float64; over all in one where it
    is the model's own."""
    logits_BV: Tensor | None = None
    """Logits [B, V] after the last position, where ``next_token`` asks for them instead of a
    loss."""

    def take(self, ending: Ending, asked: Asked, micro_batch: int, counted: int) -> None:
        """Answer for one micro-batch, in which so many labels count."""
        if asked.next_token:
            self.logits_BV = ending.next_logits()
            return
        by_row = ending.chunked or asked.by_row
        if not by_row and not counted:  # a mean over nothing
            self.row_losses[micro_batch] = ending.hidden_BSD.new_zeros(1, dtype=torch.float64)
            return
        value = ending.loss(by_row=by_row).double()
        if not by_row:  # a mean over these
            value = value.view(1) * counted
        self.row_losses[micro_batch] = value

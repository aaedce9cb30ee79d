"""The end of a forward: what the head is given, and the logits after the last position, for which
the head is never decoded whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk.cutting.calls import Prologue
from blockwalk.cutting.cut_model import CutModel
from blockwalk.data.batch import loss_tokens
from blockwalk.numerics import sequence_tiles
from blockwalk.numerics.codecs.weights import DenseWeight, JoinedWeight, LowRankSum, Weight
from blockwalk.numerics.losses.head import head_logits
from blockwalk.numerics.scratch import ScratchArena

_OF_TOKENS = {"input_ids", "attention_mask", "position_ids", "labels", "part"}
"""The entries of a batch whose end may be computed by tiles."""
Matrix = Callable[[str], Weight]
"""A 2-D parameter by its canonical name, to be read a range at a time."""
Vector = Callable[[str | None], Tensor | None]
"""A small parameter by its canonical name, whole."""
Factors = tuple[Tensor, Weight, Tensor | None]
"""Hidden states, matrix and bias whose product the logits are."""


def joined(of_passes: Mapping[int, Factors], count: int) -> Factors:
    """Return the factors of some of a step's ``count`` forwards as those of one batch, so that the
    W that they share is read once: where their heads are W + A·Bᵀ, the product of [h, h·B] and [W,
    A] with columns for each of the step's forwards."""
    _, head, bias = next(iter(of_passes.values()))
    if not isinstance(head, LowRankSum):
        return torch.cat([hidden_XD for hidden_XD, _, _ in of_passes.values()]), head, bias
    rank = head.a_NR.shape[1]
    rows = []
    a_NK = head.a_NR.new_zeros(head.shape[0], count * rank)
    for p, (hidden_XD, weight, _) in of_passes.items():
        assert isinstance(weight, LowRankSum)
        a_NK[:, p * rank : (p + 1) * rank] = weight.a_NR
        low_XK = F.pad(hidden_XD @ weight.b_DR, (p * rank, (count - 1 - p) * rank))
        rows.append(torch.cat([hidden_XD, low_XK], -1))
    return torch.cat(rows), JoinedWeight(head.base, DenseWeight(a_NK)), bias


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one micro-batch's forward, and the parameters that the head reads."""

    cut: CutModel
    prologue: Prologue
    hidden_BSD: Tensor
    """The hidden state after the last block."""
    batch: Mapping[str, Any]
    labels_BS: Tensor
    """The labels of these positions and of the one after them, where there is one, on the CPU."""
    matrix: Matrix
    vector: Vector
    seed: int | None = None
    """The seed of what the model draws in its last part, in training."""
    scratch: ScratchArena | None = None
    tile: slice | None = None
    """The positions of the sequence that ``hidden_BSD`` holds; None: all."""

    def parts(self) -> list[Ending]:
        """Return the ends of the tiles of a long sequence; of others this one."""
        length = self.hidden_BSD.shape[1]
        size = self.cut.tile(length)
        if not size or not self.batch.keys() <= _OF_TOKENS:
            return [self]
        return [
            replace(
                self,
                hidden_BSD=self.hidden_BSD[:, tile],
                labels_BS=self.labels_BS[:, tile.start : tile.stop + 1],
                tile=tile,
            )
            for tile in sequence_tiles.tiles(length, size)
        ]

    @property
    def counted(self) -> int:
        """The labels that count."""
        return loss_tokens({"labels": self.labels_BS})

    def factors(self, *, last: bool = False) -> Factors:
        """Return hidden states, matrix and bias whose product the logits are: what the last norm
        answers, and W. With a LoRA of factor s W·h + s·B·A·h is the product of [h, s·A·h] and
        [W, B].

        Args:
            last: hidden states [B, D] of the last position, instead of all [B, S, D].
        """
        head = self.cut.head
        normed_BSD = self.cut.head_input(
            self.prologue, self.hidden_BSD, self.batch, self.seed, self.tile
        )
        normed_XD = normed_BSD[:, -1] if last else normed_BSD
        weight = self.matrix(head.weight)
        bias = self.vector(head.bias)
        if head.lora is None:
            return normed_XD, weight, bias
        a, b, scale = head.lora
        a_RD = self.vector(a)
        assert a_RD is not None
        low_XR = scale * (normed_XD @ a_RD.T)
        return torch.cat([normed_XD, low_XR], -1), JoinedWeight(weight, self.matrix(b)), bias

    def logits(self) -> Tensor:
        """Return the model's own logits [B, S, V]; the head must be bound."""
        return self.cut.logits(self.prologue, self.hidden_BSD, self.batch, self.seed)

    def own_loss(self) -> Tensor:
        """Return the model's own mean loss; the head must be bound."""
        return self.cut.own_loss(self.prologue, self.hidden_BSD, self.batch, self.seed)

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Return logits after each sequence's last position, float32 [B, V], from a part of the
        head at a time."""
        head = self.cut.head
        hidden_BK, weight, bias = self.factors(last=True)
        return head_logits(hidden_BK, weight, bias=bias, scale=head.scale, soft_cap=head.soft_cap)

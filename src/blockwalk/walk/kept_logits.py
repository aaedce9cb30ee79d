"""Logits of an evaluation, kept for whoever computes metrics of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from blockwalk.data.batch import Batch


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """A loss that keeps the logits it is asked about."""

    loss: Any
    """The :class:`~blockwalk.estimators.losses.Loss` that computes."""
    logits: list[Tensor] = field(default_factory=list)
    """Logits [B, S, V] of each part of a batch, float32 on the CPU."""

    @property
    def sums(self) -> bool:
        return bool(self.loss.sums)

    def forward(self, ending: Any, *, by_row: bool) -> Tensor:
        """Return the loss as it is without this, and keep the logits."""
        self.logits.append(ending.logits().float().cpu())
        losses: Tensor = self.loss.forward(ending, by_row=by_row)
        return losses


def evaluate_with_logits(walker: Any, batch: Batch) -> tuple[float, Tensor]:
    """Return the mean loss of a batch in evaluation mode, as :meth:`Walker.evaluate` has it, and
    the logits [b, S, V], float32 on the CPU, of the rows that this rank walked. Those of padding at
    a row's right end mean nothing."""
    parts = walker._share_to_evaluate(batch, 1, by_row=True)
    usual = walker._forward.loss
    kept = KeptLogits(usual)
    walker._forward.loss = kept
    try:
        losses = walker._evaluated(parts, 1)
    finally:
        walker._forward.loss = usual
    (logits_BSV,) = kept.logits
    lacks = batch["input_ids"].shape[1] - logits_BSV.shape[1]
    padded_BSV = F.pad(logits_BSV, (0, 0, 0, lacks))
    return math.fsum(losses) / max(parts.counts.tokens, 1), padded_BSV

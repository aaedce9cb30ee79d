"""Objectives of zeroth-order training: any number per batch, differentiable or not, that is smaller
where it is better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from blockwalk.data.label_words import LabelWordBatch
from blockwalk.data.metrics import macro_f1
from blockwalk.estimators.losses import Objective


def as_objective(function: Callable[[Tensor, Mapping[str, Tensor]], Any]) -> Objective:
    """Return a Python function of (logits [B, S, V], batch) that answers a number, as an
    objective."""

    def objective(logits_BSV: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.as_tensor(
            function(logits_BSV, batch), dtype=torch.float64, device=logits_BSV.device
        )

    return objective


def ranked(name: str, words: LabelWordBatch, row_losses: Tensor) -> float:
    """Return an objective over classification examples, from the loss of each label word (float64
    [B · C], on the CPU).

    ``label_words``: the mean cross-entropy among the label words by their scores; ``accuracy`` and
    ``f1`` (the mean over classes): one minus it."""
    if name == "label_words":
        return float(torch.nn.functional.cross_entropy(words.scores(row_losses), words.targets_B))
    if name == "accuracy":
        return 1.0 - words.correct(row_losses) / len(words.targets_B)
    chosen_B = words.scores(row_losses).argmax(1)
    return 1.0 - macro_f1(chosen_B.tolist(), words.targets_B.tolist(), words.classes)

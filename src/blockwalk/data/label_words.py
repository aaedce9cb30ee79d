"""Batches in which every example comes with every label word, and how the words are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockwalk.data.batch import Batch
from blockwalk.data.dataset import Choices
from blockwalk.data.row_batch import collate
from blockwalk.plan.losses import IGNORE


@dataclass(frozen=True)
class LabelWordBatch:
    """Examples with every label word, and their right classes: row ``b * C + c`` is example b with
    word c."""

    batch: Batch
    """Each tensor [B · C, S]; labels cover the label word alone."""
    targets_B: Tensor
    classes: int
    ranked_by: str = "mean"
    """mean or sum of the log-probabilities of a label word's tokens."""

    def scores(self, row_losses: Tensor) -> Tensor:
        """Return scores [B, C] that the label words are ranked by, from the loss summed over each
        row's label word, [B · C] on the CPU."""
        if self.ranked_by == "mean":
            row_losses = row_losses / (self.batch["labels"][:, 1:] != IGNORE).sum(1)
        return -row_losses.view(-1, self.classes)

    def correct(self, row_losses: Tensor) -> int:
        """Return the number of the B examples whose right class is ranked first."""
        return int((self.scores(row_losses).argmax(dim=1) == self.targets_B).sum())


def label_word_batch(
    choices: Choices, rows: Sequence[int], padding_multiple: int = 1, *, scores: str = "mean"
) -> LabelWordBatch:
    """Return the examples named, each with every label word; ``scores`` is
    ``data.label_scores``."""
    classes = choices.classes
    batch = collate(
        choices.rows, [row * classes + c for row in rows for c in range(classes)], padding_multiple
    )
    return LabelWordBatch(batch, torch.from_numpy(choices.targets[list(rows)]), classes, scores)


def row_losses(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return cross-entropy [B], summed over each row's learnt tokens, in float32."""
    before_BVS = logits_BSV[:, :-1].float().transpose(1, 2)
    labels_BS = labels_BS[:, 1:]
    losses_BS = torch.nn.functional.cross_entropy(
        before_BVS, labels_BS, ignore_index=IGNORE, reduction="none"
    )
    return losses_BS.sum(dim=1)

"""KTO's baseline: how far the policy is from its reference, over a step's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from blockwalk.data.batch import Batch
from blockwalk.data.dataset import Encoded
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.data.mismatched import answers_to_others
from blockwalk.data.row_batch import RowBatch
from blockwalk.plan.objectives import BASELINE, PREFIX
from blockwalk.walk.walker import Walker

OF_OTHERS = "reference_of_other_answers"
"""The number of a row that the reference answers of its prompt with another answer."""


def baseline_of(
    walker: Walker, dataset: Encoded, rows: Sequence[int], size: int, multiple: int
) -> float:
    """Return the mean log-ratio to the reference of answers to other prompts, over some rows, so
    many at a time; 0 where it is below."""
    ratios: list[float] = []
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        walked = RowBatch(answers_to_others(dataset, part), range(len(part)), multiple)
        losses = walker.label_losses(walked, packs=True).numpy()
        ratios += (-losses - dataset.numbers[OF_OTHERS][list(part)]).tolist()
    return max(0.0, math.fsum(ratios) / len(ratios))


def with_baseline(walker: Walker, batch: Batch | LabelWordBatch, multiple: int) -> Any:
    """Return a batch with the step's baseline, where the objective has one."""
    if not walker.plan.objective_facts.baseline:
        return batch
    assert isinstance(batch, RowBatch)
    size = -(-len(batch.rows) // walker.plan.gradient_accumulation_steps)
    value = baseline_of(walker, batch.dataset, batch.rows, size, multiple)
    baseline_R = torch.full((len(batch.rows),), value, dtype=torch.float64)
    return {**batch, f"{PREFIX}{BASELINE}": baseline_R}

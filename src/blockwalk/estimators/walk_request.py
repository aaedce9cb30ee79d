"""Requests: a walk computes a training step, losses, or next-token logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from blockwalk.data.batch import LearntCounts
from blockwalk.data.label_words import LabelWordBatch


@dataclass(frozen=True, slots=True)
class Step:
    """A training step."""

    number: int
    """Its number, from 1."""
    learning_rate: float = 0.0
    tokens: int | None = None
    """Labels that count in the global batch, where other ranks have parts of it."""
    seed: int | None = None
    """Zeroth order: the seed of this step's noise, where one is given."""
    words: LabelWordBatch | None = None
    """The examples that the batches' rows are, where the objective ranks label words."""
    counts: LearntCounts = field(default_factory=LearntCounts)
    """Counts of the global batch, where the plan's objective is a function of
    log-probabilities."""
    numbers: Sequence[Mapping[str, Tensor]] = ()
    """Numbers of each micro-batch's records, by name, for that objective; on the CPU."""

    def require_labels(self, counted: int) -> None:
        """Raise ValueError for a step in which no label counts."""
        if not counted:
            raise ValueError(
                "every label of this step is ignored (-100); check the data's completion or"
                " template settings"
            )


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of an evaluation, without a gradient."""

    by_row: bool = False
    """True for the loss of each sequence even where it would be the model's own of all."""
    sequences: int = 0
    """Sequences of a micro-batch, of which each has a loss even where they lie side by side; 0: a
    row's loss is that of all of its sequences."""


@dataclass(frozen=True, slots=True)
class NextLogits:
    """The logits after each sequence's last position."""

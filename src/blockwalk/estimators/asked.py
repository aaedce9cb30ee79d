"""The result that one walk should compute: a training step, losses, or next-token logits."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.data.label_words import LabelWordBatch


@dataclass(frozen=True, slots=True)
class Asked:
    """A step, or an evaluation of one micro-batch."""

    step: int
    """The number of the step, from 1; of an evaluation, that of the step to come."""
    learning_rate: float = 0.0
    training: bool = False
    """True for a step: keep what a backward walk needs, or perturb."""
    by_row: bool = False
    """Evaluation: the loss of each sequence even where it would be the model's own of all."""
    next_token: bool = False
    """Evaluation: the logits after the last position instead of a loss."""
    tokens: int | None = None
    """Labels that count in the global batch, where other ranks have parts of it."""
    seed: int | None = None
    """Zeroth order: the seed of this step's noise, where one is given."""
    words: LabelWordBatch | None = None
    """Zeroth order: the examples that the batches' rows are, where the objective ranks label
    words."""

    def require_labels(self, counted: int) -> None:
        """Raise ValueError for a step in which no label counts."""
        if self.training and not counted:
            raise ValueError(
                "every label of this step is ignored (-100); check the data's completion or"
                " template settings"
            )

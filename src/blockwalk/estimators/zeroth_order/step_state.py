"""The values that one zeroth-order step carries from op to op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.cutting.calls import Prologue
from blockwalk.data.batch import Batch
from blockwalk.estimators.head import Factors, Matrix, Vector
from blockwalk.estimators.walk_request import Step

PassKey = tuple[int, int]
"""A micro-batch and a forward pass of a step."""


@dataclass(slots=True)
class StepState:
    """Values of one step, by (micro-batch, forward pass)."""

    batches: Sequence[Batch]
    labels: Sequence[Tensor]
    """Labels of each micro-batch, on the CPU."""
    counted: tuple[int, ...]
    """Labels that count, of each micro-batch."""
    request: Step
    seed: int
    passes: tuple[tuple[int, float], ...]
    by_row: bool
    """Whether losses are of each sequence."""
    prologues: dict[PassKey, Prologue] = field(default_factory=dict)
    hidden: dict[PassKey, Tensor] = field(default_factory=dict)
    joined: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Arguments of blocks that go to several forwards at once, by the identities of those of
    each."""
    factors: dict[PassKey, Factors] = field(default_factory=dict)
    """Those of the head, of forwards whose losses are yet to be computed."""
    readers: dict[int, tuple[Matrix, Vector]] = field(default_factory=dict)
    """Functions that read the head's parameters in the forward pass that came last, for all
    micro-batches."""
    losses: dict[PassKey, Tensor] = field(default_factory=dict)
    """The answer of each forward, where it was computed: 0-d, a sum over tokens (chunked) or the
    model's or function's own mean; where losses are by row, one for each sequence."""
    entry: LedgerEntry | None = None

    @property
    def tokens(self) -> int:
        """Labels that count, of all micro-batches."""
        return sum(self.counted)

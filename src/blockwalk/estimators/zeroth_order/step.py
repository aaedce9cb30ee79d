"""One step of zeroth order: what goes from op to op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.cutting.calls import Prologue
from blockwalk.data.batch import Batch
from blockwalk.estimators.asked import Asked
from blockwalk.estimators.head import Factors, Matrix, Vector
from blockwalk.estimators.losses import Answers


@dataclass(slots=True)
class Step:
    """Values that one step carries from op to op, by (micro-batch, forward pass)."""

    batches: Sequence[Batch]
    labels: Sequence[Tensor]
    """Labels of each micro-batch, on the CPU."""
    counted: tuple[int, ...]
    """Labels that count, of each micro-batch."""
    asked: Asked
    seed: int
    passes: tuple[tuple[int, float], ...]
    by_row: bool
    """Whether losses are of each sequence."""
    prologues: dict[tuple[int, int], Prologue] = field(default_factory=dict)
    hidden: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    joined: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Arguments of blocks that go to several forwards at once, by the identities of those of
    each."""
    factors: dict[tuple[int, int], Factors] = field(default_factory=dict)
    """Those of the head, of forwards whose losses are yet to be computed."""
    readers: dict[int, tuple[Matrix, Vector]] = field(default_factory=dict)
    """Functions that read the head's parameters in the forward pass that came last, for all
    micro-batches."""
    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """The answer of each forward, where it was computed: 0-d, a sum over tokens or a mean over
    them, as the loss is; where losses are by row, one for each sequence."""
    entry: LedgerEntry | None = None
    answers: Answers = field(default_factory=Answers)
    """Those of an evaluation."""
    grad_norm: float | None = None
    """A zeroth-order step has none."""

    @property
    def tokens(self) -> int:
        return sum(self.counted)

    @property
    def loss(self) -> float:
        assert self.entry is not None
        return self.entry.loss

    @property
    def projected_grad(self) -> float:
        assert self.entry is not None
        return self.entry.projected_grad

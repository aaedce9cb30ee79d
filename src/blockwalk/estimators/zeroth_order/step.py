"""One step of zeroth order: its forwards, what goes from op to op, and what its losses are turned into."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from blockwalk.checkpoints.ledger import Entry
from blockwalk.cutting.calls import Prologue
from blockwalk.data.batching import LabelWordBatch
from blockwalk.plan.choices import ZerothOrderSettings
from blockwalk.plan.plan import Plan

Batch = Mapping[str, torch.Tensor]
IGNORE = -100

AT_REST = (0, 0.0)
"""The pass that sees the weights as they are."""


def passes_of(plan: Plan) -> tuple[tuple[int, float], ...]:
    """(query, sign) of each forward of a step, in the program's order."""
    queries = range(plan.zo.queries)
    match plan.zo.kind:
        case "spsa":
            return tuple((query, sign) for query in queries for sign in (1.0, -1.0))
        case "fzoo":
            return (AT_REST, *((query, 1.0) for query in queries))
        case _:
            return (AT_REST, *((query, sign) for query in queries for sign in (1.0, -1.0)))


@dataclass(slots=True)
class Step:
    """What one step carries from op to op, by (micro-batch, forward pass)."""

    batches: Sequence[Batch]
    labels: Sequence[torch.Tensor]
    """Of each micro-batch, on the CPU."""
    counted: tuple[int, ...]
    """Labels that count, of each micro-batch."""
    step: int
    seed: int
    learning_rate: float
    passes: tuple[tuple[int, float], ...]
    training: bool
    by_row: bool
    next_token: bool
    words: LabelWordBatch | None
    """The step's classification examples, where the objective ranks label words."""
    prologues: dict[tuple[int, int], Prologue] = field(default_factory=dict)
    hidden: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    losses: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """What each forward answered, where it was computed: 0-d, a sum over tokens (chunked) or the model's or function's own
    mean; where losses are by row, one for each sequence."""
    entry: Entry | None = None
    row_losses_B: torch.Tensor | None = None
    """Of an evaluation: the loss summed over each sequence, float64; over all in one where it is the model's own."""
    logits_BV: torch.Tensor | None = None
    """After the last position, where ``next_token`` asks for them."""
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


def scalars_of(zo: ZerothOrderSettings, losses: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The projected gradient of each query, and hizoo's curvatures, from the losses of a step's forwards in their order."""
    epsilon, queries = zo.epsilon, range(zo.queries)
    if zo.kind == "fzoo":
        base, *sided = losses
        sigma = statistics.pstdev(sided)
        return tuple((each - base) / sigma if sigma else 0.0 for each in sided), ()
    pairs = losses if zo.kind == "spsa" else losses[1:]
    grads = tuple((pairs[2 * i] - pairs[2 * i + 1]) / (2 * epsilon) for i in queries)
    if zo.kind == "spsa":
        return grads, ()
    bends = (math.fabs(pairs[2 * i] + pairs[2 * i + 1] - 2 * losses[0]) for i in queries)
    return grads, tuple(bend / (2 * epsilon**2) for bend in bends)

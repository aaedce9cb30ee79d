"""One-sided queries: gᵢ = (L(θ + ε·uᵢ) − L(θ)) / σ, where σ is the standard deviation of the
queries' losses.

Source: Dang et al., "FZOO: Fast Zeroth-Order Optimizer for Fine-Tuning Large Language Models
towards Adam-Scale Speed" (2025), as in their code."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from blockwalk.estimators.zeroth_order.kind import Kind, Numbers
from blockwalk.plan.choices import ZerothOrderSettings


def scalars(zo: ZerothOrderSettings, losses: Sequence[float]) -> tuple[Numbers, Numbers]:
    base, *sided = losses
    sigma = statistics.pstdev(sided)
    return tuple((loss - base) / sigma if sigma else 0.0 for loss in sided), ()


KIND = Kind(scalars)

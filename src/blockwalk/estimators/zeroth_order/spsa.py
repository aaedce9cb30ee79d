"""Two-point SPSA (MeZO): gᵢ = (L(θ + ε·zᵢ) − L(θ − ε·zᵢ)) / 2ε.

Source: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (NeurIPS 2023),
algorithms 1 and 2."""

from __future__ import annotations

from collections.abc import Sequence

from blockwalk.estimators.zeroth_order.kind import Kind, Numbers, slopes
from blockwalk.plan.choices import ZerothOrderSettings


def scalars(zo: ZerothOrderSettings, losses: Sequence[float]) -> tuple[Numbers, Numbers]:
    return slopes(zo, losses), ()


KIND = Kind(scalars)

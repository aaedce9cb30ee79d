"""Two-point SPSA along z/√H, with H the diagonal of the curvature, learned from hᵢ = |l₊ + l₋ −
2l₀| / 2ε².

    H ← (1 − α)·H + Σ (α·hᵢ/q)·zᵢ²·H, before a step's update, which is along zᵢ/√H with the new H

Source: Zhao et al., "Second-Order Fine-Tuning without Pain for LLMs: A Hessian Informed
Zeroth-Order Optimizer" (ICLR 2025), algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.estimators.zeroth_order.kind import Kind, Numbers, Take, slopes
from blockwalk.plan.choices import ZerothOrderSettings


def scalars(zo: ZerothOrderSettings, losses: Sequence[float]) -> tuple[Numbers, Numbers]:
    at_rest, *pairs = losses
    bends = (math.fabs(pairs[2 * i] + pairs[2 * i + 1] - 2 * at_rest) for i in range(zo.queries))
    return slopes(zo, pairs), tuple(bend / (2 * zo.epsilon**2) for bend in bends)


def direction_(z: Tensor, states: Mapping[str, Tensor], take: Take) -> None:
    """z ← z/√H."""
    z.div_(take("root").copy_(states["hessian"]).sqrt_())


def advance_(
    zo: ZerothOrderSettings,
    entry: LedgerEntry,
    noise: Iterable[Tensor],
    states: Mapping[str, Tensor],
    take: Take,
) -> None:
    """H ← (1 − α)·H + Σ (α·hᵢ/q)·zᵢ²·H."""
    hessian = states["hessian"]
    grown = take("grown").zero_()
    for z, curvature in zip(noise, entry.curvatures, strict=True):
        grown.add_(
            z.mul_(z).mul_(hessian).mul_(zo.hessian_alpha * curvature / len(entry.curvatures))
        )
    hessian.mul_(1.0 - zo.hessian_alpha).add_(grown)


KIND = Kind(scalars, direction_, advance_, ("z", "grown", "root"))

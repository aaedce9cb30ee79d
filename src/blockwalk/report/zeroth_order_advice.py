"""Advice before a run that has losses alone: how many steps, and which settings work."""

from __future__ import annotations

from typing import NamedTuple

from blockwalk.plan.choices import Adapters, LoraSettings, PrefixSettings
from blockwalk.plan.plan import Plan


class _Tuning(NamedTuple):
    """Settings that work, for one kind of trainables."""

    trained: str
    lowest_rate: float
    highest_rate: float
    epsilon: float


_TUNING = {
    type(None): _Tuning("full-parameter", 1e-7, 1e-6, 1e-3),
    LoraSettings: _Tuning("LoRA", 5e-5, 1e-4, 1e-2),
    PrefixSettings: _Tuning("prefix", 1e-3, 1e-2, 1e-1),
}
"""Learning rates and ε that work in zeroth order, by the type of the adapters' settings."""


def zeroth_order_advice(plan: Plan, adapters: Adapters | None) -> list[str]:
    """Return advice to a user before a zeroth-order run starts; none for other estimators.

    Source: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (NeurIPS 2023),
    appendix D."""
    if plan.estimator.facts.walks_back:
        return []
    full = isinstance(adapters, LoraSettings) and not adapters.target_modules
    tuning = _TUNING[type(None if full else adapters)]
    rate = plan.optimizer.learning_rate
    lines = [
        "zeroth order: forward passes only, no gradients; expect thousands of steps where"
        " backpropagation takes hundreds.",
        f"recommended for {tuning.trained} tuning: optimizer.learning_rate"
        f" {tuning.lowest_rate:g} to {tuning.highest_rate:g} with zo.epsilon {tuning.epsilon:g}",
    ]
    if not tuning.lowest_rate / 10 <= rate <= tuning.highest_rate * 10:
        lines.append(f"note: optimizer.learning_rate is {rate:g}, far outside of that range")
    if not tuning.epsilon / 10 <= plan.zo.epsilon <= tuning.epsilon * 10:
        lines.append(f"note: zo.epsilon is {plan.zo.epsilon:g}, far from {tuning.epsilon:g}")
    return lines

"""Zeroth-order steps with counter-based noise, whole model in memory: two-point SPSA, FZOO and
HiZOO.

Each function states one estimator's arithmetic in the order in which it is rounded. Masters are
float32; a forward sees ``float32(master) + float32(±ε)·z`` cast to the model's dtype, and the
master itself is never perturbed. Losses and what is made of them are float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from blockwalk.numerics.noise.key import NoiseKey, NoiseKind
from blockwalk.numerics.noise.noise import fill_
from blockwalk.reference.mezo import UNDECAYED, Batch, Loss, StepOf, own_loss, trainables

Masters = dict[str, Tensor]
Draw = Callable[[int, str], Tensor]
"""A query and a parameter's name to its z, float32: in place of a kind of noise."""


def masters_of(model: nn.Module) -> Masters:
    """Return float32 copies of the trainables by name."""
    return {name: p.detach().to(torch.float32, copy=True) for name, p in trainables(model)}


def _draws(masters: Masters, seed: int, step: int, kind: NoiseKind | Draw) -> Draw:
    """Return the z of a step."""

    def draw(query: int, name: str) -> Tensor:
        key = NoiseKey(seed, step, query, name)
        return (
            kind(query, name)
            if callable(kind)
            else fill_(torch.empty_like(masters[name]), key, kind=kind)
        )

    return draw


def _scalar(value: float) -> Tensor:
    """Return a float64 as the float32 that the arithmetic uses."""
    return torch.tensor(value, dtype=torch.float32)


def _loss(
    model: nn.Module, batch: Batch, loss: Loss, values: Iterable[tuple[str, Tensor]]
) -> float:
    """Return the loss where the model's parameters have these values, cast to its dtype."""
    named = dict(trainables(model))
    for name, value in values:
        named[name].data.copy_(value)
    model.eval()
    with torch.no_grad():
        return float(loss(model, batch))


def _moved(masters: Masters, scale: float, draw: Draw, query: int) -> Iterator[tuple[str, Tensor]]:
    """Yield θ + scale·z of each master, by name."""
    for name, master in masters.items():
        yield name, master + _scalar(scale) * draw(query, name)


def _descend_(
    masters: Masters, grads: Sequence[float], draw: Draw, learning_rate: float, decay: float = 0.0
) -> None:
    """θ ← θ − η·(1/q)·Σᵢ gᵢ·zᵢ, after the decay of those that are decayed."""
    for name, master in masters.items():
        if decay and not any(part in name for part in UNDECAYED):
            master.mul_(_scalar(1.0 - learning_rate * decay))
        for query, g in enumerate(grads):
            master += _scalar(-learning_rate * (g / len(grads))) * draw(query, name)


def spsa_step(
    model: nn.Module,
    masters: Masters,
    batch: Batch,
    *,
    step: int,
    seed: int,
    learning_rate: float,
    epsilon: float = 1e-3,
    queries: int = 1,
    weight_decay: float = 0.0,
    kind: NoiseKind | Draw = "gaussian",
    loss: Loss = own_loss,
) -> StepOf:
    """θ ← θ − η·(1/q)·Σᵢ gᵢ·zᵢ with gᵢ = (L(θ + ε·zᵢ) − L(θ − ε·zᵢ)) / 2ε; for q = 1, MeZO."""
    draw = _draws(masters, seed, step, kind)
    moves = [(query, sign * epsilon) for query in range(queries) for sign in (1.0, -1.0)]
    losses = [
        _loss(model, batch, loss, _moved(masters, scale, draw, query)) for query, scale in moves
    ]
    grads = tuple((losses[2 * i] - losses[2 * i + 1]) / (2 * epsilon) for i in range(queries))
    _descend_(masters, grads, draw, learning_rate, weight_decay)
    return StepOf(tuple(losses), grads, seed)


def fzoo_step(
    model: nn.Module,
    masters: Masters,
    batch: Batch,
    *,
    step: int,
    seed: int,
    learning_rate: float,
    epsilon: float = 1e-3,
    queries: int = 8,
    kind: NoiseKind = "rademacher",
    loss: Loss = own_loss,
) -> StepOf:
    """θ ← θ − η·(1/N)·Σᵢ gᵢ·uᵢ, gᵢ = (lᵢ − l₀)/σ, lᵢ = L(θ + ε·uᵢ), l₀ = L(θ).

    σ is the population standard deviation of the lᵢ.
    """
    at_rest = _loss(model, batch, loss, masters.items())
    draw = _draws(masters, seed, step, kind)
    losses = [
        _loss(model, batch, loss, _moved(masters, epsilon, draw, query)) for query in range(queries)
    ]
    sigma = statistics.pstdev(losses)
    grads = tuple((moved - at_rest) / sigma if sigma else 0.0 for moved in losses)
    _descend_(masters, grads, draw, learning_rate)
    return StepOf((at_rest, *losses), grads, seed)


def hizoo_step(
    model: nn.Module,
    masters: Masters,
    hessians: Masters,
    batch: Batch,
    *,
    step: int,
    seed: int,
    learning_rate: float,
    alpha: float,
    epsilon: float = 1e-3,
    loss: Loss = own_loss,
) -> StepOf:
    """H ← (1 − α)·H + α·h·H·z² with h = |l₊ + l₋ − 2l₀| / 2ε², then θ ← θ − η·g·z/√H with the new
    H.

    The losses l₊ and l₋ are those at θ ± ε·z/√H with the old H; g = (l₊ − l₋) / 2ε. H begins as
    ones."""

    draw = _draws(masters, seed, step, "gaussian")

    def shaped(query: int, name: str) -> Tensor:
        return draw(query, name) / hessians[name].sqrt()

    base = _loss(model, batch, loss, masters.items())
    plus, minus = (
        _loss(model, batch, loss, _moved(masters, sign * epsilon, shaped, 0))
        for sign in (1.0, -1.0)
    )
    g = (plus - minus) / (2 * epsilon)
    curvature = math.fabs(plus + minus - 2 * base) / (2 * epsilon**2)
    for name, master in masters.items():
        z = draw(0, name)
        hessian = hessians[name]
        grown = z * z * hessian * _scalar(alpha * curvature)
        hessian.mul_(_scalar(1.0 - alpha)).add_(grown)
        master += _scalar(-learning_rate * g) * (z / hessian.sqrt())
    return StepOf((base, plus, minus), (g,), seed)

"""Zeroth-order steps with counter-based noise, whole model in memory: two-point SPSA, FZOO and HiZOO.

Each function states one estimator's arithmetic in the order in which it is rounded. Masters are float32; a forward sees
``float32(master) + float32(±ε)·z`` cast to the model's dtype, and the master itself is never perturbed. Losses and what is
made of them are float64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from blockwalk.numerics.noise.key import NoiseKey, NoiseKind
from blockwalk.numerics.noise.noise import fill_
from blockwalk.reference.mezo import UNDECAYED, Batch, Loss, StepOf, own_loss, trainables

Masters = dict[str, torch.Tensor]


def masters_of(model: nn.Module) -> Masters:
    """Float32 copies of the trainables by name."""
    return {name: p.detach().to(torch.float32, copy=True) for name, p in trainables(model)}


def _noise(master: torch.Tensor, seed: int, step: int, query: int, name: str, kind: NoiseKind) -> torch.Tensor:
    return fill_(torch.empty_like(master), NoiseKey(seed, step, query, name), kind=kind)


def _scalar(value: float) -> torch.Tensor:
    """A float64 as the float32 that the arithmetic uses."""
    return torch.tensor(value, dtype=torch.float32)


@contextmanager
def _weights(model: nn.Module, values: Iterator[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Put values into the model's parameters, cast to its dtype."""
    named = dict(trainables(model))
    for name, value in values:
        named[name].data.copy_(value)
    model.eval()
    with torch.no_grad():
        yield


def _decay_(master: torch.Tensor, name: str, learning_rate: float, weight_decay: float) -> None:
    if weight_decay and not any(part in name for part in UNDECAYED):
        master.mul_(_scalar(1.0 - learning_rate * weight_decay))


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
    kind: NoiseKind = "gaussian",
    loss: Loss = own_loss,
) -> StepOf:
    """θ ← θ − η·(1/q)·Σᵢ gᵢ·zᵢ with gᵢ = (L(θ + ε·zᵢ) − L(θ − ε·zᵢ)) / 2ε; for q = 1, MeZO."""
    losses = []
    for query in range(queries):
        for sign in (1.0, -1.0):
            moved = (
                (name, master + _scalar(sign * epsilon) * _noise(master, seed, step, query, name, kind))
                for name, master in masters.items()
            )
            with _weights(model, moved):
                losses.append(float(loss(model, batch)))
    grads = tuple((losses[2 * i] - losses[2 * i + 1]) / (2 * epsilon) for i in range(queries))
    for name, master in masters.items():
        _decay_(master, name, learning_rate, weight_decay)
        for query, g in enumerate(grads):
            master += _scalar(-learning_rate * (g / queries)) * _noise(master, seed, step, query, name, kind)
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
    with _weights(model, iter(masters.items())):
        losses = [float(loss(model, batch))]
    for query in range(queries):
        moved = (
            (name, master + _scalar(epsilon) * _noise(master, seed, step, query, name, kind))
            for name, master in masters.items()
        )
        with _weights(model, moved):
            losses.append(float(loss(model, batch)))
    sigma = statistics.pstdev(losses[1:])
    grads = tuple((each - losses[0]) / sigma if sigma else 0.0 for each in losses[1:])
    for name, master in masters.items():
        for query, g in enumerate(grads):
            master += _scalar(-learning_rate * (g / queries)) * _noise(master, seed, step, query, name, kind)
    return StepOf(tuple(losses), grads, seed)


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
    """H ← (1 − α)·H + α·h·H·z² with h = |l₊ + l₋ − 2l₀| / 2ε², then θ ← θ − η·g·z/√H with the new H.

    The losses l₊ and l₋ are those at θ ± ε·z/√H with the old H; g = (l₊ − l₋) / 2ε. H begins as ones.
    """
    losses = []
    for sign in (0.0, 1.0, -1.0):
        moved = (
            (
                name,
                master
                + _scalar(sign * epsilon) * (_noise(master, seed, step, 0, name, "gaussian") / hessians[name].sqrt()),
            )
            for name, master in masters.items()
        )
        with _weights(model, moved if sign else iter(masters.items())):
            losses.append(float(loss(model, batch)))
    base, plus, minus = losses
    g = (plus - minus) / (2 * epsilon)
    curvature = math.fabs(plus + minus - 2 * base) / (2 * epsilon**2)
    for name, master in masters.items():
        z, hessian = _noise(master, seed, step, 0, name, "gaussian"), hessians[name]
        grown = z * z * hessian * _scalar(alpha * curvature)
        hessian.mul_(_scalar(1.0 - alpha)).add_(grown)
        master += _scalar(-learning_rate * g) * (z / hessian.sqrt())
    return StepOf(tuple(losses), (g,), seed)

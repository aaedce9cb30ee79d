"""MeZO as its authors' code computes it: whole model in memory, perturbed in place, one generator
for all parameters.

Source: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (NeurIPS 2023),
algorithm 1. The arithmetic and the order of the draws are repeated to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
"""A model and a batch to a scalar."""

UNDECAYED = ("bias", "layer_norm", "layernorm")
"""A parameter whose name contains one of these is exempt from weight decay."""


class StepOf(NamedTuple):
    """Losses and scalars of one reference step."""

    losses: tuple[float, ...]
    """Losses in the order of the forwards; the first is the one to report."""
    projected_grads: tuple[float, ...]
    seed: int


def trainables(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the trainable parameters in ``named_parameters()`` order, a tied one once."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's own mean loss."""
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def _perturb_(model: nn.Module, seed: int, scaling_factor: int, epsilon: float) -> None:
    torch.manual_seed(seed)
    for _, p in trainables(model):
        z = torch.normal(0.0, 1.0, size=p.shape, device=p.device, dtype=p.dtype)
        p.data = p.data + scaling_factor * z * epsilon


def mezo_step(
    model: nn.Module,
    batch: Batch,
    *,
    learning_rate: float,
    epsilon: float = 1e-3,
    weight_decay: float = 0.0,
    seed: int | None = None,
    loss: Loss = own_loss,
) -> StepOf:
    """Make one step of the original: three passes of perturbation, two forwards in evaluation mode,
    one pass of update."""
    seed = int(np.random.randint(1000000000)) if seed is None else seed
    model.eval()
    with torch.no_grad():
        _perturb_(model, seed, 1, epsilon)
        loss_plus = loss(model, batch)
        _perturb_(model, seed, -2, epsilon)
        loss_minus = loss(model, batch)
        _perturb_(model, seed, 1, epsilon)
        projected_grad = ((loss_plus - loss_minus) / (2 * epsilon)).item()
        torch.manual_seed(seed)
        for name, p in trainables(model):
            z = torch.normal(0.0, 1.0, size=p.shape, device=p.device, dtype=p.dtype)
            if any(part in name for part in UNDECAYED):
                p.data = p.data - learning_rate * (projected_grad * z)
            else:
                p.data = p.data - learning_rate * (projected_grad * z + weight_decay * p.data)
    return StepOf((float(loss_plus), float(loss_minus)), (projected_grad,), seed)

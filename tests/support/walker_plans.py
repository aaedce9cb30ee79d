"""Plans of first order, and the gradients that a model's own backward pass gives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def own_gradients(
    model: nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the model's own forward, by name."""
    model = copy.deepcopy(model).train()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


PLANS: dict[str, dict[str, Any]] = {
    "plain": {"name": "plain"},
    "recomputed": {"name": "plain", "recompute": "all"},
    "mapped": {"name": "mebp", "frozen": "disk × raw"},
    "mapped, host activations": {
        "name": "mebp",
        "frozen": "disk × raw",
        "activation": "host",
        "prefetch": 3,
    },
    "accumulated": {"name": "plain", "gradient_accumulation_steps": 2},
    "accumulated by block": {
        "name": "mebp",
        "frozen": "disk × raw",
        "gradient_accumulation_steps": 4,
        "together": 4,
    },
    "accumulated by threes": {
        "name": "mebp",
        "frozen": "disk × raw",
        "recompute": "auto",
        "gradient_accumulation_steps": 4,
        "together": 3,
    },
}

"""Weights that a zeroth-order walk trained, beside those of the reference loop."""

from __future__ import annotations

import torch
from torch import nn

from blockwalk.walk.walker import Walker

RATE = 3e-2


def trained(walker: Walker) -> dict[str, torch.Tensor]:
    """Every trainable as it stands on its tier."""
    walker.flush()
    weights = walker.engine.trained.weights()
    return {
        name: w.clone() if isinstance(w, torch.Tensor) else w.rows(0, w.shape[0]).clone()
        for name, w in weights.items()
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different, f"{len(different)} of {len(expected)} differ: {different[:4]}"


def names_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}

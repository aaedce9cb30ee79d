"""A small random instance of a configuration, on which the cutting of its models is tried."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.shrink import shrink
from blockwalk.numerics.drawing import DrawingFrom

SEED = 20_26
TOLERANCE = 1e-4
"""Largest relative difference (of norms) between the walk and the control, in float32."""


def small_instance(cls: Any, config: Any) -> Any:
    """Return a model of a class, with small dimensions and random parameters in float32, in
    evaluation mode."""
    with DrawingFrom(torch.Generator().manual_seed(SEED)):
        model = cls._from_config(shrink(config), dtype=torch.float32)
    _roughen(model)
    return model.eval()


def _roughen(model: nn.Module) -> None:
    """Spread every parameter, so that no gradient and no difference hides behind a zero or a
    one."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim >= 2:
                noise = torch.randn(param.shape, generator=generator)
                param.copy_(noise * 0.6 / param.shape[-1] ** 0.5)
            else:
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.1)


def small_batch(config: Any) -> dict[str, Tensor]:
    """Return two sequences of unequal length, right-padded, with labels: ``input_ids``,
    ``attention_mask``, ``labels`` [2, 11]."""
    vocab = config.get_text_config().vocab_size
    ids = torch.randint(3, vocab, (2, 11), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def difference(walked: Tensor, control: Tensor) -> float:
    """‖walked − control‖ / ‖control‖ in float64 (absolute where the control is zero)."""
    norm = float(control.double().norm())
    return float((walked.double() - control.double()).norm()) / (norm or 1.0)

"""What owners of a model in memory change on it. Not a test: no oracle."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 7


def embedding_class(model: Any) -> None:
    """Put an embedding of a class of its own in the model's place."""
    embedding = _Scaled(101, 32)
    embedding.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = embedding


def loss_function(model: Any) -> None:
    """Give the model a loss of its own: labels are smoothed."""
    model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), label_smoothing=0.3
    )


def scale_adapter(model: Any) -> None:
    """Scale every layer of an adapter by three."""
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)


def disable_adapter(model: Any) -> None:
    """Disable an adapter."""
    model.base_model.disable_adapter_layers()


def freeze_factors(model: Any) -> None:
    """Freeze the factors A of an adapter, as LoRA-FA does."""
    for name, param in model.named_parameters():
        if "lora_A" in name:
            param.requires_grad_(False)

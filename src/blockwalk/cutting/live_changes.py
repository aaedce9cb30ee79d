"""Changes that the owner of a model in memory made in its code: hooks, patched forwards, another
loss or head. The trials of a configuration's small instance say nothing of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from blockwalk.cutting.anatomy import Anatomy, canonical_name
from blockwalk.cutting.fused_chains import is_fused
from blockwalk.cutting.lora_forward import is_fused_lora

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def changed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have a hook or a forward of their own, with their names."""
    for name, module in model.named_modules():
        patched = "forward" in module.__dict__ and not (is_fused(module) or is_fused_lora(module))
        if patched or any(getattr(module, hooks) for hooks in _HOOKS):
            yield name, module


def of_live_model(model: nn.Module, base: Any, anatomy: Anatomy) -> Anatomy:
    """Return the anatomy of a model whose owner may have changed it: without what the trials of a
    small instance allow, where they do not speak for its code.

    Args:
        model: the model, or a ``PeftModel`` around it.
        base: the plain model in it.
        anatomy: that of its configuration.
    """
    adapters = tuple(getattr(model, "peft_config", ()))
    head = base.get_output_embeddings()
    ends = (model, getattr(model, "base_model", None), base, head)
    changed = dict(changed_modules(model))
    of_loss = any(module is end for module in changed.values() for end in ends)
    of_loss = of_loss or getattr(base, "_loss_function", None) is not None
    of_loss = of_loss or loss_type(base) != anatomy.loss_type
    of_loss = of_loss or head_class(base) != anatomy.head_class
    if of_loss:
        anatomy = replace(anatomy, head_custom=True)
    if not changed:
        return anatomy
    first = next(canonical_name(name, adapters) for name in changed)
    return replace(
        anatomy,
        unread=(),
        attended=(),
        by_tiles=(),
        against_tiles=f"{first or type(model).__name__} has a hook, or a forward of its own",
        joint_forwards=False,
        side_by_side=False,
    )


def loss_type(base: Any) -> str:
    """Return the name of the loss that transformers takes for a model."""
    return str(getattr(base, "loss_type", None))


def head_class(base: Any) -> str:
    """Return the name of the class of a model's output embedding, without an adapter's around
    it."""
    head = base.get_output_embeddings()
    return type(getattr(head, "base_layer", head)).__qualname__

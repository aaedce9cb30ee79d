"""What the loss needs to know of a model's output embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from blockwalk.anatomy import Anatomy


@dataclass(frozen=True)
class HeadSpec:
    """The output embedding: logits = soft_cap·tanh(scale·(W·h + b)/soft_cap), or without a cap scale·(W·h + b)."""

    weight: str
    """Canonical name of W [V, D]; the embedding's where the two are tied."""
    bias: str | None
    soft_cap: float | None
    scale: float
    tied: bool
    custom: bool
    """True where logits or loss are not of this form (verified with numbers): use ``own_loss`` and ``logits``."""
    lora: tuple[str, str, float] | None = None
    """Canonical names of A [R, D] and B [V, R] and the factor of B·A where the head carries a plain LoRA."""


def head_spec(model: Any, base: Any, anatomy: Anatomy, names: Mapping[int, str], tied_names: set[str]) -> HeadSpec:
    """Describe the head of ``base``, the plain model in ``model``.

    ``names`` are the canonical names by the ``id`` of the parameters that stand in the modules, ``tied_names`` those of
    parameters with two turns.
    """
    module = base.get_output_embeddings()
    if module is None:
        return HeadSpec("", None, None, 1.0, False, True)
    custom, lora = anatomy.head_custom, None
    if hasattr(module, "base_layer"):
        lora = _plain_lora(module, next(iter(model.peft_config)), names)
        custom = custom or lora is None
        module = module.base_layer
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning and config.peft_type.value != "PREFIX_TUNING":
            custom = True  # virtual tokens lengthen the sequence: only the wrapper knows how to pad the labels
    here = {leaf: names[id(param)] for leaf, param in module._parameters.items() if param is not None}
    weight = here.get("weight", "")
    custom = custom or not weight
    return HeadSpec(weight, here.get("bias"), anatomy.soft_cap, anatomy.scale, weight in tied_names, custom, lora)


def _plain_lora(module: Any, adapter: str, names: Mapping[int, str]) -> tuple[str, str, float] | None:
    """Names and factor of a plain LoRA on a linear head (no dropout, no bias, no variant), or None."""
    plain = (
        adapter in getattr(module, "lora_A", {})
        and isinstance(module.lora_dropout[adapter], nn.Identity)
        and not getattr(module, "lora_variant", {})
        and module.lora_B[adapter].bias is None
    )
    if not plain:
        return None
    a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    return names[id(a)], names[id(b)], float(module.scaling[adapter])

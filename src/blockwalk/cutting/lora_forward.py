"""The forward of LoRA and DoRA layers whose base weight is decoded, a range at a time, when it is
used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.anatomy import canonical_name
from blockwalk.numerics.codecs.weights import DenseWeight, LowRankSum, Weight
from blockwalk.numerics.lazy_linear import lora_linear, unread
from blockwalk.numerics.lazy_parameter import LazyParameter
from blockwalk.plan.sizes import DECODE_BYTES, spans


def weight_norms(weight: Weight, *, transposed: bool) -> Tensor:
    """Return the norms [N] of the rows of W [N, D] (transposed: of the columns of W [D, N]), a
    range at a time, in its dtype."""
    outputs, inputs = reversed(weight.shape) if transposed else weight.shape
    take = weight.columns if transposed else weight.rows
    outputs_at_once = max(1, DECODE_BYTES["cpu"] // (inputs * weight.dtype.itemsize))
    parts = (take(*span) for span in spans(0, outputs, outputs_at_once))
    return torch.cat([torch.linalg.vector_norm(part, dim=int(not transposed)) for part in parts])


def fuse(wrapped: Any) -> None:
    """Let LoRA and DoRA layers answer by :func:`lora_linear` where their base weight is decoded
    when it is used."""
    from peft.tuners.lora import Embedding, Linear

    for name, module in wrapped.named_modules():
        if isinstance(module, Embedding) and module.lora_variant:
            raise ValueError(
                f"use_dora reads all of {canonical_name(name)} at every step; leave it out of"
                " lora.target_modules"
            )
        if isinstance(module, Linear):
            module.__dict__["forward"] = functools.partial(_fused_forward, module, module.forward)


def unfuse(model: nn.Module) -> None:
    """Let LoRA layers answer by PEFT's own forward again: a compiler makes one graph of it for all
    layers, and one more for each function that is bound to a layer."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "func", None) is _fused_forward:
            del module.__dict__["forward"]


def _fused_forward(
    module: Any, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute PEFT's LoRA forward in fewer tensors; by PEFT's own wherever it is more than
    W·x + b + s·B·A·x with 16 or 32 bits alike.

    DoRA multiplies the product, without the bias, by magnitude / norm of W + s·B·A, which counts as
    a constant."""
    adapter = module.active_adapters[0]
    base = module.base_layer
    dora = module.use_dora.get(adapter, False)
    # the gradient of DoRA's magnitudes reads the product
    with unread(()) if dora else nullcontext():
        if args or kwargs or not _is_fusible(module, adapter, x.dtype):
            return original(x, *args, **kwargs)
        a_RD = module.lora_A[adapter].weight
        b_NR = module.lora_B[adapter].weight
        weight = (
            base.weight.weight
            if isinstance(base.weight, LazyParameter)
            else DenseWeight(base.weight.detach())
        )
        transposed = type(base).__name__ == "Conv1D"
        scaling = float(module.scaling[adapter])
        bias = None if dora else base.bias
        y = lora_linear(x, weight, bias, a_RD, b_NR, scaling, transposed=transposed)
    if not dora:
        return y
    inner = a_RD.detach().t()
    outer = scaling * b_NR.detach()
    factors = (inner, outer) if transposed else (outer, inner)
    norms_N = weight_norms(LowRankSum(weight, *factors), transposed=transposed)
    y = y * (module.lora_magnitude_vector[adapter].weight / norms_N)
    return y if base.bias is None else y + base.bias


def _is_fusible(module: Any, adapter: str, dtype: torch.dtype) -> bool:
    """Return whether a LoRA layer's forward is W·x + b + s·B·A·x, or DoRA's of it, in one dtype,
    and its base weight is decoded when it is used."""
    base = module.base_layer
    dora = module.use_dora.get(adapter, False)
    linear = type(base).__name__ == "Conv1D" or type(base).forward is nn.Linear.forward
    if not linear or not (dora or isinstance(base.weight, LazyParameter)):
        return False
    if module.disable_adapters or module.merged or (module.lora_variant and not dora):
        return False
    if adapter not in module.lora_A or not isinstance(module.lora_dropout[adapter], nn.Identity):
        return False
    factors = (module.lora_A[adapter], module.lora_B[adapter])
    if "forward" in factors[0].__dict__:  # it answers by part
        return False
    weights = [factor.weight for factor in factors]
    if factors[1].bias is not None or any(isinstance(weight, LazyParameter) for weight in weights):
        return False
    trains_bias = base.bias is not None and base.bias.requires_grad
    return {weights[0].dtype, base.weight.dtype} == {dtype} and not trains_bias

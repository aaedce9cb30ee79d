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
    if transposed:
        take, (inputs, outputs) = weight.columns, weight.shape
    else:
        take, (outputs, inputs) = weight.rows, weight.shape
    some = max(1, DECODE_BYTES["cpu"] // (inputs * weight.dtype.itemsize))
    parts = (take(*span) for span in spans(0, outputs, some))
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
    layers, where a function bound to each of them is another each."""
    for module in model.modules():
        if getattr(module.__dict__.get("forward"), "func", None) is _fused_forward:
            del module.__dict__["forward"]


def _fused_forward(
    module: Any, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """PEFT's LoRA forward in fewer tensors; its own wherever it is more than W·x + b + s·B·A·x with
    16 or 32 bits alike. DoRA multiplies the product, without the bias, by magnitude / norm of W +
    s·B·A, which counts as a constant."""
    adapter = module.active_adapters[0]
    base = module.base_layer
    dora = module.use_dora.get(adapter, False)
    keeps_in_out = type(base).__name__ == "Conv1D"
    linear = keeps_in_out or type(base).forward is nn.Linear.forward
    lazy = linear and (dora or isinstance(base.weight, LazyParameter)) and not args and not kwargs
    odd = module.disable_adapters or module.merged or (module.lora_variant and not dora)
    plain = (
        not odd and adapter in module.lora_A and "forward" not in module.lora_A[adapter].__dict__
    )  # answers by part
    with (
        unread(()) if dora else nullcontext()
    ):  # the gradient of DoRA's magnitudes reads the product
        if not lazy or not plain or not isinstance(module.lora_dropout[adapter], nn.Identity):
            return original(x, *args, **kwargs)
        a_RD = module.lora_A[adapter].weight
        b_NR = module.lora_B[adapter].weight
        odd = module.lora_B[adapter].bias is not None or any(
            isinstance(each, LazyParameter) for each in (a_RD, b_NR)
        )
        if (
            odd
            or {a_RD.dtype, base.weight.dtype} != {x.dtype}
            or (base.bias is not None and base.bias.requires_grad)
        ):
            return original(x)
        weight = (
            base.weight.weight
            if isinstance(base.weight, LazyParameter)
            else DenseWeight(base.weight.detach())
        )
        scaling = float(module.scaling[adapter])
        bias = None if dora else base.bias
        y = lora_linear(x, weight, bias, a_RD, b_NR, scaling, transposed=keeps_in_out)
    if not dora:
        return y
    left = a_RD.detach().t()
    right = scaling * b_NR.detach()
    norms_N = weight_norms(
        LowRankSum(weight, *((left, right) if keeps_in_out else (right, left))),
        transposed=keeps_in_out,
    )
    y = y * (module.lora_magnitude_vector[adapter].weight / norms_N)
    return y if base.bias is None else y + base.bias

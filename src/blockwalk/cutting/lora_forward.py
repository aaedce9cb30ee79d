"""The forward of LoRA and DoRA layers: in few calls of Python, and in few tensors where the base
weight is decoded, a range at a time, when it is used."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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


@dataclass(slots=True, eq=False)
class _Layer:
    """A LoRA layer of PEFT, and what its forward reads of it, looked up once: each look-up in a
    module is a few calls of Python, and a step runs every layer twice."""

    module: Any
    original: Callable[..., Any]
    """PEFT's own forward."""
    base: nn.Module
    adapter: str
    inner: nn.Module
    """The layer of A [R, D]."""
    outer: nn.Module
    """The layer of B [N, R]."""
    kind: _Kind
    transposed: bool
    """Whether the base layer keeps its weight as [in, out]."""


class _Kind(enum.Enum):
    """The form of a LoRA layer's forward."""

    SUM = enum.auto()
    """W·x + b + s·B·A·x."""
    DORA = enum.auto()
    """DoRA's of it."""
    OTHER = enum.auto()
    """A form that PEFT alone computes."""


def fuse(wrapped: Any) -> None:
    """Let LoRA and DoRA layers answer by :func:`lora_linear` where their base weight is decoded
    when it is used, and by the same operations as PEFT's own forward where it is a tensor."""
    from peft.tuners.lora import Embedding, Linear

    for name, module in wrapped.named_modules():
        if isinstance(module, Embedding) and module.lora_variant:
            raise ValueError(
                f"use_dora reads all of {canonical_name(name)} at every step; leave it out of"
                " lora.target_modules"
            )
        if isinstance(module, Linear) and _has_adapter(module) and not _has_own_code(module):
            module.__dict__["forward"] = functools.partial(_fused_forward, _layer(module))


def unfuse(model: nn.Module) -> None:
    """Let LoRA layers answer by PEFT's own forward again: a compiler makes one graph of it for all
    layers, and one more for each function that is bound to a layer."""
    for module in model.modules():
        if is_fused_lora(module):
            del module.__dict__["forward"]


def is_fused_lora(module: nn.Module) -> bool:
    """Return whether a module answers by a forward of :func:`fuse`."""
    return getattr(module.__dict__.get("forward"), "func", None) is _fused_forward


def _has_adapter(module: Any) -> bool:
    """Return whether one adapter is active, and a LoRA layer is one of its layers."""
    active = module.active_adapters
    return len(active) == 1 and active[0] in module.lora_A


def _has_own_code(module: nn.Module) -> bool:
    """Return whether a LoRA layer, or a module in it, has a hook or a forward of its own."""
    return any(
        "forward" in part.__dict__ or part._forward_hooks or part._forward_pre_hooks
        for part in module.modules()
    )


def _layer(module: Any) -> _Layer:
    adapter = module.active_adapters[0]
    base = module.base_layer
    transposed = type(base).__name__ == "Conv1D"
    return _Layer(
        module,
        module.forward,
        base,
        adapter,
        module.lora_A[adapter],
        module.lora_B[adapter],
        _kind_of(module, adapter),
        transposed,
    )


def _kind_of(module: Any, adapter: str) -> _Kind:
    base = module.base_layer
    is_linear = type(base).__name__ == "Conv1D" or type(base).forward is nn.Linear.forward
    dora = module.use_dora.get(adapter, False)
    drops = not isinstance(module.lora_dropout[adapter], nn.Identity)
    has_bias = module.lora_B[adapter].bias is not None
    parametrized = "weight" not in base._parameters
    if not is_linear or parametrized or drops or has_bias or (module.lora_variant and not dora):
        return _Kind.OTHER
    return _Kind.DORA if dora else _Kind.SUM


def _fused_forward(layer: _Layer, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute PEFT's LoRA forward in fewer tensors, or in fewer calls of Python; by PEFT's own
    wherever it is more than W·x + b + s·B·A·x with 16 or 32 bits alike.

    DoRA multiplies the product, without the bias, by magnitude / norm of W + s·B·A, which counts as
    a constant."""
    if layer.kind is _Kind.DORA:
        # the gradient of DoRA's magnitudes reads the product
        with unread(()):
            return _dora_forward(layer, x, *args, **kwargs)
    if args or kwargs or layer.kind is _Kind.OTHER or not _is_fusible(layer, x.dtype):
        return layer.original(x, *args, **kwargs)
    weight: Any = layer.base._parameters["weight"]
    bias = layer.base._parameters["bias"]
    a_RD: Any = layer.inner._parameters["weight"]
    b_NR: Any = layer.outer._parameters["weight"]
    scaling = layer.module.scaling[layer.adapter]
    if type(weight) is LazyParameter:
        if bias is not None and bias.requires_grad:
            return layer.original(x)
        transposed = layer.transposed
        return lora_linear(
            x, weight.weight, bias, a_RD, b_NR, float(scaling), transposed=transposed
        )
    if layer.transposed or _is_watched(layer.base):
        return layer.original(x)
    # PEFT's operations, one by one, so that the bits are its own
    return F.linear(x, weight, bias) + F.linear(F.linear(x, a_RD), b_NR) * scaling


def _dora_forward(layer: _Layer, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    base: Any = layer.base
    trains_bias = base.bias is not None and base.bias.requires_grad
    if args or kwargs or trains_bias or not _is_fusible(layer, x.dtype):
        return layer.original(x, *args, **kwargs)
    module = layer.module
    a_RD: Any = layer.inner.weight
    b_NR: Any = layer.outer.weight
    weight = (
        base.weight.weight
        if isinstance(base.weight, LazyParameter)
        else DenseWeight(base.weight.detach())
    )
    scaling = float(module.scaling[layer.adapter])
    transposed = layer.transposed
    y = lora_linear(x, weight, None, a_RD, b_NR, scaling, transposed=transposed)
    inner = a_RD.detach().t()
    outer = scaling * b_NR.detach()
    factors = (inner, outer) if transposed else (outer, inner)
    norms_N = weight_norms(LowRankSum(weight, *factors), transposed=transposed)
    y = y * (module.lora_magnitude_vector[layer.adapter].weight / norms_N)
    return y if base.bias is None else y + base.bias


def _is_fusible(layer: _Layer, dtype: torch.dtype) -> bool:
    """Return whether a layer computes with its adapter, all in one dtype, and nobody answers in the
    place of its parts."""
    module = layer.module
    if module._disable_adapters or module.merged_adapters:
        return False
    if "forward" in layer.inner.__dict__ or "forward" in layer.outer.__dict__:  # it answers by part
        return False
    a_RD: Any = layer.inner._parameters["weight"]
    b_NR: Any = layer.outer._parameters["weight"]
    if type(a_RD) is LazyParameter or type(b_NR) is LazyParameter:
        return False
    weight: Any = layer.base._parameters["weight"]
    # a lazy parameter answers in Python, by way of torch's functions
    weight_dtype = weight.weight.dtype if type(weight) is LazyParameter else weight.dtype
    return bool(a_RD.dtype == b_NR.dtype == weight_dtype == dtype)


def _is_watched(base: nn.Module) -> bool:
    """Return whether somebody else answers for a base layer, or is told of its calls."""
    return bool(base._forward_hooks or base._forward_pre_hooks or "forward" in base.__dict__)

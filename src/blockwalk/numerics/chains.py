"""Chains of element-wise operations on bfloat16 numbers, in one pass each on a processor: RMSNorm
as Llama's or Gemma's, rotary positions as Llama's, and products with a gate's silu or gelu.

A model's own code makes seven passes of a norm, five of rotary positions and two of a gate,
forward, and more backward; most write memory that nobody has touched, and a graph keeps what they
made in between: three tensors in float32 of a norm. Here a graph keeps the chain's inputs, and one
number a row.

P rows, B batch, H heads, S sequence, D features.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockwalk.numerics import native
from blockwalk.numerics.device import of_processor
from blockwalk.numerics.operators import LIBRARY

_NORM, _NORM_BACKWARD, _LESS_ONE, _LESS_ONE_BACKWARD = range(4)
_SILU, _SILU_BACKWARD, _GELU, _GELU_BACKWARD = range(4, 8)
"""The kernel's kinds."""

LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps, bool less_one) -> (Tensor, Tensor)")
LIBRARY.define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scales, bool less_one)"
    " -> Tensor"
)
LIBRARY.define("gated(Tensor gate, Tensor up, bool gelu) -> Tensor")
LIBRARY.define("gated_backward(Tensor grad, Tensor gate, Tensor up, bool gelu) -> (Tensor, Tensor)")
LIBRARY.define("rotary(Tensor x, Tensor cosine, Tensor sine, bool back) -> Tensor")


@functools.cache
def is_there() -> bool:
    """Return whether this machine has the kernel."""
    return native.load("chains") is not None


def fits(*tensors: Tensor) -> bool:
    """Return whether the kernel is there and takes these tensors."""
    return all(t.dtype == torch.bfloat16 and of_processor(t) for t in tensors) and is_there()


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / √(mean of its squares + eps), rounded, times the weight: of [..., D]. Gradients
    are rounded once where autograd rounds them."""
    out: Tensor = _Norm.apply(x, weight_D, eps, False)  # type: ignore[no-untyped-call]
    return out


def rms_norm_less_one(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / √(mean of its squares + eps) times one more than the weight, rounded at the
    end."""
    out: Tensor = _Norm.apply(x, weight_D, eps, True)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate), rounded, times ``up``, of one shape."""
    out: Tensor = _Gate.apply(gate, up, False)  # type: ignore[no-untyped-call]
    return out


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) by its approximation with tanh, rounded, times ``up``, of one shape."""
    out: Tensor = _Gate.apply(gate, up, True)  # type: ignore[no-untyped-call]
    return out


def rotary(x_BHSD: Tensor, cosine_BSD: Tensor, sine_BSD: Tensor) -> Tensor:
    """Return x·cosine + (−second half of x, first half)·sine; its features lie side by side, and
    their number is even."""
    out: Tensor = _Rotary.apply(x_BHSD, cosine_BSD, sine_BSD)  # type: ignore[no-untyped-call]
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return torch.ops.blockwalk.rotary(x, cosine, sine, False)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return torch.ops.blockwalk.rotary(grad, *ctx.saved_tensors, True), None, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, less_one: bool) -> Tensor:
        out, scales_P = torch.ops.blockwalk.rms_norm(
            x.contiguous(), weight_D.contiguous(), eps, less_one
        )
        ctx.save_for_backward(x, weight_D, scales_P)
        ctx.less_one = less_one
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, scales_P = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.blockwalk.rms_norm_backward(
                grad.contiguous(), x.contiguous(), weight_D.contiguous(), scales_P, ctx.less_one
            )
        if ctx.needs_input_grad[1]:
            normed = x * scales_P.view(*x.shape[:-1], 1)
            if not ctx.less_one:
                normed = normed.to(x.dtype)
            of_rows = (grad * normed).reshape(-1, x.shape[-1])
            grad_weight = of_rows.sum(0).to(weight_D.dtype)
        return grad_x, grad_weight, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return torch.ops.blockwalk.gated(gate, up, gelu)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grads = torch.ops.blockwalk.gated_backward(grad.contiguous(), gate, up, ctx.gelu)
        return (*grads, None)


def _run(
    kind: int,
    a: Tensor,
    b: Tensor,
    grad: Tensor | None,
    outs: tuple[Tensor, ...],
    scales_P: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    kernel = native.load("chains")
    assert kernel is not None
    width = a.shape[-1]
    rows = a.numel() // max(width, 1)
    pointers = (a, b, grad, outs[0], outs[1] if len(outs) > 1 else None, scales_P)
    kernel.blockwalk_chain(
        kind,
        *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
        *(rows, width, eps, native.team(), torch.get_num_threads()),
    )


def _rms_norm_empty(
    x: Tensor, _weight_D: Tensor, _eps: float, _less_one: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _rms_norm(x: Tensor, weight_D: Tensor, eps: float, less_one: bool) -> tuple[Tensor, Tensor]:
    out, scales_P = _rms_norm_empty(x, weight_D, eps, less_one)
    _run(_LESS_ONE if less_one else _NORM, x, weight_D, None, (out,), scales_P, eps)
    return out, scales_P


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, scales_P: Tensor, less_one: bool
) -> Tensor:
    grad_x = torch.empty_like(grad)
    kind = _LESS_ONE_BACKWARD if less_one else _NORM_BACKWARD
    _run(kind, x, weight_D, grad, (grad_x,), scales_P)
    return grad_x


def _gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    out = torch.empty_like(gate)
    _run(_GELU if gelu else _SILU, gate, up, None, (out,))
    return out


def _gated_backward_empty(
    _grad: Tensor, gate: Tensor, up: Tensor, _gelu: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    grads = _gated_backward_empty(grad, gate, up, gelu)
    _run(_GELU_BACKWARD if gelu else _SILU_BACKWARD, gate, up, grad, grads)
    return grads


def _rotary_empty(x_BHSD: Tensor, *_: Any) -> Tensor:
    batch, heads, tokens, width = x_BHSD.shape
    return x_BHSD.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _rotary(x_BHSD: Tensor, cosine_BSD: Tensor, sine_BSD: Tensor, back: bool) -> Tensor:
    out_BHSD = _rotary_empty(x_BHSD)
    kernel = native.load("chains")
    assert kernel is not None
    of_batch = (len(x_BHSD), -1, -1)
    cosine_BSD = cosine_BSD.expand(of_batch)
    sine_BSD = sine_BSD.expand(of_batch)
    strides = (
        *(*x_BHSD.stride()[:3], *out_BHSD.stride()[:3]),
        *(*cosine_BSD.stride()[:2], *sine_BSD.stride()[:2]),
    )
    kernel.blockwalk_rotary(
        *(tensor.data_ptr() for tensor in (x_BHSD, cosine_BSD, sine_BSD, out_BHSD)),
        (ctypes.c_int64 * len(strides))(*strides),
        *(*x_BHSD.shape, back, native.team(), torch.get_num_threads()),
    )
    return out_BHSD


LIBRARY.impl("rotary", _rotary, "CPU")
LIBRARY.impl("rotary", _rotary_empty, "Meta")
LIBRARY.impl("rms_norm", _rms_norm, "CPU")
LIBRARY.impl("rms_norm", _rms_norm_empty, "Meta")
LIBRARY.impl("rms_norm_backward", _rms_norm_backward, "CPU")
LIBRARY.impl("rms_norm_backward", lambda grad, *_: torch.empty_like(grad), "Meta")
LIBRARY.impl("gated", _gated, "CPU")
LIBRARY.impl("gated", lambda gate, *_: torch.empty_like(gate), "Meta")
LIBRARY.impl("gated_backward", _gated_backward, "CPU")
LIBRARY.impl("gated_backward", _gated_backward_empty, "Meta")

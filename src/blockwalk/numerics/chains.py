"""Chains of element-wise operations on bfloat16 numbers, in one pass each on a processor: RMSNorm
and rotary positions as Llama's, and SwiGLU.

A model's own code makes seven passes of a norm, five of rotary positions and two of SwiGLU,
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

_NORM, _NORM_BACKWARD, _GATE, _GATE_BACKWARD = range(4)
"""The kernel's kinds."""

LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
LIBRARY.define("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scales) -> Tensor")
LIBRARY.define("swiglu(Tensor gate, Tensor up) -> Tensor")
LIBRARY.define("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")
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
    out: Tensor = _Norm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate), rounded, times ``up``, of one shape."""
    out: Tensor = _Gate.apply(gate, up)  # type: ignore[no-untyped-call]
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
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out, scales_P = torch.ops.blockwalk.rms_norm(x.contiguous(), weight_D.contiguous(), eps)
        ctx.save_for_backward(x, weight_D, scales_P)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_D, scales_P = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.blockwalk.rms_norm_backward(
                grad.contiguous(), x.contiguous(), weight_D.contiguous(), scales_P
            )
        if ctx.needs_input_grad[1]:
            normed = (x * scales_P.view(*x.shape[:-1], 1)).to(x.dtype)
            grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
        return grad_x, grad_weight, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.ops.blockwalk.swiglu(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        return torch.ops.blockwalk.swiglu_backward(  # type: ignore[no-any-return]
            grad.contiguous(), gate, up
        )


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


def _rms_norm_empty(x: Tensor, _weight_D: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, scales_P = _rms_norm_empty(x, weight_D, eps)
    _run(_NORM, x, weight_D, None, (out,), scales_P, eps)
    return out, scales_P


def _rms_norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, scales_P: Tensor) -> Tensor:
    grad_x = torch.empty_like(grad)
    _run(_NORM_BACKWARD, x, weight_D, grad, (grad_x,), scales_P)
    return grad_x


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    _run(_GATE, gate, up, None, (out,))
    return out


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grads = (torch.empty_like(gate), torch.empty_like(up))
    _run(_GATE_BACKWARD, gate, up, grad, grads)
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
LIBRARY.impl("swiglu", _swiglu, "CPU")
LIBRARY.impl("swiglu", lambda gate, _: torch.empty_like(gate), "Meta")
LIBRARY.impl("swiglu_backward", _swiglu_backward, "CPU")
LIBRARY.impl("swiglu_backward", lambda _, *inputs: tuple(map(torch.empty_like, inputs)), "Meta")

"""Linear layers whose frozen weight is never whole: it is decoded a chunk at a time, forward and
backward.

Each chunk is a range of *output* features of the product at hand, so that a slice of the result is
complete in one matrix product: sums are never split over chunks. Forward, y = x·Wᵀ walks the rows
of W [N, D]; backward, dX = dY·W walks its columns. Nothing is saved for backward but the provider.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockwalk.numerics import native_products, row_tiles
from blockwalk.numerics.codecs.codecs import NativeSource, has_kernel
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import EncodedWeight, Experts, LowRankSum, Weight
from blockwalk.numerics.device import is_cpu, type_of
from blockwalk.numerics.fused_rows import fused_rows
from blockwalk.numerics.operators import register
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import DECODE_BYTES

_ALIGN = 64
"""Chunks are multiples of this many output features for each thread: narrower products are up to a
third slower."""


FUSED_ROWS = 128
"""Rows of the input up to which an accelerator decodes inside the product: a guess until it is
measured. Inside, the matrix is decoded anew for every 64 rows, in 8 to 10 instructions an element
on an H100 (14 to 20 on an RTX 4090) by the compiled kernels; before, it is decoded once, in 22 to
24, written and read once more. So counted, inside is the cheaper to beyond 512 rows on an H100. A
library's product keeps its units busier than ours does, by nobody knows how much, so the number is
low until then."""

_NOTHING = nullcontext()

_unread: ContextVar[tuple[Weight, ...]] = ContextVar("unread", default=())
"""Weights, by identity, whose products' values nobody reads for now: those of the thread that
recomputes, and of no other."""


@contextmanager
def unread(weights: Iterable[Weight]) -> Iterator[None]:
    """Let zeros stand for the products with these weights inside; their gradients are those of the
    products. :mod:`blockwalk.cutting.unread_outputs` tells which weights they may be."""
    token = _unread.set(tuple(weights))
    try:
        yield
    finally:
        _unread.reset(token)


def unread_now() -> tuple[Weight, ...]:
    """Return the weights for whose products zeros stand now."""
    return _unread.get()


def lazy_linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Return ``F.linear(x, W, bias)`` for a frozen W [N, D] that ``weight`` materialises a range at
    a time.

    Args:
        x: [..., D] in the weight's dtype.
        weight: the provider of W.
        bias: [N], may be trained.
        transposed: y = x·W instead of x·Wᵀ, for layers that keep W as [in, out] (D and N change
            places).

    Returns:
        [..., N]: ``F.linear`` on the decoded weight, and in backward its gradients with respect to
        ``x`` and ``bias``.
        Each sum is one product's, as in the undivided layer; its bits are the same wherever the
        processor's library adds up a product in the same order for every number of outputs. AVX512
        with oneDNN does for all but one to three rows of ``x``; AMX does not.
    """
    if isinstance(weight, LowRankSum):
        return lazy_linear_by_part(x, [weight], [bias], transposed=transposed)
    n_in, n_out = weight.shape if transposed else weight.shape[::-1]
    facts = (x.shape, x.dtype, weight.shape, weight.dtype)
    assert (x.shape[-1], x.dtype) == (n_in, weight.dtype), facts
    assert bias is None or (bias.shape, bias.dtype) == ((n_out,), x.dtype), (bias.shape, bias.dtype)
    return lora_linear(x, weight, bias, None, None, 1.0, transposed=transposed)


def lazy_linear_by_part(
    x: Tensor,
    weights: Sequence[LowRankSum | None],
    biases: Sequence[Tensor | None],
    *,
    transposed: bool = False,
) -> Tensor:
    """Return :func:`lazy_linear` of equal parts of ``x`` along its first dimension, each with a
    weight and a bias of its own, without a graph. The weights are one W, read once, and thin
    factors of each; None is W alone."""
    base = next(weight.base for weight in weights if weight is not None)
    y = lazy_linear(x, base, transposed=transposed)
    with torch._C.DisableTorchFunction():  # as below
        parts = zip(y.chunk(len(weights)), x.chunk(len(weights)), weights, biases, strict=True)
        for y_part, x_part, weight, bias in parts:
            if weight is not None:
                in_XR = weight.a_NR if transposed else weight.b_DR
                out_XR = weight.b_DR if transposed else weight.a_NR
                thin_PR = row_tiles.product(x_part.reshape(-1, x.shape[-1]), in_XR)
                out_PX = y_part.view(-1, y.shape[-1])
                row_tiles.add_product(out_PX, thin_PR, out_XR.t().contiguous())
            if bias is not None:
                y_part += bias
    return y


def lora_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    a_RD: Tensor | None,
    b_NR: Tensor | None,
    scaling: float,
    *,
    transposed: bool,
) -> Tensor:
    """Return ``lazy_linear(x, W, bias) + scaling·(x·Aᵀ)·Bᵀ``, the adapter's part added in place.

    PEFT's own forward makes three more tensors of the output's size for it, and keeps one for
    backward; here the largest tensors beside the output are [P, R]. Differs from it by the rounding
    of those intermediates.

    Args:
        x: [..., D] in the weight's dtype; ``a_RD`` and ``b_NR`` in the same dtype, or both None.
        weight, bias, transposed: as in :func:`lazy_linear`.
        scaling: PEFT's, α / R (or α / √R).
    """
    has_mode = torch._C._len_torch_function_stack() > 0
    # each operation within would ask the mode of row_tiles
    with torch._C.DisableTorchFunction() if has_mode else _NOTHING:
        if not torch.is_grad_enabled():
            thin = None if a_RD is None or b_NR is None else _thin(x, a_RD, b_NR, scaling)
            return _only_product(x, weight, bias, transposed=transposed, thin=thin)
        arguments = (x, a_RD, b_NR, bias, weight, scaling, transposed)
        y: Tensor = _LazyLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return y


def grouped_linear(
    x_SD: Tensor, experts: Experts, offs_E: Tensor, *, transposed: bool = False
) -> Tensor:
    """Return ``F.grouped_mm``: rows of ``x_SD`` [S, D], sorted by expert, each multiplied with its
    own expert's W [N, D] (transposed: as in :func:`lazy_linear`). ``offs_E`` says where each
    expert's rows end. On a processor an expert without a row is not read; an accelerator decodes a
    layer's experts in one launch, where they are few enough, and waits for ``offs_E`` no longer
    where torch has a grouped kernel for it (bfloat16 on CUDA).

    Returns:
        [S, N]; rows after the last expert's are as they came.
    """
    arguments = (x_SD, experts, offs_E, transposed)
    with torch._C.DisableTorchFunction():
        y: Tensor = _GroupedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, experts: Experts, offs_E: Tensor, transposed: bool
    ) -> Tensor:
        ctx.experts = experts
        ctx.offs_E = offs_E
        ctx.transposed = transposed
        return _grouped_product(x_SD, experts, offs_E, by_rows=not transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = _grouped_product(grad_y, ctx.experts, ctx.offs_E, by_rows=ctx.transposed)
        return grad_x, None, None, None


def _grouped_product(a_SI: Tensor, experts: Experts, offs_E: Tensor, *, by_rows: bool) -> Tensor:
    """Multiply each expert's rows of ``a_SI`` by its Wᵀ, or by its W."""
    weights_END = experts.whole()
    if weights_END is not None:
        matrices = weights_END.mT if by_rows else weights_END
        return F.grouped_mm(a_SI.contiguous(), matrices, offs=offs_E)
    out_SO = a_SI.new_empty(a_SI.shape[0], experts.shape[-2 if by_rows else -1])
    for expert, (start, stop) in enumerate(pairwise([0, *experts.ends(offs_E, a_SI.shape[0])])):
        if stop > start:
            weight = experts.expert(expert)
            out_SO[start:stop] = _product(a_SI[start:stop], weight, None, by_rows=by_rows)
    return out_SO


class _LazyLinear(torch.autograd.Function):
    """A product with a weight, and with an adapter's A and B where there are any.

    Every thin matrix lies row by row, [D, R] or [R, D], forward and backward: a processor's library
    keeps a program of half a megabyte for each shape and layout of a product. An accelerator
    multiplies the same layouts, so that its bits are those of the processor where it sums in the
    same order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a_RD: Tensor | None,
        b_NR: Tensor | None,
        bias: Tensor | None,
        weight: Weight,
        scaling: float,
        transposed: bool,
    ) -> Tensor:
        ctx.weight = weight
        ctx.scaling = scaling
        ctx.transposed = transposed
        thin = None
        if a_RD is not None and b_NR is not None:
            thin = _thin(x, a_RD, b_NR, scaling)
            ctx.save_for_backward(x, a_RD, b_NR, thin[0])
        return _only_product(x, weight, bias, transposed=transposed, thin=thin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grad_PN = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_a = grad_b = grad_bias = None
        thin = None
        if saved := ctx.saved_tensors:
            x, a_RD, b_NR, t_PR = saved
            grad_t_PR = row_tiles.product(grad_PN, b_NR).mul_(ctx.scaling)
            thin = (grad_t_PR, a_RD)
            if ctx.needs_input_grad[1]:
                grad_a = row_tiles.sum_of_outer(grad_t_PR, x.reshape(-1, x.shape[-1]))
            if ctx.needs_input_grad[2]:
                grad_b = row_tiles.sum_of_outer(t_PR, grad_PN).t().contiguous()
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad_y, ctx.weight, None, by_rows=ctx.transposed, thin=thin)
        if ctx.needs_input_grad[3]:
            grad_bias = grad_PN.sum(0)
        return grad_x, grad_a, grad_b, grad_bias, None, None, None


def _thin(x: Tensor, a_RD: Tensor, b_NR: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return scaling·x·Aᵀ [P, R] and Bᵀ [R, N], whose product an adapter adds."""
    t_PR = row_tiles.product(x.reshape(-1, x.shape[-1]), a_RD.t().contiguous())
    return t_PR.mul_(scaling), b_NR.t().contiguous()


def _only_product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    *,
    transposed: bool,
    thin: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the product without a graph, or the zeros that stand for it."""
    if any(weight is unused for unused in _unread.get()):
        return x.new_zeros(*x.shape[:-1], weight.shape[1 if transposed else 0])
    return _product(x, weight, bias, by_rows=not transposed, thin=thin)


def _product(
    a: Tensor,
    weight: Weight,
    bias: Tensor | None,
    *,
    by_rows: bool,
    thin: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return a·Wᵀ over chunks of W's rows, or a·W over chunks of its columns, written into slices
    of one new tensor; and with it the product of the matrices [P, R] and [R, O] of ``thin``."""
    n_in, n_out = weight.shape[::-1] if by_rows else weight.shape
    # An expanded gradient (that of a sum) would be copied again by each product.
    a_PI = a.reshape(-1, n_in).contiguous()
    # Not a view of it is what a layer gets: some (falcon) add to their products in place.
    out = a.new_empty(*a.shape[:-1], n_out)
    out_PO = out.view(a_PI.shape[0], n_out)
    is_narrow = row_tiles.narrow(a_PI)
    if (
        is_narrow
        and native_products.takes(a_PI, out_PO)
        and (source := _source(weight, by_rows=by_rows))
    ):
        native_products.product_of_codes(a_PI, *source, out_PO, bias, by_rows=by_rows, thin=thin)
        return out
    if (
        not is_cpu(a.device)
        and isinstance(weight, EncodedWeight)
        and has_kernel(weight.layout, weight.buffer)
        and weight.shape == weight.layout.shape  # not one of a layer's experts
        and a_PI.shape[0] <= fused_rows(weight.layout.codec, a.device, FUSED_ROWS)
        and weight.layout.order is None  # its rows lie in their order
    ):
        layout = weight.layout
        shape = weight.shape
        arguments = (a_PI, weight.buffer, bias, layout.codec, shape, layout.group_size, by_rows)
        torch.ops.blockwalk.product_(out_PO, *arguments)
    else:
        for start, stop in _chunks(n_in, n_out, a_PI):
            part_IO = weight.rows(start, stop).t() if by_rows else weight.columns(start, stop)
            part_O = None if bias is None else bias[start:stop]
            row_tiles.mm(a_PI, part_IO, out_PO[:, start:stop], part_O)
    if thin is not None:
        row_tiles.add_product(out_PO, *thin)
    return out


def _source(weight: Weight, *, by_rows: bool) -> tuple[NativeSource, int] | None:
    """Return what our kernel of products decodes a weight from, a panel at a time, and its first
    row. Groups wider than what it decodes at once would be decoded again for each part of their
    columns."""
    if not isinstance(weight, EncodedWeight):
        return None
    narrow = by_rows or weight.layout.group_size <= native_products.DECODED
    return weight.source() if narrow else None


def _multiply(
    kernels: Any,
    out_PO: Tensor,
    a_PI: Tensor,
    buffer: Tensor,
    bias: Tensor | None,
    codec: str,
    shape: list[int],
    group: int,
    by_rows: bool,
) -> None:
    layout = Layout((shape[0], shape[1]), Codec(codec), group_size=group)
    if kernels:
        kernels.products.product(a_PI, buffer, layout, bias, out_PO, by_rows)
        return
    weight_ND = EncodedWeight(buffer, layout, a_PI.dtype).rows(0, shape[0])
    row_tiles.mm(a_PI, weight_ND.t() if by_rows else weight_ND, out_PO, bias)


register("product_", _multiply, "out_PO")


def _chunks(n_in: int, n_out: int, a_PI: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the chunks of output features, each from its first to the one after its last."""
    device = type_of(a_PI)
    align = min(_ALIGN * torch.get_num_threads(), 1024) if device == "cpu" else _ALIGN
    return _chunks_of(n_in * a_PI.itemsize, n_out, align, DECODE_BYTES[device])


@lru_cache(1024)
def _chunks_of(
    feature_bytes: int, n_out: int, align: int, chunk_bytes: int
) -> tuple[tuple[int, int], ...]:
    """Return the chunks of output features of so many bytes each, in multiples of ``align``.

    Chunks are equal where up to half as many more make them so, and nearly equal elsewhere, so that
    a layer has few shapes of product (the BLAS plans each once, and keeps that) and none so narrow
    that another kernel, with another order of additions, would take it."""
    chunks = -(-n_out * feature_bytes // chunk_bytes)
    chunks = max(min(chunks, n_out // align), 1)
    chunks = next(
        (more for more in range(chunks, chunks + chunks // 2 + 1) if n_out % (more * align) == 0),
        chunks,
    )
    borders = [round(i * n_out / chunks / align) * align for i in range(chunks)] + [n_out]
    return tuple(pairwise(borders))

"""Products of 16-bit matrices on a processor: by our kernel, in tiles of a few fixed numbers of
rows, or in float32.

Where a processor adds up pairs of bfloat16 numbers a kernel of our own makes their products
(:mod:`blockwalk.numerics.native_products`), of any number of rows.

Elsewhere oneDNN compiles a program for every shape of a 16-bit product and keeps it: 0.3 to 0.6 MB
for each of a block's thirty products, and 3.4 MB more for attention's backward, at every new length
of a batch. There the rows of a product are split into tiles whose sizes come from one short list,
the last one filled up with zeros, so that no batch brings a new shape. Rows are independent of one
another in a product, so no sum is split; where the sum itself runs over the tokens, the tiles' sums
are added up in float32. Numbers in float32, and other devices, are left as they are: their
libraries keep nothing.

Most laptops' processors have no instructions for 16-bit products, and torch's own loops take 10 to
100 times as long as a library in float32. There every product, attention's too, is made of float32
copies, a part of the matrix at a time, and rounded once: a 16-bit product is added up in float32 as
well, so the numbers are as good."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from blockwalk.numerics import causal_attention, native_products
from blockwalk.numerics.device import of_processor
from blockwalk.numerics.wide_attention import by_heads, goes_by_heads
from blockwalk.plan.sizes import (
    ROW_TILE,
    UNTILED_ROWS,
    WIDENED_ROWS,
    multiplied_rows,
    spans,
    widened_columns,
)

_SIZES = (512, 256, ROW_TILE)
"""The numbers of rows that a product is made in."""
_NARROW = (torch.bfloat16, torch.float16)
_THIN_SIDE = 256
"""The most columns (or rows) that a matrix called thin has."""

# torch's own copy of what oneDNN keeps: half of the memory of a shape
os.environ.setdefault("LRU_CACHE_CAPACITY", "1")


@cache
def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that this processor multiplies numbers of ``dtype`` in: float32 where it has
    no instructions for 16 bits."""
    if dtype not in _NARROW:
        return dtype
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    library = torch.ops.mkldnn if available else None
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    is_supported = getattr(library, f"_is_mkldnn_{name}_supported", bool)
    return dtype if is_supported() else torch.float32


def narrow(tensor: Tensor) -> bool:
    """Whether products of this tensor are made as this module makes them: in 16 bits, on a
    processor."""
    return tensor.dtype in _NARROW and of_processor(tensor)


def keeps_shapes(tensor: Tensor) -> bool:
    """Return whether a product of this tensor costs memory for each new shape: a library makes it,
    in 16 bits."""
    by_library = narrow(tensor) and multiplied_in(tensor.dtype) == tensor.dtype
    return by_library and not native_products.makes(tensor.dtype)


def widened(tensor: Tensor) -> bool:
    """Whether products of this tensor are made of float32 copies."""
    return narrow(tensor) and multiplied_in(tensor.dtype) != tensor.dtype


def rows_of(tensor: Tensor, rows: int) -> int:
    """Return the number of rows that a matrix of ``tensor``'s kind has with its last tile filled
    up; one made so needs no copies."""
    tiled = keeps_shapes(tensor)
    return multiplied_rows(rows, tensor.itemsize, tensor.device.type) if tiled else rows


def mm(a_PI: Tensor, b_IO: Tensor, out_PO: Tensor, bias_O: Tensor | None = None) -> None:
    """Write a·b (+ bias) into ``out_PO``, all of one dtype."""
    if not narrow(a_PI):
        if bias_O is None:
            torch.mm(a_PI, b_IO, out=out_PO)
        else:
            torch.addmm(bias_O, a_PI, b_IO, out=out_PO)
        return
    if widened(a_PI):
        _in_float32(a_PI, b_IO, out_PO, bias_O)
        return
    if native_products.fits(a_PI, b_IO, out_PO):
        native_products.product(a_PI, b_IO, out_PO, bias_O)
        return
    for a_pI, out_pO in _tiles(a_PI, out_PO):
        if bias_O is None:
            torch.mm(a_pI, b_IO, out=out_pO)
        else:
            torch.addmm(bias_O, a_pI, b_IO, out=out_pO)


def product(a_PI: Tensor, b_IO: Tensor) -> Tensor:
    """a·b as a new tensor [P, O]."""
    if not narrow(a_PI):
        return torch.mm(a_PI, b_IO)
    out_PO = a_PI.new_empty(a_PI.shape[0], b_IO.shape[1])
    mm(a_PI, b_IO, out_PO)
    return out_PO


def add_product(out_PO: Tensor, a_PI: Tensor, b_IO: Tensor, alpha: float = 1.0) -> None:
    """Add ``alpha``·a·b to ``out_PO``."""
    if not narrow(a_PI):
        out_PO.addmm_(a_PI, b_IO, alpha=alpha)
        return
    if widened(a_PI):
        _in_float32(a_PI, b_IO, out_PO, out_PO, alpha)
        return
    if native_products.fits(a_PI, b_IO, out_PO):
        native_products.product(a_PI, b_IO, out_PO, alpha=alpha, adds=True)
        return
    for a_pI, out_pO in _tiles(a_PI, out_PO, reads=True):
        out_pO.addmm_(a_pI, b_IO, alpha=alpha)


def sum_of_outer(a_PI: Tensor, b_PO: Tensor) -> Tensor:
    """aᵀ·b, [I, O]: a sum over the rows, by tiles where one side is thin, over rows filled up with
    zeros elsewhere."""
    if not keeps_shapes(a_PI):
        return product(a_PI.t(), b_PO)
    if min(a_PI.shape[1], b_PO.shape[1]) > _THIN_SIDE:
        missing = filled(len(a_PI), a_PI.dtype) - len(a_PI)
        if missing:
            a_PI = F.pad(a_PI, (0, 0, 0, missing))
            b_PO = F.pad(b_PO, (0, 0, 0, missing))
        return a_PI.t() @ b_PO
    parts = [a_pI.t() @ b_pO for a_pI, b_pO in zip(_cut(a_PI), _cut(b_PO), strict=True)]
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts).sum(0, dtype=torch.float32).to(a_PI.dtype)


def _in_float32(
    a_PI: Tensor, b_IO: Tensor, out_PO: Tensor, onto: Tensor | None = None, alpha: float = 1.0
) -> None:
    """Write ``onto`` ([O], or ``out_PO`` itself) + ``alpha``·a·b into ``out_PO``, a part of b and
    of the rows at a time."""
    inner, columns = b_IO.shape
    for start, stop in spans(0, columns, widened_columns(inner)):
        b_Io = b_IO[:, start:stop].float()
        for top, bottom in spans(0, len(a_PI), WIDENED_ROWS):
            a_pI = a_PI[top:bottom].float()
            out_po = out_PO[top:bottom, start:stop]
            if onto is None:
                out_po.copy_(a_pI @ b_Io)
            else:
                addend = out_po if onto is out_PO else onto[start:stop]
                out_po.copy_(torch.addmm(addend.float(), a_pI, b_Io, alpha=alpha))


def _cut(a_PI: Tensor) -> Iterator[Tensor]:
    """Yield the tiles of a matrix, the last one filled up with zeros."""
    rows = a_PI.shape[0]
    for start, size in _spans(a_PI):
        tile_pI = a_PI if size == rows else a_PI[start : start + size]
        yield tile_pI if start + size <= rows else F.pad(tile_pI, (0, 0, 0, start + size - rows))


def filled(length: int, dtype: torch.dtype) -> int:
    """Return the number of tokens that a length is filled up to on a processor where it cannot be
    split."""
    step = 1 if multiplied_in(dtype) not in _NARROW else 128 if length <= 1024 else 256
    return length + -length % step


def _tiles(a_PI: Tensor, out_PO: Tensor, *, reads: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tiles to multiply from and into."""
    rows = a_PI.shape[0]
    for start, size in _spans(a_PI):
        if size == rows:
            yield a_PI, out_PO
        elif start + size <= rows:
            yield a_PI[start : start + size], out_PO[start : start + size]
        else:
            yield from _filled_up(a_PI[start:], out_PO[start:], size, reads=reads)


def _spans(a_PI: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the first row and the number of rows of each tile; the last one may reach beyond the
    matrix."""
    rows = a_PI.shape[0]
    return _split(rows) if rows > UNTILED_ROWS and keeps_shapes(a_PI) else ((0, rows),)


@lru_cache(4096)
def _split(rows: int) -> tuple[tuple[int, int], ...]:
    """Return spans of :data:`_SIZES`, the largest first, that cover so many rows."""
    tiles = []
    start = 0
    for size in _SIZES:
        while rows - start > size - ROW_TILE:
            tiles.append((start, size))
            start += size
    return tuple(tiles)


def _filled_up(
    a_pI: Tensor, out_pO: Tensor, size: int, *, reads: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a tile with rows of zeros at its end; what is written into its own rows reaches
    ``out_pO`` afterwards."""
    rows = len(a_pI)
    a_tI = a_pI.new_zeros(size, a_pI.shape[1])
    out_tO = out_pO.new_zeros(size, out_pO.shape[1])
    a_tI[:rows] = a_pI
    if reads:
        out_tO[:rows] = out_pO
    yield a_tI, out_tO
    out_pO.copy_(out_tO[:rows])


class _Linear(torch.autograd.Function):
    """``F.linear`` with a whole weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight_OI if of_x else None)
        ctx.shape = x.shape
        out = x.new_empty(*x.shape[:-1], weight_OI.shape[0])
        mm(x.reshape(-1, x.shape[-1]), weight_OI.t(), out.view(-1, out.shape[-1]), bias_O)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        grad_PO = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grad_PO, weight_OI).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = sum_of_outer(grad_PO, x.reshape(-1, x.shape[-1]))
        if ctx.needs_input_grad[2]:
            grad_bias = grad_PO.sum(0)
        return grad_x, grad_weight, grad_bias


def _plain(tensor: Tensor) -> bool:
    """Whether torch's functions are as they are for a tensor: for a parameter and one without data,
    and for no lazy matrix."""
    return (
        type(tensor) is Tensor
        or type(tensor).__torch_function__ is torch._C._disabled_torch_function_impl
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _plain(weight) or weight.dim() != 2 or x.dim() < 2:
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return ``F.scaled_dot_product_attention``: causal by a kernel of our own or by heads, others
    by torch's. A mask of a class of its own has an attention of its own."""
    if attn_mask is not None and not _plain(attn_mask):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    if not args and _is_causal_alone(query, key, attn_mask, kwargs):
        scale = kwargs.get("scale")
        if narrow(query) and causal_attention.fits(query, key, value):
            rows = causal_attention.rows(query)
            return causal_attention.attention(query, key, value, rows, scale)
        if widened(query) and goes_by_heads(query, key, value):
            return by_heads(query, key, value, scale)
    return _filled_up_attention(query, key, value, attn_mask, *args, **kwargs)


def _filled_up_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return torch's attention; of a sequence with itself, [..., S, D], filled up to one of few
    lengths.

    Nothing attends to what is appended: it comes after every query of a causal mask, and is masked
    in an explicit one. Its own queries attend to everything, which gives them numbers (never NaN);
    their outputs are cut off."""
    length = query.shape[-2]
    missing = filled(length, query.dtype) - length
    causal = kwargs.get("is_causal", args[1] if len(args) > 1 else False)
    if (
        not missing
        or length <= UNTILED_ROWS
        or key.shape[-2] != length
        or (attn_mask is None and not causal)
    ):
        out: Tensor = of_float32(
            F.scaled_dot_product_attention, query, key, value, attn_mask, *args, **kwargs
        )
        return out
    if attn_mask is not None:
        nothing = False if attn_mask.dtype == torch.bool else float("-inf")
        everything = True if attn_mask.dtype == torch.bool else 0.0
        attn_mask = F.pad(
            attn_mask.expand(*attn_mask.shape[:-1], length), (0, missing), value=nothing
        )
        if attn_mask.shape[-2] == length:
            attn_mask = F.pad(attn_mask, (0, 0, 0, missing), value=everything)
    query, key, value = (F.pad(rows, (0, 0, 0, missing)) for rows in (query, key, value))
    filled_up = F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    return filled_up[..., :length, :]


def _is_causal_alone(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, options: Mapping[str, Any]
) -> bool:
    """Return whether attention is causal, with neither mask nor dropout."""
    plain = attn_mask is None and not options.get("dropout_p")
    causal = bool(options.get("is_causal"))
    return plain and causal and query.shape[-2] == key.shape[-2]


def of_float32(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the answer of ``func``; where this processor multiplies in float32, made of float32
    copies and rounded."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    dtype = tensors[0].dtype
    if not widened(tensors[0]) or not all(map(_plain, tensors)):
        return func(*args, **kwargs)

    def widen(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == dtype else leaf

    return func(*tree_map(widen, args), **tree_map(widen, kwargs)).to(dtype)


class NarrowProducts(TorchFunctionMode):
    """A mode in which linear layers, attention and other products of 16 bits, of any module, are
    made as here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        other = _INSTEAD.get(func)
        if other is not None and isinstance(args[0] if args else None, Tensor) and narrow(args[0]):
            return other(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_PRODUCTS = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.baddbmm,
    torch.addmm,
    torch.mm,
)
_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.scaled_dot_product_attention: _attention,
    **{
        func: partial(of_float32, func)
        for func in (*_PRODUCTS, F.grouped_mm, torch._grouped_mm, F.conv1d)
    },
}


def narrow_products(tensor: Tensor) -> AbstractContextManager[object]:
    """Return the mode, where this tensor's products are made as here."""
    return NarrowProducts() if narrow(tensor) else nullcontext()

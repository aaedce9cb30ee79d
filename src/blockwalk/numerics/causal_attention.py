"""Causal attention of bfloat16 numbers on a processor, by a kernel of our own in C.

torch's computes the half of the pairs that the mask takes away, in backward all of it, and its
library keeps memory for each new length. Here documents of any lengths are attended to side by
side, each by itself, with sums in float32: nothing is filled up and nothing is copied whole.

B batch, H heads of queries, G of keys and values, S sequence, D features of a head.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockwalk.numerics import native
from blockwalk.numerics.operators import LIBRARY

Span = tuple[int, int, int]
"""A document: its row of the batch, its first token and the one after its last."""
PIECE = 256
"""Queries of a document that are one task of forward, in a head."""
_TILE = 64
_STEP = 16
"""The kernel's TILE and STEP."""

LIBRARY.define(
    "causal_attention(Tensor query, Tensor key, Tensor value, Tensor scratch, int[] spans,"
    " float scale) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "causal_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor log_sums, Tensor scratch, int[] spans, float scale) -> (Tensor, Tensor, Tensor)"
)


def is_there() -> bool:
    """Return whether this machine has the kernel."""
    return native.load("attention") is not None


def fits(query_BHSD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor) -> bool:
    """Return whether the kernel is there and computes attention of a sequence with itself of these
    tensors."""
    tensors = (query_BHSD, key_BGSD, value_BGSD)
    if any(t.dtype != torch.bfloat16 or t.device.type != "cpu" or t.dim() != 4 for t in tensors):
        return False
    batch, heads, tokens, width = query_BHSD.shape
    alike = key_BGSD.shape == value_BGSD.shape
    of_one = alike and (batch, tokens, width) == (key_BGSD.shape[0], *key_BGSD.shape[2:])
    return of_one and heads % key_BGSD.shape[1] == 0 and is_there()


def attention(
    query_BHSD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    spans: Sequence[Span],
    scale: float | None = None,
) -> Tensor:
    """Return attention [B, H, S, D] of documents' tokens to those up to themselves.

    Args:
        spans: the documents; each token is in one.
        scale: of the scores; 1 / √D unless told.
    """
    factor = 1 / math.sqrt(query_BHSD.shape[-1]) if scale is None else scale
    longest_first = sorted(spans, key=lambda span: span[1] - span[2])
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query_BHSD, key_BGSD, value_BGSD, longest_first, factor
    )
    return out


def rows(tensor_BHSD: Tensor) -> list[Span]:
    """Return each row of a batch as a document."""
    return [(row, 0, tensor_BHSD.shape[2]) for row in range(tensor_BHSD.shape[0])]


def pairs(spans: Sequence[int]) -> int:
    """Return pairs of tokens of a document, those under the mask too, of an operator's spans."""
    return sum((end - begin) ** 2 for begin, end in zip(spans[1::3], spans[2::3], strict=True))


class _Attention(torch.autograd.Function):
    """Keeps inputs and answer as they are, and the logarithm of each query's sum."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[Span], scale: float
    ) -> Tensor:
        query, key, value = (_with_features_together(t) for t in (query, key, value))
        flat = [number for span in spans for number in span]
        out, log_sums = torch.ops.blockwalk.causal_attention(
            query, key, value, _scratch(query, spans, is_backward=False), flat, scale
        )
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.spans = spans
        ctx.scale = scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        flat = [number for span in ctx.spans for number in span]
        grads = torch.ops.blockwalk.causal_attention_backward(
            *(_with_features_together(grad), query, key, value, out, log_sums),
            *(_scratch(query, ctx.spans, is_backward=True), flat, ctx.scale),
        )
        of_query, *of_shared = grads
        groups = key.shape[1]
        if groups < query.shape[1]:  # the heads that read the same keys lie side by side
            by_group = [part.transpose(1, 2).unflatten(2, (groups, -1)) for part in of_shared]
            of_shared = [part.sum(3).transpose(1, 2) for part in by_group]
        return of_query, *of_shared, None, None


def _with_features_together(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _pieces(spans: Sequence[Span], *, is_backward: bool) -> list[tuple[int, int, int, int]]:
    """Return tasks: the row, its document's first token, the first query, the one after the
    last."""
    if is_backward:
        return [(row, begin, begin, end) for row, begin, end in spans]
    pieces = [
        (row, begin, first, min(first + PIECE, end))
        for row, begin, end in spans
        for first in range(begin, end, PIECE)
    ]
    return sorted(pieces, key=lambda piece: piece[1] - piece[3])


def _threads(pieces: int, heads: int) -> int:
    return min(torch.get_num_threads(), pieces * heads)


def _scratch(query_BHSD: Tensor, spans: Sequence[Span], *, is_backward: bool) -> Tensor:
    """Return memory for the tiles of each thread, float32 [threads, floats]."""
    longest = max(end - begin for _, begin, end in spans)
    tokens = longest + -longest % _STEP
    width = query_BHSD.shape[-1]
    pitch = width + -width % _STEP
    if is_backward:
        floats = 3 * tokens * pitch + tokens + 5 * _TILE * pitch + 3 * _TILE**2
    else:
        floats = 2 * (tokens + _TILE) * pitch + 2 * _TILE * pitch + _TILE**2 + 2 * _TILE
    threads = _threads(len(_pieces(spans, is_backward=is_backward)), query_BHSD.shape[1])
    return query_BHSD.new_empty((threads, floats), dtype=torch.float32)


def _run(
    tensors: Sequence[Tensor],
    log_sums_BHS: Tensor,
    scratch: Tensor,
    spans: Sequence[int],
    scale: float,
    *,
    is_backward: bool,
) -> None:
    """Call the kernel on queries, keys, values, answers and, for backward, gradients."""
    kernel = native.load("attention")
    assert kernel is not None
    documents = list(zip(spans[::3], spans[1::3], spans[2::3], strict=True))
    pieces = _pieces(documents, is_backward=is_backward)
    query_BHSD, key_BGSD = tensors[:2]
    heads, tokens, width = query_BHSD.shape[1:]
    pointers = [tensor.data_ptr() for tensor in tensors]
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    numbers = [number for piece in pieces for number in piece]
    kernel.blockwalk_attention(
        (ctypes.c_void_p * len(pointers))(*pointers),
        (ctypes.c_int64 * len(strides))(*strides),
        (ctypes.c_int64 * len(numbers))(*numbers),
        len(pieces),
        *(heads, heads // key_BGSD.shape[1], width, tokens),
        log_sums_BHS.data_ptr(),
        scratch.data_ptr(),
        scratch.shape[1],
        scale,
        is_backward,
        native.team(),
        len(scratch),
    )


def _like_query(query_BHSD: Tensor) -> Tensor:
    """Return an empty tensor in the order of memory that models read: heads of a token together."""
    batch, heads, tokens, width = query_BHSD.shape
    return query_BHSD.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _empty_forward(query_BHSD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    log_sums_BHS = query_BHSD.new_empty(query_BHSD.shape[:3], dtype=torch.float32)
    return _like_query(query_BHSD), log_sums_BHS


def _empty_backward(_grad: Tensor, query_BHSD: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like_query(query_BHSD), _like_query(query_BHSD), _like_query(query_BHSD)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, scratch: Tensor, spans: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    out, log_sums = _empty_forward(query)
    _run((query, key, value, out), log_sums, scratch, spans, scale, is_backward=False)
    return out, log_sums


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scratch: Tensor,
    spans: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty_backward(grad, query)
    tensors = (query, key, value, out, grad, *grads)
    _run(tensors, log_sums, scratch, spans, scale, is_backward=True)
    return grads


LIBRARY.impl("causal_attention", _forward, "CPU")
LIBRARY.impl("causal_attention", _empty_forward, "Meta")
LIBRARY.impl("causal_attention_backward", _backward, "CPU")
LIBRARY.impl("causal_attention_backward", _empty_backward, "Meta")

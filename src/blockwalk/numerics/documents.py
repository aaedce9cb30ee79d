"""Attention of a packed row by its documents: each attends to itself alone, so that nothing is
computed of the pairs of tokens that a mask would take away, nor, where the mask is causal within a
document, of those above the diagonal.

S tokens of the row, n documents of one length L (in 16 bits filled up to one of few,
:mod:`blockwalk.numerics.row_tiles`), P tokens of all documents filled up, H heads, D features of a
head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from blockwalk.numerics.row_tiles import filled
from blockwalk.numerics.rule_mask import RuleMask


def by_document(
    position_ids_BS: Tensor | None, dtype: torch.dtype
) -> AbstractContextManager[object]:
    """Return the mode for blocks that compute in ``dtype`` on a batch of these positions: where it
    is one row of several documents, on a processor."""
    if position_ids_BS is None or len(position_ids_BS) > 1 or position_ids_BS.device.type != "cpu":
        return nullcontext()
    begins = (position_ids_BS[0] == 0).nonzero().view(-1).tolist()
    if len(begins) < 2 or begins[0]:
        return nullcontext()
    return ByDocument(list(pairwise([*begins, position_ids_BS.numel()])), dtype)


class ByDocument(TorchFunctionMode):
    """A mode in which ``F.scaled_dot_product_attention`` of a row with itself, [1, H, S, D] under a
    boolean mask [1, 1, S, S], is computed by documents, those of one length together.

    Args:
        spans: each document's first token and the one after its last, side by side; each token of
            padding is one.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        self._tokens = spans[-1][1]
        by_length: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for begin, end in spans:
            length = filled(end - begin, dtype) if end - begin > 1 else 1
            by_length[length].append((begin, end))
        self._groups = [_places(documents, length) for length, documents in by_length.items()]
        self._row_places_P = torch.cat([index_nL.view(-1) for index_nL, _ in self._groups])
        real_P = torch.cat([real_nL.view(-1) for _, real_nL in self._groups])
        self._filling = (~real_P).nonzero().view(-1)
        places_S = real_P.nonzero().view(-1)
        self._group_places_S = torch.empty_like(places_S)
        self._group_places_S[self._row_places_P[real_P]] = places_S
        self._masks: dict[tuple[int, tuple[int, ...]], tuple[Tensor, list[Tensor | None]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        of_row = len(query) == 1 and query.shape[-2] == key.shape[-2] == self._tokens and not args
        sides = (1, 1, self._tokens, self._tokens)
        of_mask = None if attn_mask is None else (attn_mask.dtype, attn_mask.shape)
        if not of_row or attn_mask is None or of_mask != (torch.bool, sides):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        documents = map(self._documents, (query, key, value))
        groups = zip(*documents, self._masks_of(attn_mask), strict=True)
        outs = []
        for q_nHLD, k_nHLD, v_nHLD, mask in groups:
            kwargs["is_causal"] = mask is None
            kwargs["enable_gqa"] = q_nHLD.shape[1] != k_nHLD.shape[1]
            out_nHLD = F.scaled_dot_product_attention(q_nHLD, k_nHLD, v_nHLD, mask, **kwargs)
            outs.append(out_nHLD.transpose(1, 2).flatten(0, 1))
        out_SHD = _gathered(
            torch.cat(outs), self._group_places_S, self._row_places_P, self._filling
        )
        return out_SHD.transpose(0, 1)[None]

    def _documents(self, row_1HSD: Tensor) -> list[Tensor]:
        """Return the documents of each group, [n, H, L, D]."""
        row_SHD = row_1HSD[0].transpose(0, 1)
        rows_PHD = _gathered(row_SHD, self._row_places_P, self._group_places_S, self._filling[:0])
        parts = torch.split(rows_PHD, [index_nL.numel() for index_nL, _ in self._groups])
        return [
            part_pHD.view(*index_nL.shape, *part_pHD.shape[1:]).transpose(1, 2)
            for part_pHD, (index_nL, _) in zip(parts, self._groups, strict=True)
        ]

    def _masks_of(self, mask_11SS: Tensor) -> list[Tensor | None]:
        """Return the mask of each group's documents, [n, 1, L, L]; None where it is the causal
        one."""
        rule = isinstance(mask_11SS, RuleMask)
        place = (id(mask_11SS), ()) if rule else (mask_11SS.data_ptr(), mask_11SS.stride())
        if place not in self._masks:
            masks: list[Tensor | None] = []
            for index_nL, real_nL in self._groups:
                mask_nLL = (
                    mask_11SS.among(index_nL)
                    if isinstance(mask_11SS, RuleMask)
                    else mask_11SS[0, 0][index_nL[:, :, None], index_nL[:, None, :]]
                )
                mask_nLL = mask_nLL & real_nL[:, None, :]
                causal_nLL = torch.ones_like(mask_nLL).tril_()
                causal = torch.equal(mask_nLL[real_nL], causal_nLL[real_nL])
                masks.append(None if causal else mask_nLL[:, None])
            self._masks[place] = mask_11SS, masks
        return self._masks[place][1]


def _places(spans: list[tuple[int, int]], length: int) -> tuple[Tensor, Tensor]:
    """Return places [n, L] in the row of documents' tokens, after the end the last token's again,
    and which are the document's own."""
    begins_n1, ends_n1 = (torch.tensor(bounds)[:, None] for bounds in zip(*spans, strict=True))
    index_nL = begins_n1 + torch.arange(length)
    return index_nL.minimum(ends_n1 - 1), index_nL < ends_n1


class _Gathered(torch.autograd.Function):
    """``x[index]``; its gradient is ``grad[back]``, and 0 at the rows of x that nothing reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, unread: Tensor) -> Tensor:
        ctx.back = back
        ctx.unread = unread
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.back).index_fill_(0, ctx.unread, 0), None, None, None


def _gathered(x: Tensor, index: Tensor, back: Tensor, unread: Tensor) -> Tensor:
    out: Tensor = _Gathered.apply(x, index, back, unread)  # type: ignore[no-untyped-call]
    return out

"""Attention of a packed row by its documents: each attends to itself alone, so that nothing is
computed of the pairs of tokens that a mask would take away, nor, where the mask is causal within a
document, of those above the diagonal. Documents of a short row go together, those of one length at
a time; a long row's one after the other, where copies of them all would be large.

S tokens of the row, n documents of one length L (in 16 bits filled up to one of few,
:mod:`blockwalk.numerics.row_tiles`), P tokens of all documents filled up, H heads, D features of a
head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from blockwalk.numerics import causal_attention
from blockwalk.numerics.attention_pieces import Piece, Pieces, by_pieces, of_heads
from blockwalk.numerics.row_tiles import filled, narrow, widened
from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.plan.sizes import LONG_ROW


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
        self._spans = spans
        self._dtype = dtype
        self._tokens = spans[-1][1]
        self._masks: dict[tuple[int, tuple[int, ...]], tuple[Tensor, list[Tensor | None]]] = {}
        self._causal: dict[int, tuple[RuleMask, bool]] = {}

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
        plain = narrow(query) and not kwargs.get("dropout_p")
        by_kernel = plain and causal_attention.fits(query, key, value)
        if by_kernel and self._is_causal(attn_mask):
            spans = [(0, begin, end) for begin, end in self._spans]
            return causal_attention.attention(query, key, value, spans, kwargs.get("scale"))
        if isinstance(attn_mask, RuleMask) and self._tokens > LONG_ROW:
            return self._one_by_one(query, key, value, attn_mask, **kwargs)
        documents = map(self._documents, (query, key, value))
        groups = zip(*documents, self._masks_of(attn_mask), strict=True)
        outs = []
        for q_nHLD, k_nHLD, v_nHLD, mask in groups:
            kwargs["is_causal"] = mask is None
            kwargs["enable_gqa"] = q_nHLD.shape[1] != k_nHLD.shape[1]
            out_nHLD = F.scaled_dot_product_attention(q_nHLD, k_nHLD, v_nHLD, mask, **kwargs)
            outs.append(out_nHLD.transpose(1, 2).flatten(0, 1))
        back = self._groups
        out_SHD = _gathered(torch.cat(outs), back.group_places_S, back.row_places_P, back.filling)
        return out_SHD.transpose(0, 1)[None]

    def _one_by_one(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RuleMask, **kwargs: Any
    ) -> Tensor:
        """Return attention of a long row: of one document after the other where each is causal,
        else by tiles of queries."""
        alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
        if kwargs.get("dropout_p") or not alike or not self._is_causal(mask):
            return F.scaled_dot_product_attention(query, key, value, mask, **kwargs)
        every_head = (slice(0, query.shape[1]), slice(0, key.shape[1]))
        pieces: list[Piece] = []
        alone: list[slice] = []
        for tokens in (slice(*span) for span in self._spans):
            if tokens.stop - tokens.start > 1:
                of_document = [Piece(tokens, *every_head)]
                pieces += of_heads(query, key, tokens) if widened(query) else of_document
            elif alone and alone[-1].stop == tokens.start:
                alone[-1] = slice(alone[-1].start, tokens.stop)
            else:
                alone.append(tokens)
        work = Pieces(
            pieces,
            torch.float32 if widened(query) else query.dtype,
            kwargs.get("scale"),
            partial(filled, dtype=query.dtype),
            alone,
        )
        return by_pieces(query, key, value, work)

    def _is_causal(self, mask: Tensor) -> bool:
        """Return whether each token of a document sees those of it up to itself; a rule is asked
        for some of the pairs at a time."""
        if not isinstance(mask, RuleMask):
            return all(of_group is None for of_group in self._masks_of(mask))
        if id(mask) not in self._causal:
            self._causal[id(mask)] = (
                mask,
                all(
                    mask.is_causal(slice(begin, end))
                    for begin, end in self._spans
                    if end - begin > 1
                ),
            )
        return self._causal[id(mask)][1]

    @cached_property
    def _groups(self) -> _Groups:
        """The documents of each length."""
        by_length: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for begin, end in self._spans:
            length = filled(end - begin, self._dtype) if end - begin > 1 else 1
            by_length[length].append((begin, end))
        return _Groups.of([_places(documents, length) for length, documents in by_length.items()])

    def _documents(self, row_1HSD: Tensor) -> list[Tensor]:
        """Return the documents of each group, [n, H, L, D]."""
        row_SHD = row_1HSD[0].transpose(0, 1)
        groups = self._groups
        nothing = groups.filling[:0]
        rows_PHD = _gathered(row_SHD, groups.row_places_P, groups.group_places_S, nothing)
        parts = torch.split(rows_PHD, [index_nL.numel() for index_nL, _ in groups.places])
        return [
            part_pHD.view(*index_nL.shape, *part_pHD.shape[1:]).transpose(1, 2)
            for part_pHD, (index_nL, _) in zip(parts, groups.places, strict=True)
        ]

    def _masks_of(self, mask_11SS: Tensor) -> list[Tensor | None]:
        """Return the mask of each group's documents, [n, 1, L, L]; None where it is the causal
        one."""
        rule = isinstance(mask_11SS, RuleMask)
        place = (id(mask_11SS), ()) if rule else (mask_11SS.data_ptr(), mask_11SS.stride())
        if place not in self._masks:
            masks: list[Tensor | None] = []
            for index_nL, real_nL in self._groups.places:
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


@dataclass(frozen=True, slots=True)
class _Groups:
    """The documents of a row, those of one length beside one another."""

    places: Sequence[tuple[Tensor, Tensor]]
    """Places [n, L] of each group in the row, and which are a document's own."""
    row_places_P: Tensor
    """The place in the row of each token of all groups."""
    group_places_S: Tensor
    """The place in all groups of each token of the row."""
    filling: Tensor
    """The places in all groups of what documents are filled up with."""

    @classmethod
    def of(cls, places: Sequence[tuple[Tensor, Tensor]]) -> _Groups:
        """Return groups with the ways there and back."""
        row_places_P = torch.cat([index_nL.view(-1) for index_nL, _ in places])
        real_P = torch.cat([real_nL.view(-1) for _, real_nL in places])
        places_S = real_P.nonzero().view(-1)
        group_places_S = torch.empty_like(places_S)
        group_places_S[row_places_P[real_P]] = places_S
        return cls(places, row_places_P, group_places_S, (~real_P).nonzero().view(-1))


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

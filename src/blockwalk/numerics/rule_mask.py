"""A mask of attention that is the rule by which it is made, and attention by tiles of queries under
it. A row of S tokens then never lies under a mask of S × S.

B batch, H heads, Q queries, K keys, D features of a head, E those of a value, T queries of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from blockwalk.numerics.lazy_parameter import METADATA
from blockwalk.numerics.row_tiles import filled, narrow, of_float32
from blockwalk.plan.sizes import spans

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, boolean, by the numbers of row, head, query and key: tensors that
broadcast against one another."""

TILE_ELEMENTS = 1 << 22
"""Elements of the mask of one tile: 4 MB, and twice that where a kernel adds it in 16 bits."""
MOST_QUERIES = 512
LEAST_QUERIES = 64
KEYS_STEP = 128
"""Keys of a tile begin and end at multiples of it: a processor keeps memory for each new shape."""


@dataclass(frozen=True, slots=True)
class Span:
    """The keys that one tile of queries sees."""

    queries: slice
    keys: slice
    """Keys up to the last that any query sees, beginning with the first such."""
    seen_by_all: int
    """Keys at the beginning of ``keys`` that every query sees."""


class RuleMask(Tensor):
    """A boolean mask [B, 1, Q, K] that is its rule. Attention reads it by tiles; anything else that
    needs its elements gets them as an ordinary tensor.

    Args:
        rules: the rule of some rows of the batch, and their number; one after the other they are B.
        queries: the numbers of the queries, in pieces, which ascend.
        keys: the number of the first key, and of all.
    """

    rules: Sequence[tuple[Rule, int]]
    queries: tuple[slice, ...]
    keys: tuple[int, int]
    _spans: list[Span] | None
    _lengthened: dict[int, RuleMask]

    @staticmethod
    def __new__(
        cls,
        rules: Sequence[tuple[Rule, int]],
        queries: Sequence[slice],
        keys: tuple[int, int],
        device: torch.device | str,
    ) -> RuleMask:
        count = sum(piece.stop - piece.start for piece in queries)
        shape = (sum(rows for _, rows in rules), 1, count, keys[1])
        mask: RuleMask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=torch.device(device)
        )
        mask.rules = rules
        mask.queries = tuple(queries)
        mask.keys = keys
        mask._spans = None
        mask._lengthened = {}
        return mask

    def lengthened(self, tokens: int) -> RuleMask:
        """Return the mask with so many queries and keys appended. No query sees an appended key,
        and appended queries see all others, which gives them numbers."""
        if tokens not in self._lengthened:
            last = self.queries[-1]
            queries = (*self.queries[:-1], slice(last.start, last.stop + tokens))
            keys = (self.keys[0], self.keys[1] + tokens)
            rules = [(self._guarded(rule), rows) for rule, rows in self.rules]
            self._lengthened[tokens] = RuleMask(rules, queries, keys, self.device)
        return self._lengthened[tokens]

    def _guarded(self, rule: Rule) -> Rule:
        """Return a rule that is asked for this mask's own queries and keys alone."""
        end_query: int = self.queries[-1].stop
        end_key = sum(self.keys)

        def guarded(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = rule(row, head, query.clamp(max=end_query - 1), key.clamp(max=end_key - 1))
            return (seen | (query >= end_query)) & (key < end_key)

        return guarded

    def elements(self, queries: slice, keys: slice) -> Tensor:
        """Return the elements of some queries and keys, [B, 1, T, K]."""
        return self._seen(self._query_numbers(queries), keys)

    def _seen(self, query_T: Tensor, keys: slice) -> Tensor:
        """Return the elements of queries by their numbers and of some keys, [B, 1, T, K]."""
        query_T1 = query_T[:, None]
        key_1K = self._key_numbers(keys)[None]
        parts = []
        for rule, rows in self.rules:
            row_B111 = torch.arange(rows, device=self.device).view(-1, 1, 1, 1)
            seen = rule(row_B111, row_B111.new_zeros(1, 1, 1, 1), query_T1, key_1K)
            parts.append(seen.expand(rows, 1, len(query_T), key_1K.shape[1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def among(self, places_nL: Tensor) -> Tensor:
        """Return whether tokens of the one row see one another, [n, L, L], for n groups of L
        places."""
        ((rule, _),) = self.rules
        (queries,) = self.queries
        query_nL1 = places_nL[:, :, None] + queries.start
        key_n1L = places_nL[:, None, :] + self.keys[0]
        nought = torch.zeros((), dtype=torch.long, device=places_nL.device)
        return rule(nought, nought, query_nL1, key_n1L)

    def is_causal(self, tokens: slice) -> bool:
        """Return whether each of some tokens sees those of them up to itself, in every row."""
        count = tokens.stop - tokens.start
        key_K = torch.arange(tokens.start, tokens.stop, device=self.device)
        size = max(LEAST_QUERIES, TILE_ELEMENTS // count)
        for begin, end in spans(tokens.start, tokens.stop, size):
            causal_TK = key_K <= torch.arange(begin, end, device=self.device)[:, None]
            seen_B1TK = self.elements(slice(begin, end), tokens)
            if not torch.equal(seen_B1TK, causal_TK.expand_as(seen_B1TK)):
                return False
        return True

    def whole(self) -> Tensor:
        """Return all elements as an ordinary tensor."""
        return self.elements(slice(0, self.shape[2]), slice(0, self.keys[1]))

    def spans(self) -> list[Span]:
        """Return the tiles of queries, and the keys that each sees. The rule answers for every pair
        once, and the device once for all tiles."""
        if self._spans is None:
            tiles = self._tiles()
            keys = slice(0, self.keys[1])
            edges = torch.stack(
                [self._edges(self.elements(tile, keys).flatten(0, 2)) for tile in tiles]
            )
            self._spans = [
                Span(queries, slice(begin, end), seen_by_all)
                for queries, (begin, end, seen_by_all) in zip(tiles, edges.tolist(), strict=True)
            ]
        return self._spans

    def foreseen_spans(self) -> list[Span]:
        """Return the tiles of a run that is foreseen: a tile's first and last query tell the keys
        that it sees, which saves most of the rule's answers."""
        count = self.keys[1]
        foreseen = []
        with _disable_current_modes():  # numbers, though the tensors at hand have none
            for tile in self._tiles():
                ends = [slice(tile.start, tile.start + 1), slice(tile.stop - 1, tile.stop)]
                numbers = torch.cat([self._query_numbers(end) for end in ends])
                seen_RK = self._seen(numbers, slice(0, count)).flatten(0, 2)
                begin, end, _ = self._edges(seen_RK).tolist()
                foreseen.append(Span(tile, slice(begin, end), 0))
        return foreseen

    def _tiles(self) -> list[slice]:
        """Return the places of tiles of queries, none of them in two pieces."""
        return [
            slice(begin, end)
            for places, _ in self._placed_queries()
            for begin, end in spans(places.start, places.stop, self._tile_size())
        ]

    def _tile_size(self) -> int:
        a_query = max(1, self.shape[0] * self.keys[1])
        fitting = TILE_ELEMENTS // a_query // LEAST_QUERIES * LEAST_QUERIES
        return min(MOST_QUERIES, max(LEAST_QUERIES, fitting))

    def _placed_queries(self) -> Iterator[tuple[slice, int]]:
        """Yield the places of each piece of the queries, and what their numbers are beyond."""
        begin = 0
        for piece in self.queries:
            end = begin + piece.stop - piece.start
            yield slice(begin, end), piece.start - begin
            begin = end

    def _edges(self, seen_RK: Tensor) -> Tensor:
        """Return the first key that some queries see, the one after their last, and the keys from
        there on that all see: int64 [3]."""
        count = self.keys[1]
        any_K = seen_RK.any(0).long()
        begin = any_K.argmax() // KEYS_STEP * KEYS_STEP
        end = count - any_K.flip(0).argmax()
        end = (-(-end // KEYS_STEP) * KEYS_STEP).clamp(max=count)
        hidden_K = (~seen_RK.all(0)).long()
        hidden_K = hidden_K.masked_fill(torch.arange(count, device=self.device) < begin, 0)
        seen_by_all = torch.where(hidden_K.any(), hidden_K.argmax(), end) - begin
        return torch.stack([begin, end, seen_by_all.clamp(min=0)])

    def of_span(self, span: Span) -> Tensor:
        """Return the elements of a span, [B, 1, T, K]; the rule is asked only for keys that are
        hidden from some query."""
        if not span.seen_by_all:
            return self.elements(span.queries, span.keys)
        begin = span.keys.start + span.seen_by_all
        rest_BTK = self.elements(span.queries, slice(begin, span.keys.stop))
        return F.pad(rest_BTK, (span.seen_by_all, 0), value=True)

    def _query_numbers(self, part: slice) -> Tensor:
        """Return the numbers of the queries at some places."""
        numbers = [
            torch.arange(max(part.start, places.start), min(part.stop, places.stop)) + offset
            for places, offset in self._placed_queries()
            if places.start < part.stop and part.start < places.stop
        ]
        return torch.cat(numbers).to(self.device)

    def _key_numbers(self, part: slice) -> Tensor:
        begin = self.keys[0]
        return torch.arange(begin + part.start, begin + part.stop, device=self.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.__getitem__ and _is_all_of(args[0], args[1]):
            return args[0]
        if func is torch.cat and not kwargs and len(args) == 1:
            return _concatenated(args[0])
        if func is torch.equal:
            return _equal(*args)
        return func(*_as_tensors(args), **_as_tensors(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_as_tensors(args), **_as_tensors(kwargs or {}))


def _as_tensors(value: Any) -> Any:
    """Copy arguments with each rule's elements in its place."""
    if isinstance(value, RuleMask):
        return value.whole()
    if isinstance(value, tuple | list):
        return type(value)(_as_tensors(part) for part in value)
    if isinstance(value, dict):
        return {name: _as_tensors(part) for name, part in value.items()}
    return value


def _is_all_of(mask: Any, index: Any) -> bool:
    """Return whether an index takes all of a mask, as models do that cut it to their keys."""
    if not isinstance(mask, RuleMask) or not isinstance(index, tuple) or len(index) > mask.ndim:
        return False
    sizes = zip(index, mask.shape, strict=False)
    return all(
        isinstance(part, slice) and part.indices(size) == (0, size, 1) for part, size in sizes
    )


def _concatenated(masks: Sequence[Tensor]) -> Tensor:
    """Return masks of several batches as that of all their rows."""
    alike = [mask for mask in masks if isinstance(mask, RuleMask)]
    pairs = [(mask.queries, mask.keys) for mask in alike]
    if len(alike) < len(masks) or any(pair != pairs[0] for pair in pairs):
        return torch.cat([_as_tensors(mask) for mask in masks])
    rules = [part for mask in alike for part in mask.rules]
    return RuleMask(rules, alike[0].queries, alike[0].keys, alike[0].device)


def _equal(left: Tensor, right: Tensor) -> bool:
    """Whether two masks have the same elements; one tile of each is made at a time."""
    if not (isinstance(left, RuleMask) and isinstance(right, RuleMask)):
        return torch.equal(_as_tensors(left), _as_tensors(right))
    keys = slice(0, left.keys[1])
    return left.shape == right.shape and all(
        torch.equal(left.elements(queries, keys), right.elements(queries, keys))
        for queries in left._tiles()
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` under a rule. Under dropout, whose draws a recomputation
    would not see again, the mask is whole. Several heads of queries may share one of keys."""
    shares_keys = enable_gqa or query.shape[-3] != key.shape[-3]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": shares_keys}
    fits = (
        isinstance(attn_mask, RuleMask)
        and query.ndim == key.ndim == value.ndim == 4
        and attn_mask.shape[0] in (1, query.shape[0])
        and attn_mask.shape[2:] == (query.shape[2], key.shape[2])
    )
    if dropout_p or is_causal or not fits:
        whole: Tensor = of_float32(
            F.scaled_dot_product_attention,
            *(query, key, value, _as_tensors(attn_mask), dropout_p, is_causal),
            **options,
        )
        return whole
    assert isinstance(attn_mask, RuleMask)
    mask = attn_mask
    length = query.shape[2]
    missing = filled(length, query.dtype) - length if narrow(query) else 0
    if missing and key.shape[2] == length:
        mask = mask.lengthened(missing)
        query, key, value = (F.pad(rows, (0, 0, 0, missing)) for rows in (query, key, value))
    out: Tensor = _Tiled.apply(query, key, value, mask, options)  # type: ignore[no-untyped-call]
    return out[:, :, :length]


def _is_unknown(tensor: Tensor) -> bool:
    """Whether a tensor has no elements: it stands for the shapes of a run that is foreseen."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


class _Tiled(torch.autograd.Function):
    """Attention by tiles of queries. Backward computes each tile again, from the queries, keys and
    values that forward had; gradients of keys and values add up in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BHQD: Tensor,
        key_BHKD: Tensor,
        value_BHKE: Tensor,
        mask: RuleMask,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(query_BHQD, key_BHKD, value_BHKE)
        ctx.mask = mask
        ctx.options = options
        ctx.spans = mask.foreseen_spans() if _is_unknown(query_BHQD) else mask.spans()
        batch, heads, queries, _ = query_BHQD.shape
        # in the order of memory that kernels answer in, and models read
        out_BHQE = query_BHQD.new_empty((batch, queries, heads, value_BHKE.shape[-1]))
        out_BHQE = out_BHQE.transpose(1, 2)
        for span in ctx.spans:
            out_BHQE[:, :, span.queries] = of_float32(
                F.scaled_dot_product_attention,
                query_BHQD[:, :, span.queries],
                key_BHKD[:, :, span.keys],
                value_BHKE[:, :, span.keys],
                attn_mask=mask.of_span(span),
                **options,
            )
        return out_BHQE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHQE: Tensor) -> tuple[Tensor | None, ...]:
        query_BHQD, key_BHKD, value_BHKE = ctx.saved_tensors
        grad_query_BHQD = torch.empty_like(query_BHQD)
        grad_key_BHKD = torch.zeros_like(key_BHKD, dtype=torch.float32)
        grad_value_BHKE = torch.zeros_like(value_BHKE, dtype=torch.float32)
        for span in ctx.spans:
            leaves = (
                query_BHQD[:, :, span.queries].detach().requires_grad_(),
                key_BHKD[:, :, span.keys].detach().requires_grad_(),
                value_BHKE[:, :, span.keys].detach().requires_grad_(),
            )
            with torch.enable_grad():
                out_BHTE = of_float32(
                    F.scaled_dot_product_attention,
                    *leaves,
                    attn_mask=ctx.mask.of_span(span),
                    **ctx.options,
                )
            grads = torch.autograd.grad(out_BHTE, leaves, grad_BHQE[:, :, span.queries])
            grad_query_BHQD[:, :, span.queries] = grads[0]
            grad_key_BHKD[:, :, span.keys] += grads[1]
            grad_value_BHKE[:, :, span.keys] += grads[2]
        return (
            grad_query_BHQD,
            grad_key_BHKD.to(key_BHKD.dtype),
            grad_value_BHKE.to(value_BHKE.dtype),
            None,
            None,
        )

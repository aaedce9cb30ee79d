"""A part of every row of a batch, whose tokens attend to the tokens of all parts.

There are two ways. ``keys``: the keys and values of all parts are gathered, and a part's own
queries attend to them. ``heads``: queries, keys and values change hands, so that each part holds
whole rows of some heads, and answers go back. Both compute what attention of the whole row does
(DeepSpeed Ulysses: Jacobs et al. 2023; gathered keys: Llama 3, Dubey et al. 2024, section 3.3).

c parts, B batch, H heads, G heads of keys, s tokens of a part, S = c·s, D features of a head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.rule_mask import Rule, RuleMask
from blockwalk.plan.row_order import RowOrder

Attention = Callable[..., tuple[Tensor, Any]]
"""An attention function of transformers: (module, query, key, value, mask, ...)."""


class Exchange(Protocol):
    """Collectives among the parts of a row, all of which call them together and in one order; both
    are differentiable."""

    def gather(self, part_P: Tensor) -> Tensor:
        """Return every part's elements, [c, P]."""
        ...

    def swap(self, pieces_cP: Tensor) -> Tensor:
        """Return the piece that every part has for this one, [c, P]."""
        ...


@dataclass(frozen=True, eq=False)
class SequencePart:
    """One of the equal parts of the rows of a batch."""

    number: int
    order: RowOrder
    way: str
    """The way of attention: keys, heads, or auto: the one that sends fewer bytes."""
    exchange: Exchange
    attention_mask_BS: Tensor | None = None
    """The mask of whole rows, where the batch has one."""
    position_ids_BS: Tensor | None = None
    """The positions of whole rows, where the batch has some."""

    @property
    def count(self) -> int:
        """The number of parts, c."""
        return self.order.count

    @property
    def pieces(self) -> list[slice]:
        """The part's own tokens in its row."""
        return self.order.pieces(self.number)

    def inputs(self, ids_Bs: Tensor) -> dict[str, Tensor]:
        """Return the positions of the part's own tokens, as a model takes them: those of documents,
        or those in the row with a mask, without which they would be read as documents'."""
        if self.position_ids_BS is not None:
            of_pieces = [self.position_ids_BS[:, piece] for piece in self.pieces]
            return {"position_ids": torch.cat(of_pieces, 1)}
        places = [torch.arange(piece.start, piece.stop) for piece in self.pieces]
        positions_Bs = torch.cat(places).to(ids_Bs.device).expand(len(ids_Bs), -1)
        return {"position_ids": positions_Bs, "attention_mask": torch.ones_like(ids_Bs)}

    def mask(self, rule: Rule, rows: int, device: torch.device | str) -> PartMask:
        """Return the mask of a rule at the positions of whole rows."""
        return PartMask.of(self, rule, rows, device)

    def attend(
        self,
        attention: Attention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: PartMask,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Return what a module's attention answers for the part's own tokens, [B, s, H, D].

        Args:
            attention: that of whole rows, of transformers.
            query: [B, H, s, D]; ``key`` and ``value`` [B, G, s, D].
            mask: the part's.
        """
        if self._by_heads(query, key, value):
            return self._attend_by_heads(attention, query, key, value, mask, **options)
        key_BGSD, value_BGSE = self._whole(key, value)
        # a processor attends to shared keys as they are; elsewhere they are copied for every head
        attending = _Heads(1) if is_cpu(query.device) else module
        return attention(attending, query, key_BGSD, value_BGSE, mask.of_part, **options)

    def _by_heads(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        heads = query.shape[1]
        if self.way != "auto":
            return self.way == "heads"
        if heads % self.count:
            return False
        gathered = key[0].numel() + value[0].numel()
        repeats = self.count // math.gcd(key.shape[1], self.count)
        answers = heads * self.order.tokens * value.shape[-1]
        swapped = query[0].numel() + repeats * gathered + answers
        return swapped < self.count * gathered

    def _whole(self, *parts: Tensor) -> list[Tensor]:
        """Return tensors of all parts, [B, G, S, D], from this one's, [B, G, s, D]."""
        sizes = [part.numel() for part in parts]
        all_cP = self.exchange.gather(torch.cat([part.reshape(-1) for part in parts]))
        return [
            self._row([piece_P.view(part.shape) for piece_P in all_cN])
            for part, all_cN in zip(parts, torch.split(all_cP, sizes, dim=1), strict=True)
        ]

    def _row(self, parts: Sequence[Tensor]) -> Tensor:
        """Return whole rows [B, G, S, D] of all parts, [B, G, s, D]."""
        pieces = [
            (tokens.start, piece)
            for number, part in enumerate(parts)
            for tokens, piece in self._pieces_of(part, number)
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=itemgetter(0))], dim=2)

    def _pieces_of(self, part: Tensor, number: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield each piece of a part, [B, G, s, D], with its tokens in its row."""
        pieces = self.order.pieces(number)
        sizes = [tokens.stop - tokens.start for tokens in pieces]
        return zip(pieces, torch.split(part, sizes, dim=2), strict=True)

    def _attend_by_heads(
        self,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: PartMask,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        heads = query.shape[1]
        key_heads = key.shape[1]
        if heads % self.count:
            raise ValueError(
                f"context.way is heads, and the {heads} heads do not divide among mesh.context:"
                f" {self.count} ranks; set context.way: keys"
            )
        repeats = self.count // math.gcd(key_heads, self.count)
        if repeats > 1:
            key, value = (rows.repeat_interleave(repeats, 1) for rows in (key, value))
        query, key, value = self._of_heads(query, key, value)
        of_one_key = _Heads(heads // (key_heads * repeats))
        out_BSHE, weights = attention(of_one_key, query, key, value, mask.of_row, **options)
        return self._of_tokens(out_BSHE), weights

    def _of_heads(self, *parts: Tensor) -> list[Tensor]:
        """Return whole rows of this part's share of the heads, [B, H/c, S, D]."""
        pieces = [torch.stack(part.chunk(self.count, 1)) for part in parts]
        sizes = [piece[0].numel() for piece in pieces]
        sent_cP = torch.cat([piece.reshape(self.count, -1) for piece in pieces], dim=1)
        swapped = torch.split(self.exchange.swap(sent_cP), sizes, dim=1)
        return [
            self._row([row_P.view(piece.shape[1:]) for row_P in rows_cP])
            for piece, rows_cP in zip(pieces, swapped, strict=True)
        ]

    def _of_tokens(self, rows_BSHE: Tensor) -> Tensor:
        """Return the part's own tokens of all heads, [B, s, H, E], from whole rows of some."""
        parts = [
            torch.cat([rows_BSHE[:, tokens] for tokens in self.order.pieces(number)], dim=1)
            for number in range(self.count)
        ]
        pieces = torch.stack(parts)
        swapped_cP = self.exchange.swap(pieces.reshape(self.count, -1))
        return torch.cat([row_P.view(pieces.shape[1:]) for row_P in swapped_cP], dim=2)


class _Heads(nn.Module):
    """A module as attention sees it: so many heads of queries share one of keys."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


class PartMask(RuleMask):
    """The mask of a part's own queries and the keys of whole rows, [B, 1, s, S]."""

    part: SequencePart
    of_part: RuleMask
    """The same as an ordinary rule, for attention over gathered keys."""
    of_row: RuleMask
    """The rule for queries of whole rows."""

    @classmethod
    def of(cls, part: SequencePart, rule: Rule, rows: int, device: torch.device | str) -> PartMask:
        rules = [(rule, rows)]
        length = part.order.length
        keys = (0, length)
        mask = cls(rules, part.pieces, keys, device)
        assert isinstance(mask, PartMask)
        mask.part = part
        mask.of_part = RuleMask(rules, part.pieces, keys, device)
        mask.of_row = RuleMask(rules, [slice(0, length)], keys, device)
        return mask


def refuse_options(options: dict[str, Any]) -> None:
    """Raise ValueError for attention that is more than a mask of rows: the reason, for a part."""
    if options.get("dropout"):
        raise ValueError(
            f"it draws random numbers in attention (dropout {options['dropout']}), which parts of"
            " a row would draw otherwise"
        )
    if options.get("position_bias") is not None:
        raise ValueError("its attention adds a bias for each pair of positions")

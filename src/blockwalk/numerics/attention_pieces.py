"""Causal attention of a row on a processor, a piece at a time: one of its documents, or one head.
What the copies of a piece take is then little beside the row.

B batch, H heads of queries, G of keys and values, S sequence, L tokens of a piece, F features of a
head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that attend to one another alone, in some heads."""

    tokens: slice
    heads: slice
    """Heads of queries."""
    groups: slice
    """The heads of keys and values that they read."""

    def reads_as(self, other: Piece) -> bool:
        """Return whether another piece reads the same keys and values."""
        return (self.tokens, self.groups) == (other.tokens, other.groups)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces that a row is computed by, those that read the same keys and values one after the
    other."""

    pieces: Sequence[Piece]
    dtype: torch.dtype
    """The dtype of their copies."""
    scale: float | None = None
    filled: Callable[[int], int] = int
    """The number of tokens that a piece of so many is filled up to."""
    alone: Sequence[slice] = ()
    """Tokens that see themselves alone."""

    def copies(self, piece: Piece, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Any:
        """Return a piece of tensors [B, H, S, F], and of others of [B, G, S, F]."""
        count = piece.tokens.stop - piece.tokens.start
        missing = self.filled(count) - count
        parts = [tensor[:, piece.heads, piece.tokens].to(self.dtype) for tensor in queries]
        parts += [tensor[:, piece.groups, piece.tokens].to(self.dtype) for tensor in keys]
        return [F.pad(part, (0, 0, 0, missing)) for part in parts] if missing else parts


def by_pieces(query: Tensor, key: Tensor, value: Tensor, work: Pieces) -> Tensor:
    """Return causal attention [B, H, S, F], rounded once; H is a multiple of G."""
    out: Tensor = _ByPieces.apply(query, key, value, work)  # type: ignore[no-untyped-call]
    return out


def of_heads(query: Tensor, key: Tensor, tokens: slice) -> list[Piece]:
    """Return a piece for each head of the queries."""
    heads = query.shape[1]
    of_group = heads // key.shape[1]
    return [
        Piece(tokens, slice(h, h + 1), slice(h // of_group, h // of_group + 1))
        for h in range(heads)
    ]


class _ByPieces(torch.autograd.Function):
    """Keeps inputs and answer as they are, and each query's logarithm of its sum."""

    @staticmethod
    def forward(
        ctx: Any, query_BHSF: Tensor, key_BGSF: Tensor, value_BGSF: Tensor, work: Pieces
    ) -> Tensor:
        out_BHSF = torch.empty_like(query_BHSF)
        log_sums = []
        for piece in work.pieces:
            copies = work.copies(piece, (query_BHSF,), (key_BGSF, value_BGSF))
            answer, log_sum = _FORWARD(*copies, 0.0, True, scale=work.scale)
            _write(out_BHSF, piece.heads, piece.tokens, answer)
            log_sums.append(log_sum)
        of_group = query_BHSF.shape[1] // key_BGSF.shape[1]
        for tokens in work.alone:
            out_BHSF[:, :, tokens] = value_BGSF[:, :, tokens].repeat_interleave(of_group, 1)
        ctx.save_for_backward(query_BHSF, key_BGSF, value_BGSF, out_BHSF, *log_sums)
        ctx.work = work
        return out_BHSF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSF: Tensor) -> tuple[Tensor | None, ...]:
        query_BHSF, key_BGSF, value_BGSF, out_BHSF, *log_sums = ctx.saved_tensors
        work: Pieces = ctx.work
        pieces = work.pieces
        of_group = query_BHSF.shape[1] // key_BGSF.shape[1]
        grad_query_BHSF = torch.empty_like(query_BHSF)
        grad_key_BGSF = torch.empty_like(key_BGSF)
        grad_value_BGSF = torch.empty_like(value_BGSF)
        sums: list[Tensor] = []
        for number, piece in enumerate(pieces):
            grad, query, out, key, value = work.copies(
                piece, (grad_BHSF, query_BHSF, out_BHSF), (key_BGSF, value_BGSF)
            )
            grads = _BACKWARD(
                *(grad, query, key, value, out, log_sums[number], 0.0, True), scale=work.scale
            )
            del grad, query, out, key, value
            _write(grad_query_BHSF, piece.heads, piece.tokens, grads[0])
            if number and piece.reads_as(pieces[number - 1]):
                sums[0] += grads[1]
                sums[1] += grads[2]
            else:
                sums = list(grads[1:])
            if number + 1 == len(pieces) or not piece.reads_as(pieces[number + 1]):
                _write(grad_key_BGSF, piece.groups, piece.tokens, sums[0])
                _write(grad_value_BGSF, piece.groups, piece.tokens, sums[1])
            del grads
        for tokens in work.alone:
            grad_query_BHSF[:, :, tokens] = 0
            grad_key_BGSF[:, :, tokens] = 0
            of_value = grad_value_BGSF[:, :, tokens]
            shared = grad_BHSF[:, :, tokens].reshape(
                *of_value.shape[:2], of_group, *of_value.shape[2:]
            )
            of_value.copy_(shared.sum(2))
        return grad_query_BHSF, grad_key_BGSF, grad_value_BGSF, None


def _write(whole: Tensor, heads: slice, tokens: slice, part: Tensor) -> None:
    """Write a piece's numbers into their place, but those of what it was filled up with."""
    whole[:, heads, tokens] = part[:, :, : tokens.stop - tokens.start]

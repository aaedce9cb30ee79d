"""Causal attention of 16-bit numbers on a processor that multiplies in float32: of copies of one
head at a time, where those of all would be most of a long sequence's memory.

B batch, H heads of queries, G of keys and values, S sequence, F features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

LEAST_BYTES = 32 << 20
"""Bytes of the float32 copy of all queries from which on attention goes by heads: below, one call
for all heads costs less."""


def goes_by_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether causal attention without a mask is computed here."""
    four = query.dim() == key.dim() == value.dim() == 4
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    return four and alike and 4 * query.numel() >= LEAST_BYTES


def by_heads(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return causal attention [B, H, S, F], rounded once; H is a multiple of G."""
    out: Tensor = _ByHeads.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return out


class _ByHeads(torch.autograd.Function):
    """Keeps inputs and answer in 16 bits, and each query's logarithm of its sum."""

    @staticmethod
    def forward(
        ctx: Any, query_BHSF: Tensor, key_BGSF: Tensor, value_BGSF: Tensor, scale: float | None
    ) -> Tensor:
        out_BHSF = torch.empty_like(query_BHSF)
        log_sums = []
        for head, group in _heads(query_BHSF, key_BGSF):
            copies = (
                query_BHSF[:, head].float(),
                key_BGSF[:, group].float(),
                value_BGSF[:, group].float(),
            )
            out_B1SF, log_sum_B1S = _FORWARD(*copies, 0.0, True, scale=scale)
            out_BHSF[:, head] = out_B1SF
            log_sums.append(log_sum_B1S)
        ctx.save_for_backward(query_BHSF, key_BGSF, value_BGSF, out_BHSF, *log_sums)
        ctx.scale = scale
        return out_BHSF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSF: Tensor) -> tuple[Tensor | None, ...]:
        query_BHSF, key_BGSF, value_BGSF, out_BHSF, *log_sums = ctx.saved_tensors
        grad_query_BHSF = torch.empty_like(query_BHSF)
        grad_key_BGSF = torch.empty_like(key_BGSF)
        grad_value_BGSF = torch.empty_like(value_BGSF)
        of_group = query_BHSF.shape[1] // key_BGSF.shape[1]
        for number, (head, group) in enumerate(_heads(query_BHSF, key_BGSF)):
            copies = (
                grad_BHSF[:, head].float(),
                query_BHSF[:, head].float(),
                key_BGSF[:, group].float(),
                value_BGSF[:, group].float(),
                out_BHSF[:, head].float(),
            )
            grads = _BACKWARD(*copies, log_sums[number], 0.0, True, scale=ctx.scale)
            grad_query_BHSF[:, head] = grads[0]
            if number % of_group == 0:
                sums = list(grads[1:])
            else:
                sums[0] += grads[1]
                sums[1] += grads[2]
            if number % of_group == of_group - 1:
                grad_key_BGSF[:, group] = sums[0]
                grad_value_BGSF[:, group] = sums[1]
            del copies, grads
        return grad_query_BHSF, grad_key_BGSF, grad_value_BGSF, None


def _heads(query_BHSF: Tensor, key_BGSF: Tensor) -> list[tuple[slice, slice]]:
    """Return each head of the queries, and that of the keys and values that it reads."""
    heads = query_BHSF.shape[1]
    of_group = heads // key_BGSF.shape[1]
    return [(slice(h, h + 1), slice(h // of_group, h // of_group + 1)) for h in range(heads)]

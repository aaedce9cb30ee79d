"""Any loss of one token's logits, over chunks of tokens: those of all tokens are never in memory at
once. Shapes and logits are those of :mod:`blockwalk.numerics.losses.head`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blockwalk.numerics.codecs.weights import Weight
from blockwalk.numerics.device import sent
from blockwalk.numerics.losses.head import Head, LossResult, TokenLoss
from blockwalk.plan.losses import token_chunk
from blockwalk.plan.sizes import spans

OfLogits = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, V], float32 at least, labels [n]): the loss of each token, [n], differentiable."""


def by_logits(function: OfLogits, tokens: int | None = None) -> TokenLoss:
    """Return a function of a token's logits as a loss that Blockwalk trains with.

    Args:
        tokens: those whose logits are held at once, instead of what
            :func:`~blockwalk.plan.losses.token_chunk` says.

    >>> def z_loss(logits_nV, labels_n):
    ...     lse_n = logits_nV.logsumexp(1)
    ...     return lse_n - logits_nV.gather(1, labels_n[:, None])[:, 0] + 1e-4 * lse_n**2
    >>> LOSS = by_logits(z_loss)
    """

    @torch.no_grad()
    def losses(
        batches: Sequence[tuple[Tensor, Tensor]],
        head: Weight,
        **transform: Any,
    ) -> list[Tensor]:
        layer = Head(head, batches[0][0].device, **transform)
        of_batches = []
        for hidden_ND, labels_N in batches:
            losses_N = hidden_ND.new_zeros(len(hidden_ND), dtype=torch.float64)
            for places_n, labels_n in _parts(layer, hidden_ND, labels_N, tokens):
                logits_nV, _ = _logits(layer, layer.hidden(hidden_ND, places_n), len(places_n))
                losses_N.index_copy_(0, places_n, function(logits_nV, labels_n).double())
            of_batches.append(losses_N)
        return of_batches

    @torch.no_grad()
    def with_gradient(
        hidden_ND: Tensor,
        labels_N: Tensor,
        head: Weight,
        *,
        grad_scale: float,
        head_grad: Tensor | None = None,
        bias_grad: Tensor | None = None,
        **transform: Any,
    ) -> LossResult:
        device = hidden_ND.device
        layer = Head(head, device, **transform)
        layer.require_gradients(head_grad, bias_grad)
        grad_ND = torch.zeros_like(hidden_ND, memory_format=torch.contiguous_format)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for places_n, labels_n in _parts(layer, hidden_ND, labels_N, tokens):
            h_fD = layer.hidden(hidden_ND, places_n)
            logits_nV, slope_nV = _logits(layer, h_fD, len(places_n))
            with torch.enable_grad():
                losses_n = function(logits_nV.requires_grad_(), labels_n)
                (grad_nV,) = torch.autograd.grad(losses_n.sum(), logits_nV)
            loss_sum += losses_n.detach().double().sum()
            grad_nV = grad_nV * layer.scale
            if slope_nV is not None:
                grad_nV.mul_(slope_nV)
            sum_nD = torch.zeros(
                len(places_n), hidden_ND.shape[1], dtype=layer.accumulates_in, device=device
            )
            for start, stop in _ranges(layer):
                layer.add_gradients(
                    grad_nV[:, start:stop],
                    h_fD,
                    head.rows(start, stop),
                    start,
                    sum_nD,
                    head_grad,
                    bias_grad,
                    grad_scale,
                )
            grad_ND.index_copy_(0, places_n, sum_nD.mul_(grad_scale).to(hidden_ND.dtype))
        return LossResult(loss_sum, grad_ND)

    return TokenLoss(losses, with_gradient)


def _parts(
    head: Head, hidden_ND: Tensor, labels_N: Tensor, tokens: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield places and labels of the tokens that count, a chunk at a time, on the head's device."""
    chunk = tokens or token_chunk(
        head.weight.shape[0], head.accumulates_in.itemsize, head.device.type
    )
    for places_n, labels_n in head.counting(hidden_ND, labels_N, chunk):
        yield sent(places_n, head.device), sent(labels_n, head.device)


def _ranges(head: Head) -> Iterator[tuple[int, int]]:
    vocab_size = head.weight.shape[0]
    return spans(0, vocab_size, head.chunks(1)[1])


def _logits(head: Head, h_fD: Tensor, tokens: int) -> tuple[Tensor, Tensor | None]:
    """Return the logits of some tokens, [n, V], and their slope where there is a soft cap."""
    shape = (tokens, head.weight.shape[0])
    logits_nV = torch.empty(shape, dtype=head.accumulates_in, device=head.device)
    slope_nV = None if head.soft_cap is None else torch.empty_like(logits_nV)
    for start, stop in _ranges(head):
        l_nv, slope_nv = head.logits(h_fD, tokens, head.weight.rows(start, stop), start)
        logits_nV[:, start:stop] = l_nv
        if slope_nV is not None and slope_nv is not None:
            slope_nV[:, start:stop] = slope_nv
    return logits_nV, slope_nV

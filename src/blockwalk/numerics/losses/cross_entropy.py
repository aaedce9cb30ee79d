"""Cross-entropy over vocabulary chunks: the loss and its gradients without the logits ever being
whole in memory. Shapes and logits are those of :mod:`blockwalk.numerics.losses.head`.

For one token with hidden state h and label y the label's column is kept out of every sum over the
vocabulary, and the loss is written over the *rest*, Z = log Σ_{j≠y} exp l_j:

    loss    = log(1 + exp(Z − l_y))
    q       = 1 − p_y = 1 / (1 + exp(l_y − Z))
    dl/dh   = s·q·( Σ_{j≠y} exp(l_j − Z)·d_j·W_j  −  d_y·W_y ),    d_j = 1 − (l_j/c)², or 1

which is the textbook p − y without its cancellation: the gradient of a token that the model already
predicts keeps all its digits although p·W is accumulated in 16-bit products.

With a frozen head, loss and dl/dh come out of *one* pass over the vocabulary, as in flash attention
with K = V = W (Dao et al. 2022, algorithm 1): a running maximum m, the sum of exp(l − m) and the
accumulated exp(l − m)·W, rescaled when m grows. A head or a bias that is trained takes two passes,
since its gradient needs every token's Z first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from blockwalk.numerics.codecs.weights import Weight
from blockwalk.numerics.device import sent
from blockwalk.numerics.losses.head import Head, LossResult, TokenLoss
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.sizes import LIFT

_LOWEST = -1e30
"""The value at which running maxima start: finite, so that m − m is 0 for a token that has seen
nothing but −∞."""

_NEGLIGIBLE = -80.0
"""The distance below the maximum at which logits are cut off (1.8e-35 of its probability): an exp
whose result is subnormal takes 10 to 30 times as long."""


@dataclass(slots=True)
class _Tokens:
    """Tokens in the order of their labels, and the sums that a pass over the vocabulary has
    gathered on them."""

    places_n: Tensor
    """The places of their hidden states."""
    labels_n: Tensor
    bounds: list[int]
    """Places among these tokens: those whose label lies in vocabulary chunk k are
    ``bounds[k]:bounds[k + 1]``."""
    maximum_n: Tensor
    rest_n: Tensor
    """Σ_{j≠y} exp(l_j − maximum), float64."""
    label_logit_n: Tensor
    factor_n: Tensor | None = None
    """Factors on the tokens' gradients, float64; None: 1."""

    @classmethod
    def of(cls, head: Head, places_n: Tensor, labels_n: Tensor) -> _Tokens:
        """Return tokens (on the CPU) that have seen nothing yet, on the head's device."""
        bounds = torch.searchsorted(labels_n, torch.tensor(head.edges)).tolist()
        maximum_n = torch.full(
            (len(labels_n),), _LOWEST, dtype=head.accumulates_in, device=head.device
        )
        return cls(
            places_n=sent(places_n, head.device),
            labels_n=sent(labels_n, head.device),
            bounds=bounds,
            maximum_n=maximum_n,
            rest_n=torch.zeros_like(maximum_n, dtype=torch.float64),
            label_logit_n=torch.empty_like(maximum_n),
        )

    @property
    def excess_n(self) -> Tensor:
        """Z − l_y, float64."""
        return self.rest_n.log() + self.maximum_n - self.label_logit_n

    @property
    def loss_n(self) -> Tensor:
        """log(1 + exp(Z − l_y)), float64: all digits of a small loss, where Z − l_y alone would
        leave its rounding."""
        return torch.logaddexp(self.excess_n, torch.zeros_like(self.rest_n))

    @property
    def miss_n(self) -> Tensor:
        """q = 1 − p_y, float64, times the token's factor."""
        miss_n = self.excess_n.sigmoid()
        return miss_n if self.factor_n is None else miss_n * self.factor_n

    @property
    def weight_n(self) -> Tensor:
        """Factors q/rest, float64, that turn exp(l_j − maximum) into p_j times the token's
        factor."""
        return self.miss_n / self.rest_n


@torch.no_grad()
def chunked_cross_entropy(
    hidden_ND: Tensor,
    labels_N: Tensor,
    head: Weight,
    *,
    grad_scale: float,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    head_grad: Tensor | None = None,
    bias_grad: Tensor | None = None,
    losses_N: Tensor | None = None,
    weights_N: Tensor | None = None,
    vocab_chunk: int | None = None,
    scratch: ScratchArena | None = None,
) -> LossResult:
    """Return the summed cross-entropy of ``labels_N`` under soft_cap·tanh(scale·(hidden·headᵀ +
    bias)/soft_cap), and its gradients.

    Args:
        hidden_ND: hidden states after the final norm, in the head's dtype (the compute dtype).
        labels_N: integers, already shifted: row i of the hidden states predicts label i;
            :data:`~blockwalk.plan.losses.IGNORE` where none. Best on the CPU, where they are
            sorted: labels on an accelerator cost a synchronisation.
        head: the output matrix [V, D].
        grad_scale: multiplies every gradient, 1/(tokens of the whole accumulated batch) for a mean
            loss.
        bias: [V], any floating dtype, added in float32.
        scale: factor on the logits (cohere's ``logit_scale``, 1/granite's ``logits_scaling``).
        soft_cap: gemma2's ``final_logit_softcapping``; it applies after ``scale``.
        head_grad: float32 [V, R] (float64 for a float64 model), to which
            ``grad_scale``·d(loss_sum)/d(last R columns of the head) is added. R = D is the whole
            head, tied or not; a head with LoRA is [W, B] on [h, s·h·Aᵀ], where R is the rank.
        bias_grad: float32 [V], likewise for the bias.
        losses_N: float64 [N], to which each token's loss is written; where no label counts it stays
            as it was.
        weights_N: float64 [N], factors on the tokens' gradients beside ``grad_scale``.
        vocab_chunk: vocabulary rows of one chunk, instead of what :func:`chunk_sizes` says.
        scratch: buffers to keep for the next call.

    Raises:
        ValueError: a label outside the vocabulary.
    """
    device = hidden_ND.device
    dtype = hidden_ND.dtype
    layer = Head(head, device, bias, scale, soft_cap, vocab_chunk, scratch or ScratchArena())
    layer.require_gradients(head_grad, bias_grad)
    grad_ND = torch.zeros_like(hidden_ND, memory_format=torch.contiguous_format)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    one_pass = head_grad is None and bias_grad is None
    for part in _parts(layer, hidden_ND, labels_N):
        h_fD = layer.hidden(hidden_ND, part.places_n)
        size = len(part.labels_n)
        sum_nD = layer.scratch.take(
            "sum", size, hidden_ND.shape[1], like=h_fD, dtype=layer.accumulates_in
        ).zero_()
        for chunk, (start, stop) in enumerate(pairwise(layer.edges)):
            weight_vD = head.rows(start, stop)
            _gather(layer, h_fD, weight_vD, start, chunk, part, sum_nD if one_pass else None)
        if weights_N is not None:
            part.factor_n = weights_N[part.places_n]
        if one_pass:
            _finish(layer, part, sum_nD, grad_scale)
        else:
            _backward(layer, h_fD, part, sum_nD, head_grad, bias_grad, grad_scale)
            sum_nD.mul_(grad_scale)
        in_dtype_nD = sum_nD if dtype == layer.accumulates_in else h_fD[:size].copy_(sum_nD)
        grad_ND.index_copy_(0, part.places_n, in_dtype_nD)
        loss_n = part.loss_n
        if losses_N is not None:
            losses_N.index_copy_(0, part.places_n, loss_n)
        loss_sum += loss_n.sum()
    return LossResult(loss_sum, grad_ND)


@torch.no_grad()
def chunked_losses(
    batches: Sequence[tuple[Tensor, Tensor]],
    head: Weight,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    vocab_chunk: int | None = None,
    scratch: ScratchArena | None = None,
) -> list[Tensor]:
    """Return each token's cross-entropy, float64 [N], of several batches' hidden states and labels;
    0 where that is :data:`~blockwalk.plan.losses.IGNORE`.

    The arguments are those of :func:`chunked_cross_entropy`. Here the vocabulary is the outer loop:
    without the sums of a gradient a token takes three numbers along, and each chunk of the head is
    decoded, or perturbed, once for all. Batches are multiplied apart, so that each has the bits
    that it has by itself.

    Raises:
        ValueError: a label outside the vocabulary.
    """
    device = batches[0][0].device
    layer = Head(head, device, bias, scale, soft_cap, vocab_chunk, scratch or ScratchArena())
    losses = [hidden_ND.new_zeros(len(hidden_ND), dtype=torch.float64) for hidden_ND, _ in batches]
    parts = [
        (hidden_ND, losses_N, part)
        for (hidden_ND, labels_N), losses_N in zip(batches, losses, strict=True)
        for part in _parts(layer, hidden_ND, labels_N)
    ]
    for chunk, (start, stop) in enumerate(pairwise(layer.edges)):
        weight_vD = head.rows(start, stop)
        for hidden_ND, _, part in parts:
            h_fD = layer.hidden(hidden_ND, part.places_n)
            _gather(layer, h_fD, weight_vD, start, chunk, part, None)
    for _, losses_N, part in parts:
        losses_N.index_copy_(0, part.places_n, part.loss_n)
    return losses


LOSS = TokenLoss(chunked_losses, chunked_cross_entropy)


def _parts(head: Head, hidden_ND: Tensor, labels_N: Tensor) -> Iterator[_Tokens]:
    """Yield the tokens whose labels count, a chunk at a time, before any of the vocabulary has been
    gathered on them."""
    for places_n, labels_n in head.counting(hidden_ND, labels_N):
        yield _Tokens.of(head, places_n, labels_n)


def _exp_below(l_nv: Tensor, maximum_n: Tensor) -> Tensor:
    """Return exp(l − maximum), in place."""
    return l_nv.sub_(maximum_n.unsqueeze(1)).clamp_(min=_NEGLIGIBLE).exp_()


def _gather(
    head: Head,
    h_fD: Tensor,
    weight_vD: Tensor,
    start: int,
    chunk: int,
    part: _Tokens,
    sum_nD: Tensor | None,
) -> None:
    """Take one chunk of the vocabulary, the rows from ``start``, into the tokens' sums; with
    ``sum_nD``, Σ_{j≠y} exp(l_j − maximum)·d_j·W_j is accumulated there."""
    l_nv, slope_nv = head.logits(h_fD, len(part.labels_n), weight_vD, start)
    begin, end = part.bounds[chunk : chunk + 2]
    if begin < end:
        column = (part.labels_n[begin:end] - start).unsqueeze(1)
        part.label_logit_n[begin:end] = l_nv[begin:end].gather(1, column).squeeze(1)
        l_nv[begin:end].scatter_(1, column, -math.inf)
    maximum_n = torch.maximum(part.maximum_n, l_nv.amax(1))
    shrink_n = part.maximum_n.sub_(maximum_n).exp_()
    part.rest_n.mul_(shrink_n).add_(_exp_below(l_nv, maximum_n).sum(1))
    if sum_nD is not None:
        if slope_nv is not None:
            l_nv.mul_(slope_nv)
        sum_nD.mul_(shrink_n.unsqueeze(1))
        head.add_product(sum_nD, head.narrowed(l_nv, h_fD), weight_vD)
    part.maximum_n = maximum_n


def _finish(head: Head, part: _Tokens, sum_nD: Tensor, grad_scale: float) -> None:
    """Turn one pass's sums into ``grad_scale``·dl/dh, in place."""
    factor = head.scale * grad_scale
    sum_nD.mul_((part.weight_n * factor).to(head.accumulates_in).unsqueeze(1))
    label_n = -factor * part.miss_n
    if head.soft_cap is not None:
        label_n = label_n * (1.0 - (part.label_logit_n.double() / head.soft_cap) ** 2)
    label_n = label_n.to(head.accumulates_in)
    rows = max(1, LIFT[head.device.type] // sum_nD.shape[1])
    parts = (torch.split(tensor, rows) for tensor in (part.labels_n, label_n, sum_nD))
    for labels_n, factor_n, part_nD in zip(*parts, strict=True):
        label_rows_nD = head.weight.gather(labels_n).to(head.accumulates_in)
        part_nD.addcmul_(label_rows_nD, factor_n.unsqueeze(1))


def _backward(
    head: Head,
    h_fD: Tensor,
    part: _Tokens,
    sum_nD: Tensor,
    head_grad: Tensor | None,
    bias_grad: Tensor | None,
    grad_scale: float,
) -> None:
    """Make the second pass: dl/d(h·Wᵀ + b) chunk by chunk, added to dl/dh and to the gradients of
    head and bias."""
    # the factor 1/tokens is applied when adding up in float32: in float16 the probabilities would
    # underflow with it
    weight_n1 = (part.weight_n * head.scale).to(head.accumulates_in).unsqueeze(1)
    label_n1 = (part.miss_n * -head.scale).to(head.accumulates_in).unsqueeze(1)
    labels_n = part.labels_n
    chunks = zip(pairwise(head.edges), pairwise(part.bounds), strict=True)
    for (start, stop), (begin, end) in chunks:
        weight_vD = head.weight.rows(start, stop)
        g_nv, slope_nv = head.logits(h_fD, len(labels_n), weight_vD, start)
        _exp_below(g_nv, part.maximum_n).mul_(weight_n1)
        if begin < end:
            column = (labels_n[begin:end] - start).unsqueeze(1)
            g_nv[begin:end].scatter_(1, column, label_n1[begin:end])
        if slope_nv is not None:
            g_nv.mul_(slope_nv)
        head.add_gradients(g_nv, h_fD, weight_vD, start, sum_nD, head_grad, bias_grad, grad_scale)

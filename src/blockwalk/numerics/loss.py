"""Cross-entropy over vocabulary chunks: the loss and its gradients without the logits ever being
whole in memory.

Shapes: N tokens, D hidden, V vocabulary, n and v the tokens and vocabulary rows of one chunk, R
trained columns of the head.

For one token with hidden state h and label y the logits are those of the models themselves (gemma2,
cohere, granite, muse): l_j = c·tanh(s·(h·W_j + b_j)/c), without the tanh where there is no soft cap
c. The label's column is kept out of every sum over the vocabulary, and the loss is written over the
*rest*, Z = log Σ_{j≠y} exp l_j:

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

from blockwalk.numerics import row_tiles, wide_products
from blockwalk.numerics.codecs.weights import Weight
from blockwalk.numerics.device import is_cpu, sent
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.sizes import LIFT, LOSS_BUDGET, chunk_sizes, spans

CHUNK = 8192
"""Vocabulary rows of one range."""
IGNORE = -100
"""The label of a token that has none, as in torch's own loss."""


@torch.no_grad()
def head_logits(
    hidden_ND: Tensor,
    head: Weight,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """soft_cap·tanh(scale·(hidden·headᵀ + bias)/soft_cap), float32 [N, V]; without a cap
    scale·(hidden·headᵀ + bias).

    Args:
        hidden_ND: hidden states after the final norm, in the head's dtype.
        head: the output matrix [V, D].
    """
    vocab_size = head.shape[0]
    logits_NV = torch.empty(
        len(hidden_ND), vocab_size, dtype=torch.float32, device=hidden_ND.device
    )
    for start, stop in spans(0, vocab_size, CHUNK):
        logits_NV[:, start:stop] = row_tiles.product(hidden_ND, head.rows(start, stop).T)
    if bias is not None:
        logits_NV += bias
    if scale != 1.0:
        logits_NV *= scale
    return logits_NV if soft_cap is None else (logits_NV / soft_cap).tanh_().mul_(soft_cap)


_LOWEST = -1e30
"""The value at which running maxima start: finite, so that m − m is 0 for a token that has seen
nothing but −∞."""

_NEGLIGIBLE = -80.0
"""The distance below the maximum at which logits are cut off (1.8e-35 of its probability): an exp
whose result is subnormal takes 10 to 30 times as long."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """The loss summed over tokens that count (0-d float64, on the hidden state's device), and
    ``grad_scale``·d(loss_sum)/d(hidden) in the hidden state's dtype [N, D]."""

    loss_sum: Tensor
    grad_hidden_ND: Tensor


@dataclass(frozen=True, slots=True)
class _Head:
    """The output layer, its logit transform, and the scratch in which its logits are computed."""

    weight: Weight
    bias: Tensor | None
    scale: float
    soft_cap: float | None
    vocab_chunk: int | None
    device: torch.device
    scratch: ScratchArena

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def multiplies_wide(self) -> bool:
        """True where the device makes the wide results of products in the compute dtype by
        itself."""
        return not is_cpu(self.device) and wide_products.has(self.device, self.weight.dtype)

    @property
    def edges(self) -> list[int]:
        """The vocabulary rows at which its chunks begin, and its size."""
        return [
            *range(0, self.weight.shape[0], self.vocab_chunk or self.chunks(1)[1]),
            self.weight.shape[0],
        ]

    def chunks(self, tokens: int) -> tuple[int, int]:
        """Return tokens and vocabulary rows of one chunk."""
        (vocab_size, hidden_size), size = self.weight.shape, self.weight.dtype.itemsize
        capped = self.soft_cap is not None
        budget = LOSS_BUDGET[self.device.type]
        return chunk_sizes(tokens, hidden_size, vocab_size, size, soft_cap=capped, budget=budget)

    def parts(self, hidden_ND: Tensor, labels_N: Tensor) -> Iterator[_Tokens]:
        """Yield the tokens whose labels count, a chunk at a time, before any of the vocabulary has
        been gathered on them."""
        assert self.soft_cap is None or self.soft_cap > 0, self.soft_cap
        kept_n, labels_n = _kept(hidden_ND, labels_N, self.weight)
        size = self.chunks(max(1, len(kept_n)))[0]
        for index_n, of_n in zip(
            torch.split(kept_n, size), torch.split(labels_n, size), strict=True
        ):
            if len(of_n):
                yield _Tokens.of(self.device, index_n, of_n, self.edges, self.wide)

    def hidden(self, hidden_ND: Tensor, index_n: Tensor) -> Tensor:
        """Return the hidden states of n tokens, [f, D], scratch: f − n rows of zeros fill up the
        last tile of their products."""
        rows = row_tiles.rows_of(hidden_ND, len(index_n))
        h_fD = self.scratch.take(
            "hidden", rows, hidden_ND.shape[1], like=hidden_ND, dtype=hidden_ND.dtype
        )
        torch.index_select(hidden_ND, 0, index_n, out=h_fD[: len(index_n)])
        h_fD[len(index_n) :].zero_()
        return h_fD

    def logits(
        self, h_fD: Tensor, tokens: int, weight_vD: Tensor, start: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [n, v] of the rows from ``start``, and their slope d where there is a soft
        cap: wide, scratch."""
        shape = (tokens, len(weight_vD))
        narrow = h_fD.dtype
        l_nv = self.scratch.take("logits", *shape, like=h_fD, dtype=self.wide)
        if narrow == self.wide:
            torch.mm(h_fD, weight_vD.t(), out=l_nv)
        elif self.multiplies_wide:
            wide_products.mm(h_fD, weight_vD.t(), l_nv)
        else:
            # the products in the compute dtype, everything after them in float32: as the models'
            # own losses have it
            narrow_fv = self.scratch.take(
                "narrow", len(h_fD), len(weight_vD), like=h_fD, dtype=narrow
            )
            row_tiles.mm(h_fD, weight_vD.t(), narrow_fv)
            l_nv.copy_(narrow_fv[:tokens])
        if self.bias is not None:
            l_nv.add_(self.bias[start : start + shape[1]])
        if self.soft_cap is None:
            return (l_nv if self.scale == 1.0 else l_nv.mul_(self.scale)), None
        l_nv.mul_(self.scale / self.soft_cap).tanh_()
        slope_nv = self.scratch.take("slope", *shape, like=h_fD, dtype=self.wide)
        torch.mul(l_nv, l_nv, out=slope_nv).neg_().add_(1.0)
        return l_nv.mul_(self.soft_cap), slope_nv

    @staticmethod
    def exp_below(l_nv: Tensor, maximum_n: Tensor) -> Tensor:
        """exp(l − maximum), in place."""
        return l_nv.sub_(maximum_n.unsqueeze(1)).clamp_(min=_NEGLIGIBLE).exp_()

    def add_product(self, into: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
        """Add alpha·left·right to ``into``: a product in the compute dtype added up in the wide
        one, without a temporary. Rows of ``left`` that ``into`` has not are multiplied and left
        out."""
        if left.dtype == self.wide:
            into.addmm_(left, right, alpha=alpha)
            return
        if self.multiplies_wide:
            wide_products.add_product(into, left, right, alpha)
            return
        product = self.scratch.take(
            "product", len(left), into.shape[1], like=into, dtype=left.dtype
        )
        row_tiles.mm(left, right, product)
        # an add_ of mixed dtypes would allocate a float32 copy of the whole product
        rows = max(1, LIFT[self.device.type] // into.shape[1])
        for onto, part in zip(
            torch.split(into, rows), torch.split(product[: len(into)], rows), strict=True
        ):
            onto.add_(
                self.scratch.take("lift", *part.shape, like=into, dtype=self.wide).copy_(part),
                alpha=alpha,
            )

    def narrowed(self, l_nv: Tensor, h_fD: Tensor) -> Tensor:
        """Return a copy of the matrix in the compute dtype, [f, v], in the buffer that the logits'
        product no longer needs."""
        if h_fD.dtype == self.wide:
            return l_nv
        narrow_fv = self.scratch.take(
            "narrow", len(h_fD), l_nv.shape[1], like=l_nv, dtype=h_fD.dtype
        )
        narrow_fv[: len(l_nv)].copy_(l_nv)
        return narrow_fv


@dataclass(slots=True)
class _Tokens:
    """Tokens in the order of their labels, and the sums that a pass over the vocabulary has
    gathered on them."""

    index_n: Tensor
    """The places of their hidden states."""
    labels_n: Tensor
    bounds: list[int]
    """Places among these tokens: those whose label lies in vocabulary chunk k are
    ``bounds[k]:bounds[k + 1]``."""
    maximum_n: Tensor
    rest_n: Tensor
    """Σ_{j≠y} exp(l_j − maximum), float64."""
    label_logit_n: Tensor

    @classmethod
    def of(
        cls,
        device: torch.device,
        index_n: Tensor,
        labels_n: Tensor,
        edges: list[int],
        wide: torch.dtype,
    ) -> _Tokens:
        """Return tokens (on the CPU) that have seen nothing yet, on the device. ``edges`` are those
        of the vocabulary's chunks."""
        bounds = torch.searchsorted(labels_n, torch.tensor(edges)).tolist()
        maximum_n = torch.full((len(labels_n),), _LOWEST, dtype=wide, device=device)
        rest_n = torch.zeros_like(maximum_n, dtype=torch.float64)
        index_n = sent(index_n, device)
        labels_n = sent(labels_n, device)
        return cls(index_n, labels_n, bounds, maximum_n, rest_n, torch.empty_like(maximum_n))

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
        """q = 1 − p_y, float64."""
        return self.excess_n.sigmoid()

    @property
    def weight_n(self) -> Tensor:
        """Factors q/rest, float64, that turn exp(l_j − maximum) into p_j."""
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
    vocab_chunk: int | None = None,
    scratch: ScratchArena | None = None,
) -> LossResult:
    """Return the summed cross-entropy of ``labels_N`` under soft_cap·tanh(scale·(hidden·headᵀ +
    bias)/soft_cap), and its gradients.

    Args:
        hidden_ND: hidden states after the final norm, in the head's dtype (the compute dtype).
        labels_N: integers, already shifted: row i of the hidden states predicts label i;
            :data:`IGNORE` where none. Best on the CPU, where they are sorted: labels on an
            accelerator cost a synchronisation.
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
        vocab_chunk: vocabulary rows of one chunk, instead of what :func:`chunk_sizes` says.
        scratch: buffers to keep for the next call.

    Raises:
        ValueError: a label outside the vocabulary.
    """
    device = hidden_ND.device
    dtype = hidden_ND.dtype
    layer = _Head(head, bias, scale, soft_cap, vocab_chunk, device, scratch or ScratchArena())
    for grad in (head_grad, bias_grad):
        assert grad is None or grad.dtype == layer.wide, (
            f"gradients of a {dtype} model are accumulated in {layer.wide}"
        )
    grad_ND = torch.zeros_like(hidden_ND, memory_format=torch.contiguous_format)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    two_passes = head_grad is not None or bias_grad is not None
    for part in layer.parts(hidden_ND, labels_N):
        h_fD = layer.hidden(hidden_ND, part.index_n)
        size = len(part.labels_n)
        sum_nD = layer.scratch.take(
            "sum", size, hidden_ND.shape[1], like=h_fD, dtype=layer.wide
        ).zero_()
        for place, (start, stop) in enumerate(pairwise(layer.edges)):
            _gather(
                layer,
                h_fD,
                head.rows(start, stop),
                start,
                place,
                part,
                None if two_passes else sum_nD,
            )
        if two_passes:
            _backward(layer, h_fD, part, sum_nD, head_grad, bias_grad, grad_scale)
            sum_nD.mul_(grad_scale)
        else:
            _finish(layer, part, sum_nD, grad_scale)
        grad_ND.index_copy_(
            0, part.index_n, sum_nD if dtype == layer.wide else h_fD[:size].copy_(sum_nD)
        )
        loss_sum += part.loss_n.sum()
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
    0 where that is :data:`IGNORE`.

    The arguments are those of :func:`chunked_cross_entropy`. Here the vocabulary is the outer loop:
    without the sums of a gradient a token takes three numbers along, and each chunk of the head is
    decoded, or perturbed, once for all. Batches are multiplied apart, so that each has the bits
    that it has by itself.

    Raises:
        ValueError: a label outside the vocabulary.
    """
    layer = _Head(
        head, bias, scale, soft_cap, vocab_chunk, batches[0][0].device, scratch or ScratchArena()
    )
    losses = [hidden_ND.new_zeros(len(hidden_ND), dtype=torch.float64) for hidden_ND, _ in batches]
    pairs = zip(batches, losses, strict=True)
    parts = [
        (hidden_ND, own_N, part)
        for (hidden_ND, labels_N), own_N in pairs
        for part in layer.parts(hidden_ND, labels_N)
    ]
    for place, (start, stop) in enumerate(pairwise(layer.edges)):
        weight_vD = head.rows(start, stop)
        for hidden_ND, _, part in parts:
            _gather(
                layer, layer.hidden(hidden_ND, part.index_n), weight_vD, start, place, part, None
            )
    for _, losses_N, part in parts:
        losses_N.index_copy_(0, part.index_n, part.loss_n)
    return losses


def _kept(hidden_ND: Tensor, labels_N: Tensor, head: Weight) -> tuple[Tensor, Tensor]:
    """Return the tokens that count, by label: their indices and labels, both on the CPU."""
    vocab_size, hidden_size = head.shape
    assert hidden_ND.shape == (*labels_N.shape, hidden_size), (
        hidden_ND.shape,
        labels_N.shape,
        head.shape,
    )
    assert hidden_ND.dtype == head.dtype, (hidden_ND.dtype, head.dtype)
    labels_N = labels_N.to("cpu", torch.int64)
    kept_n = (labels_N != IGNORE).nonzero().squeeze(1)
    labels_n, order_n = labels_N[kept_n].sort(stable=True)
    if len(labels_n) and (labels_n[0] < 0 or labels_n[-1] >= vocab_size):
        wrong = int(labels_n[0] if labels_n[0] < 0 else labels_n[-1])
        raise ValueError(
            f"label {wrong} is outside the vocabulary of {vocab_size} tokens; "
            f"positions without a loss are marked with ignore_index = {IGNORE}"
        )
    return kept_n[order_n], labels_n


def _gather(
    layer: _Head,
    h_fD: Tensor,
    weight_vD: Tensor,
    start: int,
    place: int,
    part: _Tokens,
    sum_nD: Tensor | None,
) -> None:
    """Take chunk ``place`` of the vocabulary, the rows from ``start``, into the tokens' sums; with
    ``sum_nD``, Σ_{j≠y} exp(l_j − maximum)·d_j·W_j is accumulated there."""
    l_nv, slope_nv = layer.logits(h_fD, len(part.labels_n), weight_vD, start)
    low, high = part.bounds[place : place + 2]
    if low < high:
        column = (part.labels_n[low:high] - start).unsqueeze(1)
        part.label_logit_n[low:high] = l_nv[low:high].gather(1, column).squeeze(1)
        l_nv[low:high].scatter_(1, column, -math.inf)
    higher_n = torch.maximum(part.maximum_n, l_nv.amax(1))
    shrink_n = part.maximum_n.sub_(higher_n).exp_()
    part.rest_n.mul_(shrink_n).add_(layer.exp_below(l_nv, higher_n).sum(1))
    if sum_nD is not None:
        if slope_nv is not None:
            l_nv.mul_(slope_nv)
        sum_nD.mul_(shrink_n.unsqueeze(1))
        layer.add_product(sum_nD, layer.narrowed(l_nv, h_fD), weight_vD)
    part.maximum_n = higher_n


def _finish(layer: _Head, part: _Tokens, sum_nD: Tensor, grad_scale: float) -> None:
    """Turn one pass's sums into ``grad_scale``·dl/dh, in place."""
    factor = layer.scale * grad_scale
    sum_nD.mul_((part.weight_n * factor).to(layer.wide).unsqueeze(1))
    label_n = -factor * part.miss_n
    if layer.soft_cap is not None:
        label_n = label_n * (1.0 - (part.label_logit_n.double() / layer.soft_cap) ** 2)
    label_n = label_n.to(layer.wide)
    step = max(1, LIFT[layer.device.type] // sum_nD.shape[1])
    parts = (torch.split(each, step) for each in (part.labels_n, label_n, sum_nD))
    for labels_n, factor_n, onto_nD in zip(*parts, strict=True):
        onto_nD.addcmul_(layer.weight.gather(labels_n).to(layer.wide), factor_n.unsqueeze(1))


def _backward(
    layer: _Head,
    h_fD: Tensor,
    part: _Tokens,
    sum_nD: Tensor,
    head_grad: Tensor | None,
    bias_grad: Tensor | None,
    grad_scale: float,
) -> None:
    """The second pass: dl/d(h·Wᵀ + b) chunk by chunk, added to dl/dh and to the gradients of head
    and bias."""
    # the factor 1/tokens is applied when adding up in float32: in float16 the probabilities would
    # underflow with it
    weight_n1 = (part.weight_n * layer.scale).to(layer.wide).unsqueeze(1)
    label_n1 = (part.miss_n * -layer.scale).to(layer.wide).unsqueeze(1)
    labels_n = part.labels_n
    for (start, stop), (low, high) in zip(
        pairwise(layer.edges), pairwise(part.bounds), strict=True
    ):
        weight_vD = layer.weight.rows(start, stop)
        g_nv, slope_nv = layer.logits(h_fD, len(labels_n), weight_vD, start)
        layer.exp_below(g_nv, part.maximum_n).mul_(weight_n1)
        if low < high:
            g_nv[low:high].scatter_(
                1, (labels_n[low:high] - start).unsqueeze(1), label_n1[low:high]
            )
        if slope_nv is not None:
            g_nv.mul_(slope_nv)
        if bias_grad is not None:
            bias_grad[start:stop].add_(g_nv.sum(0), alpha=grad_scale)
        narrow_fv = layer.narrowed(g_nv, h_fD)
        layer.add_product(sum_nD, narrow_fv, weight_vD)
        if head_grad is not None:
            trained_nR = h_fD[: len(labels_n), h_fD.shape[1] - head_grad.shape[1] :]
            layer.add_product(
                head_grad[start:stop], narrow_fv[: len(labels_n)].t(), trained_nR, grad_scale
            )

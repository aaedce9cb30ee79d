"""The output layer, whose logits are made a chunk of tokens and of the vocabulary at a time.

Shapes: N tokens, D hidden, V vocabulary, R trained columns of the head, n and v the tokens and the
vocabulary rows of one chunk, f ≥ n rows, of which zeros fill up the last tile of a product.

The logits are those of the models themselves (gemma2, cohere, granite, muse):
l_j = c·tanh(s·(h·W_j + b_j)/c), without the tanh where there is no soft cap c."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockwalk.numerics import row_tiles, wide_products
from blockwalk.numerics.codecs.weights import Weight
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.losses import IGNORE
from blockwalk.plan.sizes import LIFT, LOSS_BUDGET, chunk_sizes, spans

CHUNK = 8192
"""Vocabulary rows of one range."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """The loss of a batch and its gradient."""

    loss_sum: Tensor
    """The loss summed over the tokens that count: 0-d float64, on the hidden state's device."""
    grad_hidden_ND: Tensor
    """``grad_scale``·d(loss_sum)/d(hidden), in the hidden state's dtype."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss that is a sum over tokens, as two functions of hidden states, labels and the head.

    Both take ``bias``, ``scale``, ``soft_cap`` and ``scratch`` by name;
    :mod:`blockwalk.numerics.losses.cross_entropy` describes the arguments.
    """

    losses: Callable[..., list[Tensor]]
    """(batches of hidden states [N, D] and labels [N], head): each token's loss, float64 [N]."""
    with_gradient: Callable[..., LossResult]
    """(hidden states [N, D], labels [N], head, ``grad_scale``, ``head_grad``, ``bias_grad``). One
    whose tokens' losses are minus their log-probabilities takes ``losses_N`` and ``weights_N``
    too."""


@torch.no_grad()
def head_logits(
    hidden_ND: Tensor,
    head: Weight,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """Return the logits of all tokens, float32 [N, V].

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


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer, its logit transform, and the scratch in which its logits are computed."""

    weight: Weight
    device: torch.device
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    vocab_chunk: int | None = None
    """Vocabulary rows of one chunk, instead of what :func:`chunk_sizes` says."""
    scratch: ScratchArena = field(default_factory=ScratchArena)

    @property
    def accumulates_in(self) -> torch.dtype:
        """The dtype that sums are taken in."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    @property
    def multiplies_wide(self) -> bool:
        """True where the device itself makes products in the compute dtype with wide results."""
        return not is_cpu(self.device) and wide_products.has(self.device, self.weight.dtype)

    @property
    def edges(self) -> list[int]:
        """The vocabulary rows at which its chunks begin, and its size."""
        vocab_size = self.weight.shape[0]
        return [*range(0, vocab_size, self.vocab_chunk or self.chunks(1)[1]), vocab_size]

    def chunks(self, tokens: int) -> tuple[int, int]:
        """Return tokens and vocabulary rows of one chunk."""
        vocab_size, hidden_size = self.weight.shape
        return chunk_sizes(
            tokens,
            hidden_size,
            vocab_size,
            self.weight.dtype.itemsize,
            soft_cap=self.soft_cap is not None,
            budget=LOSS_BUDGET[self.device.type],
        )

    def counting(
        self, hidden_ND: Tensor, labels_N: Tensor, most: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tokens that count, by label and a chunk at a time: their places and labels,
        [n] each, on the CPU.

        Args:
            most: tokens of a chunk, instead of what :func:`chunk_sizes` says.

        Raises:
            ValueError: a label outside the vocabulary.
        """
        assert self.soft_cap is None or self.soft_cap > 0, self.soft_cap
        places_n, labels_n = _counting(hidden_ND, labels_N, self.weight)
        size = most or self.chunks(max(1, len(places_n)))[0]
        if len(places_n):
            yield from zip(torch.split(places_n, size), torch.split(labels_n, size), strict=True)

    def hidden(self, hidden_ND: Tensor, places_n: Tensor) -> Tensor:
        """Return the hidden states of n tokens, [f, D], in scratch."""
        tokens = len(places_n)
        rows = row_tiles.rows_of(hidden_ND, tokens)
        h_fD = self.scratch.take(
            "hidden", rows, hidden_ND.shape[1], like=hidden_ND, dtype=hidden_ND.dtype
        )
        torch.index_select(hidden_ND, 0, places_n, out=h_fD[:tokens])
        h_fD[tokens:].zero_()
        return h_fD

    def logits(
        self, h_fD: Tensor, tokens: int, weight_vD: Tensor, start: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits [n, v] of the vocabulary's rows from ``start``, and their slope
        d = 1 − (l/c)² where there is a soft cap c: in scratch, in :attr:`accumulates_in`."""
        shape = (tokens, len(weight_vD))
        l_nv = self.scratch.take("logits", *shape, like=h_fD, dtype=self.accumulates_in)
        if h_fD.dtype == self.accumulates_in:
            torch.mm(h_fD, weight_vD.t(), out=l_nv)
        elif self.multiplies_wide:
            wide_products.mm(h_fD, weight_vD.t(), l_nv)
        else:
            # the products in the compute dtype, everything after them in float32: as the models'
            # own losses have it
            product_fv = self.scratch.take(
                "narrow", len(h_fD), len(weight_vD), like=h_fD, dtype=h_fD.dtype
            )
            row_tiles.mm(h_fD, weight_vD.t(), product_fv)
            l_nv.copy_(product_fv[:tokens])
        if self.bias is not None:
            l_nv.add_(self.bias[start : start + shape[1]])
        if self.soft_cap is None:
            return (l_nv if self.scale == 1.0 else l_nv.mul_(self.scale)), None
        l_nv.mul_(self.scale / self.soft_cap).tanh_()
        slope_nv = self.scratch.take("slope", *shape, like=h_fD, dtype=self.accumulates_in)
        torch.mul(l_nv, l_nv, out=slope_nv).neg_().add_(1.0)
        return l_nv.mul_(self.soft_cap), slope_nv

    def add_product(self, onto: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
        """Add alpha·left·right to ``onto``: products in the compute dtype, added up in
        :attr:`accumulates_in`, without a temporary. Rows of ``left`` beyond those of ``onto`` are
        multiplied and left out."""
        if left.dtype == self.accumulates_in:
            onto.addmm_(left, right, alpha=alpha)
            return
        if self.multiplies_wide:
            wide_products.add_product(onto, left, right, alpha)
            return
        columns = onto.shape[1]
        product = self.scratch.take("product", len(left), columns, like=onto, dtype=left.dtype)
        row_tiles.mm(left, right, product)
        # an add_ of mixed dtypes would allocate a float32 copy of the whole product
        rows = max(1, LIFT[self.device.type] // columns)
        parts = zip(torch.split(onto, rows), torch.split(product[: len(onto)], rows), strict=True)
        for onto_part, product_part in parts:
            lifted = self.scratch.take(
                "lift", *product_part.shape, like=onto, dtype=self.accumulates_in
            )
            onto_part.add_(lifted.copy_(product_part), alpha=alpha)

    def require_gradients(self, *gradients: Tensor | None) -> None:
        """Assert that the gradients of head and bias are summed in :attr:`accumulates_in`."""
        for gradient in gradients:
            assert gradient is None or gradient.dtype == self.accumulates_in, (
                f"gradients of a {self.weight.dtype} model are accumulated in {self.accumulates_in}"
            )

    def add_gradients(
        self,
        grad_nv: Tensor,
        h_fD: Tensor,
        weight_vD: Tensor,
        start: int,
        sum_nD: Tensor,
        head_grad: Tensor | None,
        bias_grad: Tensor | None,
        grad_scale: float,
    ) -> None:
        """Add what one chunk of the vocabulary, the rows from ``start``, has of the gradients.

        Args:
            grad_nv: d(loss)/d(h·Wᵀ + b) of that chunk.
            sum_nD: d(loss)/dh, without ``grad_scale``.
            head_grad: [V, R], the last R columns of the head.
            bias_grad: [V].
            grad_scale: factor on the gradients of head and bias.
        """
        stop = start + len(weight_vD)
        tokens = len(grad_nv)
        if bias_grad is not None:
            bias_grad[start:stop].add_(grad_nv.sum(0), alpha=grad_scale)
        narrowed_fv = self.narrowed(grad_nv, h_fD)
        self.add_product(sum_nD, narrowed_fv, weight_vD)
        if head_grad is not None:
            trained_nR = h_fD[:tokens, h_fD.shape[1] - head_grad.shape[1] :]
            self.add_product(
                head_grad[start:stop], narrowed_fv[:tokens].t(), trained_nR, grad_scale
            )

    def narrowed(self, l_nv: Tensor, h_fD: Tensor) -> Tensor:
        """Return a copy of the matrix in the compute dtype, [f, v], in the buffer that the logits'
        product no longer needs."""
        if h_fD.dtype == self.accumulates_in:
            return l_nv
        copy_fv = self.scratch.take("narrow", len(h_fD), l_nv.shape[1], like=l_nv, dtype=h_fD.dtype)
        copy_fv[: len(l_nv)].copy_(l_nv)
        return copy_fv


def _counting(hidden_ND: Tensor, labels_N: Tensor, head: Weight) -> tuple[Tensor, Tensor]:
    """Return the tokens that count, by label: their places and labels, both on the CPU."""
    vocab_size, hidden_size = head.shape
    shapes = (hidden_ND.shape, labels_N.shape, head.shape)
    assert hidden_ND.shape == (*labels_N.shape, hidden_size), shapes
    assert hidden_ND.dtype == head.dtype, (hidden_ND.dtype, head.dtype)
    labels_N = labels_N.to("cpu", torch.int64)
    places_n = (labels_N != IGNORE).nonzero().squeeze(1)
    labels_n, order_n = labels_N[places_n].sort(stable=True)
    if len(labels_n) and (labels_n[0] < 0 or labels_n[-1] >= vocab_size):
        label = int(labels_n[0] if labels_n[0] < 0 else labels_n[-1])
        raise ValueError(
            f"label {label} is outside the vocabulary of {vocab_size} tokens; "
            f"positions without a loss are marked with ignore_index = {IGNORE}"
        )
    return places_n[order_n], labels_n

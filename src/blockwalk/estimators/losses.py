"""A loss at the end of a forward: alone, with its gradient, and of several forwards together.

There are two kinds (:class:`TokenSum`, :class:`BatchMean`); which one a loss is, and what computes
it, its row says (:mod:`blockwalk.plan.losses`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from blockwalk.cutting.anatomy import HeadSpec
from blockwalk.data.label_words import row_losses
from blockwalk.estimators.head import Ending, Factors
from blockwalk.numerics.losses.head import TokenLoss
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.losses import LossFacts

Objective = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""A function of (logits [B, S, V], micro-batch) to a 0-d tensor, which is minimised in place of the
loss. Micro-batches are weighed by their tokens that count, as means over these are; the function is
not called where none counts."""
Accumulator = Callable[[str | None], Tensor | None]
"""The float32 buffer that a parameter's gradient is added to; None for one that is not trained."""


@dataclass(frozen=True, slots=True)
class Differentiable:
    """A loss, and where its gradient goes on from."""

    loss_sum: Tensor
    """The sum over the tokens that count, float64 0-d."""
    output: Tensor
    """The tensor to differentiate further."""
    seed: Tensor
    """The gradient of the step's mean loss with respect to it."""


@dataclass(frozen=True, slots=True)
class TokenSum:
    """A loss by chunks: a sum over tokens, from hidden states and the head."""

    loss: TokenLoss
    sums: ClassVar[bool] = True

    @torch.no_grad()
    def forward(self, ending: Ending, *, by_row: bool) -> Tensor:
        """Return the summed loss, float64 0-d; ``by_row`` the sum over each sequence, [B]."""
        batches = [(ending.factors(), ending.labels_BS)]
        (losses_B,) = self.of_passes(ending.cut.head, batches, ending.scratch)
        return losses_B if by_row else losses_B.sum()

    def with_gradient(
        self, ending: Ending, tokens: int, accumulator: Accumulator
    ) -> Differentiable:
        """Return the loss of a step that counts so many ``tokens``. The head's own gradient, or
        that of B of its LoRA, and its bias's are added to their accumulators."""
        head = ending.cut.head
        trained = head.weight if head.lora is None else head.lora[1]
        with torch.enable_grad():
            normed_BSD, weight, bias = ending.factors()
        batch_size, _, width = normed_BSD.shape
        result = self.loss.with_gradient(
            normed_BSD.detach()[:, :-1].reshape(-1, width),
            ending.labels_BS[:, 1:].reshape(-1),
            weight,
            bias=bias,
            scale=head.scale,
            soft_cap=head.soft_cap,
            grad_scale=1.0 / tokens,
            head_grad=accumulator(trained),
            bias_grad=accumulator(head.bias),
        )
        seed_BSD = torch.zeros_like(normed_BSD)
        seed_BSD[:, :-1] = result.grad_hidden_ND.view(batch_size, -1, width)
        return Differentiable(result.loss_sum, normed_BSD, seed_BSD)

    def of_passes(
        self,
        head: HeadSpec,
        batches: Sequence[tuple[Factors, Tensor]],
        scratch: ScratchArena | None,
    ) -> list[Tensor]:
        """Return the losses of batches that share one matrix and bias, which is read once for all:
        the sum over each sequence, float64 [B], of each batch's factors and labels [B, S]."""
        _, weight, bias = batches[0][0]
        pairs = [
            (h_BSD[:, :-1].reshape(-1, h_BSD.shape[-1]), labels_BS[:, 1:].reshape(-1))
            for (h_BSD, *_), labels_BS in batches
        ]
        of_batches = self.loss.losses(
            pairs,
            weight,
            bias=bias,
            scale=head.scale,
            soft_cap=head.soft_cap,
            scratch=scratch or ScratchArena(),
        )
        return [
            losses_N.view(len(labels_BS), -1).sum(1)
            for losses_N, (_, labels_BS) in zip(of_batches, batches, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class BatchMean:
    """A loss that the model's own last part ends in: a mean over the tokens of a batch that count,
    of each forward by itself, while its head is bound."""

    mean: Callable[[Ending], Tensor]
    sums: ClassVar[bool] = False

    @torch.no_grad()
    def forward(self, ending: Ending, *, by_row: bool) -> Tensor:
        """Return the mean, 0-d; ``by_row`` the cross-entropy summed over each sequence, [B]."""
        if by_row:
            return row_losses(ending.logits(), ending.batch["labels"])
        if not ending.counted:  # a mean over nothing
            return ending.hidden_BSD.new_zeros((), dtype=torch.float64)
        return self.mean(ending)

    def with_gradient(
        self, ending: Ending, tokens: int, accumulator: Accumulator
    ) -> Differentiable:
        """Return the loss of a step that counts so many ``tokens``."""
        hidden_BSD = ending.hidden_BSD
        if not ending.counted:  # a mean over nothing: its gradient is none
            zero = hidden_BSD.new_zeros((), dtype=torch.float64)
            return Differentiable(zero, hidden_BSD, torch.zeros_like(hidden_BSD))
        with torch.enable_grad():
            mean = self.mean(ending)
        seed = torch.full_like(mean, ending.counted / max(tokens, 1))
        return Differentiable(mean.detach().double() * ending.counted, mean, seed)


Loss = TokenSum | BatchMean


def own_loss(ending: Ending) -> Tensor:
    """Return the model's own mean loss."""
    return ending.own_loss()


def objective_of(ending: Ending, objective: Objective) -> Tensor:
    """Return what an objective makes of the model's own logits."""
    return objective(ending.logits(), ending.batch)


def loss_of(facts: LossFacts, head: HeadSpec, objective: Objective | None = None) -> Loss:
    """Return the loss of a row, for a model with this head.

    Raises:
        ValueError: the row takes an objective, and there is none.
    """
    facts = facts.for_head(custom=head.custom)
    computes = facts.implementation
    if isinstance(computes, str):
        module, _, name = computes.partition(":")
        computes = getattr(importlib.import_module(module), name)
    if facts.by_chunks:
        return TokenSum(computes)
    if not facts.takes_objective:
        return BatchMean(computes)
    if objective is None:
        raise ValueError("loss: objective needs a function: hand it to Walker(objective=...)")
    return BatchMean(lambda ending: computes(ending, objective))

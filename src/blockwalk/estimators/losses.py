"""A loss at the end of a forward: alone, with its gradient, and of several forwards together.

There are two kinds (:class:`TokenSum`, :class:`BatchMean`); which one a loss is, and what computes
it, its row says (:mod:`blockwalk.plan.losses`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from blockwalk.cutting.anatomy import HeadSpec
from blockwalk.data.label_words import row_losses
from blockwalk.estimators.head import Ending, Factors
from blockwalk.numerics.losses.head import TokenLoss
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.numerics.sequence_tiles import added
from blockwalk.plan.losses import LossFacts

Objective = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""A function of (logits [B, S, V], micro-batch) to a 0-d tensor, which is minimised in place of the
loss. Micro-batches are weighed by their tokens that count, as means over these are; the function is
not called where none counts."""
Accumulator = Callable[[str | None], Tensor | None]
"""The float32 buffer that a parameter's gradient is added to; None for one that is not trained."""


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A loss and its gradients."""

    loss_sum: Tensor
    """The sum over the tokens that count, float64 0-d."""
    hidden_BSD: Tensor
    """The gradient of the step's mean loss with respect to the hidden state."""
    trained: Sequence[Tensor | None]
    """Its gradients with respect to the parameters of the last norm and of the head's adapter."""


@dataclass(frozen=True, slots=True)
class TokenSum:
    """A loss by chunks: a sum over tokens, from hidden states and the head."""

    loss: TokenLoss
    sums: ClassVar[bool] = True

    @torch.no_grad()
    def forward(self, ending: Ending, *, by_row: bool) -> Tensor:
        """Return the summed loss, float64 0-d; ``by_row`` the sum over each sequence, [B]."""
        losses = []
        for part in ending.parts():
            batches = [(part.factors(), part.labels_BS)]
            losses += self.of_passes(ending.cut.head, batches, ending.scratch)
        losses_B = losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
        return losses_B if by_row else losses_B.sum()

    def with_gradient(
        self,
        ending: Ending,
        tokens: int,
        accumulator: Accumulator,
        trained: Sequence[Tensor],
    ) -> Differentiated:
        """Return the loss of a step that counts so many ``tokens``. The head's own gradient, or
        that of B of its LoRA, and its bias's are added to their accumulators. Those of a long
        sequence add up over its tiles in float32."""
        parts = ending.parts()
        if len(parts) == 1:
            return self._of_part(ending, tokens, accumulator, trained)
        grad_BSD = torch.empty_like(ending.hidden_BSD)
        loss_sum = torch.zeros((), dtype=torch.float64, device=grad_BSD.device)
        sums: list[Tensor | None] = [None] * len(trained)
        for part in parts:
            result = self._of_part(part, tokens, accumulator, trained)
            grad_BSD[:, part.tile] = result.hidden_BSD
            loss_sum += result.loss_sum
            sums = [added(total, grad) for total, grad in zip(sums, result.trained, strict=True)]
        in_dtype = [
            None if total is None else total.to(leaf.dtype)
            for total, leaf in zip(sums, trained, strict=True)
        ]
        return Differentiated(loss_sum, grad_BSD, in_dtype)

    def _of_part(
        self,
        ending: Ending,
        tokens: int,
        accumulator: Accumulator,
        leaves: Sequence[Tensor],
    ) -> Differentiated:
        """Return what one part of a sequence adds."""
        ending = replace(ending, hidden_BSD=ending.hidden_BSD.detach().requires_grad_())
        head = ending.cut.head
        trained = head.weight if head.lora is None else head.lora[1]
        with torch.enable_grad():
            normed_BSD, weight, bias = ending.factors()
        batch_size, _, width = normed_BSD.shape
        count = ending.labels_BS.shape[1] - 1
        result = self.loss.with_gradient(
            normed_BSD.detach()[:, :count].reshape(-1, width),
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
        seed_BSD[:, :count] = result.grad_hidden_ND.view(batch_size, count, width)
        return _differentiated(ending, result.loss_sum, normed_BSD, seed_BSD, leaves)

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
            (
                h_BSD[:, : labels_BS.shape[1] - 1].reshape(-1, h_BSD.shape[-1]),
                labels_BS[:, 1:].reshape(-1),
            )
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
            losses_N.view(len(labels_BS), labels_BS.shape[1] - 1).sum(1)
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
        self,
        ending: Ending,
        tokens: int,
        accumulator: Accumulator,
        trained: Sequence[Tensor],
    ) -> Differentiated:
        """Return the loss of a step that counts so many ``tokens``."""
        hidden_BSD = ending.hidden_BSD.detach().requires_grad_()
        ending = replace(ending, hidden_BSD=hidden_BSD)
        if not ending.counted:  # a mean over nothing: its gradient is none
            zero = hidden_BSD.new_zeros((), dtype=torch.float64)
            return Differentiated(zero, torch.zeros_like(hidden_BSD), [None] * len(trained))
        with torch.enable_grad():
            mean = self.mean(ending)
        seed = torch.full_like(mean, ending.counted / max(tokens, 1))
        loss_sum = mean.detach().double() * ending.counted
        return _differentiated(ending, loss_sum, mean, seed, trained)


def _differentiated(
    ending: Ending, loss_sum: Tensor, output: Tensor, seed: Tensor, leaves: Sequence[Tensor]
) -> Differentiated:
    """Return a loss whose gradient with respect to an output is known."""
    inputs = [ending.hidden_BSD, *leaves]
    grad_BSD, *grads = torch.autograd.grad(output, inputs, seed, allow_unused=True)
    assert grad_BSD is not None
    return Differentiated(loss_sum, grad_BSD, grads)


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

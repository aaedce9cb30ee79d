"""A loss at the end of a forward: alone, with its gradient, and of several forwards together.

There are three kinds: :class:`TokenSum`, :class:`BatchMean`, and :class:`TokenFunction` of an
objective. Which one a loss is, and what computes it, its row says (:mod:`blockwalk.plan.losses`,
:mod:`blockwalk.plan.objectives`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from blockwalk.cutting.anatomy import HeadSpec
from blockwalk.data.batch import Batch, LearntCounts, sequences_of
from blockwalk.data.label_words import row_losses
from blockwalk.estimators.head import Ending, Factors
from blockwalk.estimators.objectives import Answer, Sequences, valued, weighed
from blockwalk.numerics.losses.head import TokenLoss
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.numerics.sequence_tiles import added
from blockwalk.plan.losses import IGNORE, LossFacts
from blockwalk.plan.objectives import ObjectiveFacts

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
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Parts of further means over the step, float64 0-d, by name."""


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch's share of a step."""

    counts: LearntCounts
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers of the micro-batch's records, by name."""


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

    @torch.no_grad()
    def of_sequences(self, ending: Ending, count: int) -> Tensor:
        """Return the loss of each of so many sequences, float64 [R], wherever they lie."""
        losses_R = torch.zeros(count, dtype=torch.float64, device=ending.hidden_BSD.device)
        sequences_BS = sequences_of(ending.batch)
        for part in ending.parts():
            start = 0 if part.tile is None else part.tile.start
            (losses_BS,) = self.token_losses(
                ending.cut.head, [(part.factors(), part.labels_BS)], ending.scratch
            )
            places_n = _learnt(part.labels_BS)
            tile = slice(start + 1, start + part.labels_BS.shape[1])
            numbers_n = sequences_BS[:, tile].reshape(-1)[places_n].to(losses_R.device)
            losses_n = losses_BS.reshape(-1)[places_n.to(losses_R.device)]
            losses_R.index_add_(0, numbers_n, losses_n)
        return losses_R

    def with_gradient(
        self, ending: Ending, share: Share, accumulator: Accumulator, trained: Sequence[Tensor]
    ) -> Differentiated:
        """Return the loss of a step's share. The head's own gradient, or that of B of its LoRA, and
        its bias's are added to their accumulators. Those of a long sequence add up over its tiles
        in float32."""
        scale = 1.0 / share.counts.tokens
        return joined_parts(
            ending,
            lambda _, part: self.of_part(part, accumulator, trained, grad_scale=scale),
            trained,
        )

    def of_part(
        self,
        ending: Ending,
        accumulator: Accumulator,
        leaves: Sequence[Tensor],
        *,
        grad_scale: float,
        weights_N: Tensor | None = None,
        weigh: Callable[[Tensor], Tensor] | None = None,
    ) -> Differentiated:
        """Return what one part of a sequence adds.

        Args:
            grad_scale: factor on the gradient.
            weights_N: a further factor of each token, float64; the labels are [B, S − 1] of them.
            weigh: (each token's loss, float64 [N]): these factors, where they are known afterwards:
                of a head that is not trained.
        """
        ending = replace(ending, hidden_BSD=ending.hidden_BSD.detach().requires_grad_())
        head = ending.cut.head
        with torch.enable_grad():
            normed_BSD, weight, bias = ending.factors()
        batch_size, _, width = normed_BSD.shape
        count = ending.labels_BS.shape[1] - 1
        labels_N = ending.labels_BS[:, 1:].reshape(-1)
        further: dict[str, Tensor] = {}
        if weigh is not None:
            places = (len(labels_N),)
            further["losses_N"] = normed_BSD.new_zeros(places, dtype=torch.float64)
        if weights_N is not None:
            further["weights_N"] = weights_N
        result = self.loss.with_gradient(
            normed_BSD.detach()[:, :count].reshape(-1, width),
            labels_N,
            weight,
            bias=bias,
            scale=head.scale,
            soft_cap=head.soft_cap,
            grad_scale=grad_scale,
            head_grad=accumulator(_trained_head(head)),
            bias_grad=accumulator(head.bias),
            **further,
        )
        grad_ND = result.grad_hidden_ND
        if weigh is not None:
            grad_ND.mul_(weigh(further["losses_N"]).to(grad_ND.dtype).unsqueeze(1))
        seed_BSD = torch.zeros_like(normed_BSD)
        seed_BSD[:, :count] = grad_ND.view(batch_size, count, width)
        return _differentiated(ending, result.loss_sum, normed_BSD, seed_BSD, leaves)

    def token_losses(
        self,
        head: HeadSpec,
        batches: Sequence[tuple[Factors, Tensor]],
        scratch: ScratchArena | None,
    ) -> list[Tensor]:
        """Return the losses of batches that share one matrix and bias, which is read once for all:
        of each batch's factors and labels [B, S] those of its tokens, float64 [B, S − 1]; 0 where
        no label counts."""
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
            losses_N.view(len(labels_BS), labels_BS.shape[1] - 1)
            for losses_N, (_, labels_BS) in zip(of_batches, batches, strict=True)
        ]

    def of_passes(
        self,
        head: HeadSpec,
        batches: Sequence[tuple[Factors, Tensor]],
        scratch: ScratchArena | None,
    ) -> list[Tensor]:
        """Return the sums of :meth:`token_losses` over each sequence, float64 [B]."""
        return [losses_BS.sum(1) for losses_BS in self.token_losses(head, batches, scratch)]


def _trained_head(head: HeadSpec) -> str:
    """Return the name of the head's matrix that may be trained: its own, or B of its LoRA."""
    return head.weight if head.lora is None else head.lora[1]


def joined_parts(
    ending: Ending, of_part: Callable[[int, Ending], Differentiated], trained: Sequence[Tensor]
) -> Differentiated:
    """Return the losses of a sequence's parts, each by its number, as one: gradients of ``trained``
    add up in float32."""
    parts = ending.parts()
    if len(parts) == 1:
        return of_part(0, parts[0])
    grad_BSD = torch.empty_like(ending.hidden_BSD)
    loss_sum = torch.zeros((), dtype=torch.float64, device=grad_BSD.device)
    sums: list[Tensor | None] = [None] * len(trained)
    for number, part in enumerate(parts):
        result = of_part(number, part)
        grad_BSD[:, part.tile] = result.hidden_BSD
        loss_sum += result.loss_sum
        sums = [added(total, grad) for total, grad in zip(sums, result.trained, strict=True)]
    in_dtype = [
        None if total is None else total.to(leaf.dtype)
        for total, leaf in zip(sums, trained, strict=True)
    ]
    return Differentiated(loss_sum, grad_BSD, in_dtype)


@dataclass(frozen=True, slots=True)
class TokenFunction:
    """An objective: a function of the log-probabilities of a micro-batch's learnt tokens.

    Where the head is not trained it is read once: rows of the gradient are made for the weight 1,
    and multiplied by each token's weight when that is known. A head that is trained, and a sequence
    in tiles, are read twice: the losses first."""

    tokens: TokenSum
    facts: ObjectiveFacts
    sums: ClassVar[bool] = True

    def with_gradient(
        self, ending: Ending, share: Share, accumulator: Accumulator, trained: Sequence[Tensor]
    ) -> Differentiated:
        """Return the objective of a step's share, as :class:`TokenSum` does its loss: what is
        called a sum here is the mean's part times the step's tokens."""
        head = ending.cut.head
        parts = ending.parts()
        buffers = (accumulator(_trained_head(head)), accumulator(head.bias))
        answer: list[Answer] = []
        if len(parts) == 1 and all(buffer is None for buffer in buffers):

            def weigh(losses_N: Tensor) -> Tensor:
                weights_N = torch.zeros_like(losses_N)
                self._weigh(ending, share, [losses_N], [weights_N], answer)
                return weights_N

            (part,) = parts
            result = self.tokens.of_part(part, accumulator, trained, grad_scale=1.0, weigh=weigh)
            return self._answered(result, share, answer)
        with torch.no_grad():
            losses = [
                self.tokens.token_losses(head, [(part.factors(), part.labels_BS)], ending.scratch)[
                    0
                ].reshape(-1)
                for part in parts
            ]
        weights = [torch.zeros_like(losses_N) for losses_N in losses]
        self._weigh(ending, share, losses, weights, answer)
        result = joined_parts(
            ending,
            lambda number, part: self.tokens.of_part(
                part, accumulator, trained, grad_scale=1.0, weights_N=weights[number]
            ),
            trained,
        )
        return self._answered(result, share, answer)

    def _weigh(
        self,
        ending: Ending,
        share: Share,
        losses: Sequence[Tensor],
        weights: Sequence[Tensor],
        answer: list[Answer],
    ) -> None:
        """Write the weight of each token, parts of the sequence one after the other, beside its
        loss; and add the objective's answer."""
        labels = [
            (0 if part.tile is None else part.tile.start, part.labels_BS) for part in ending.parts()
        ]
        places = [_learnt(labels_BS).to(weights[0].device) for _, labels_BS in labels]
        learnt = [losses_N[at_n] for losses_N, at_n in zip(losses, places, strict=True)]
        sequences = self._sequences(ending.batch, labels, share, -torch.cat(learnt))
        result = weighed(self.facts, sequences)
        split = torch.split(result.weights_N, [len(at_n) for at_n in places])
        for weights_N, at_n, weight_n in zip(weights, places, split, strict=True):
            weights_N[at_n] = weight_n
        answer.append(Answer(result.value, result.metrics))

    def _answered(
        self, result: Differentiated, share: Share, answer: Sequence[Answer]
    ) -> Differentiated:
        (objective,) = answer
        loss_sum = objective.value * share.counts.tokens
        return replace(result, loss_sum=loss_sum, metrics=objective.metrics)

    def of_losses(self, batch: Batch, labels_BS: Tensor, share: Share, losses_BS: Tensor) -> Tensor:
        """Return the objective of the losses of a micro-batch's tokens, [B, S − 1], as a sum: its
        part of the step's mean times the step's tokens."""
        learnt_N = losses_BS.reshape(-1)[_learnt(labels_BS).to(losses_BS.device)]
        answer = valued(self.facts, self._sequences(batch, [(0, labels_BS)], share, -learnt_N))
        return answer.value * share.counts.tokens

    def _sequences(
        self,
        batch: Batch,
        labels: Sequence[tuple[int, Tensor]],
        share: Share,
        log_probs_N: Tensor,
    ) -> Sequences:
        """Return the log-probabilities of a micro-batch's learnt tokens grouped by sequence: of
        parts of it, one after the other, with the first position of each and its labels."""
        device = log_probs_N.device
        whole_BS = sequences_of(batch)
        numbers_BS = {name: numbers for name, numbers in share.numbers.items() if numbers.dim() > 1}
        columns: dict[str, list[Tensor]] = {name: [] for name in ("", *numbers_BS)}
        for start, labels_BS in labels:
            tile = slice(start + 1, start + labels_BS.shape[1])
            places_n = _learnt(labels_BS)
            for name, values_BS in {"": whole_BS, **numbers_BS}.items():
                columns[name].append(values_BS[:, tile].reshape(-1)[places_n])
        joined = {name: torch.cat(values) for name, values in columns.items()}
        of_rows = {name: numbers for name, numbers in share.numbers.items() if numbers.dim() == 1}
        sequence_N = joined.pop("")
        last = int(sequence_N.max()) + 1 if len(sequence_N) else 1
        count = max([last, *map(len, of_rows.values())])
        group = self.facts.group
        return Sequences(
            log_probs_N,
            sequence_N.to(device),
            -(-count // group) * group,
            {name: values.to(device) for name, values in {**of_rows, **joined}.items()},
            share.counts,
        )


def _learnt(labels_BS: Tensor) -> Tensor:
    """Return the places of the labels that count, from the second of each row on: int64 [n]."""
    return (labels_BS[:, 1:].reshape(-1) != IGNORE).nonzero().squeeze(1)


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
        self, ending: Ending, share: Share, _accumulator: Accumulator, trained: Sequence[Tensor]
    ) -> Differentiated:
        """Return the loss of a step's share."""
        hidden_BSD = ending.hidden_BSD.detach().requires_grad_()
        ending = replace(ending, hidden_BSD=hidden_BSD)
        if not ending.counted:  # a mean over nothing: its gradient is none
            zero = hidden_BSD.new_zeros((), dtype=torch.float64)
            return Differentiated(zero, torch.zeros_like(hidden_BSD), [None] * len(trained))
        with torch.enable_grad():
            mean = self.mean(ending)
        seed = torch.full_like(mean, ending.counted / max(share.counts.tokens, 1))
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


def trained_loss(
    loss: LossFacts, facts: ObjectiveFacts, head: HeadSpec, objective: Objective | None = None
) -> Loss | TokenFunction:
    """Return the loss of a training step: an objective of log-probabilities, or a row's own.

    Raises:
        ValueError: the objective needs the logits in the known form, and the model's are not.
    """
    of_row = loss_of(loss, head, objective)
    if not facts.of_log_probabilities or objective is not None:
        return of_row
    if not isinstance(of_row, TokenSum):
        raise ValueError(
            "objective is a function of log-probabilities, and this model's head has logits of its"
            " own form, of which none are read a part at a time; set objective: sft"
        )
    return TokenFunction(of_row, facts)

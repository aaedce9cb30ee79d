"""Objectives: what a step makes of the log-probabilities of its learnt tokens.

Each is a function of (:class:`Sequences`, the settings of its row) that answers this micro-batch's
part of the step's mean loss, differentiable. Their derivatives weigh the rows of the chunked loss's
gradient, so that logits are never whole. All numbers are float64.

Shapes: N learnt tokens, R sequences, P pairs (the chosen sequence of each first)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from blockwalk.data.batch import LearntCounts
from blockwalk.plan.objectives import (
    BASELINE,
    REFERENCE,
    CpoSettings,
    DpoSettings,
    IpoSettings,
    KtoSettings,
    ObjectiveFacts,
    OrpoSettings,
    PolicyGradientSettings,
    SimpoSettings,
)
from blockwalk.plan.table import resolved

LEAST_MISS = 1e-15
"""The least distance of a log-probability from 0 that an odds ratio is taken at."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The learnt tokens of one micro-batch, grouped by sequence."""

    log_probs_N: Tensor
    sequence_N: Tensor
    """The number of the sequence that each token belongs to, int64."""
    count: int
    """R, sequences without a learnt token included."""
    numbers: Mapping[str, Tensor]
    """Numbers of the records by name: [R], or of tokens [N]."""
    step: LearntCounts
    """Counts of the whole step, by which sums become means."""

    def summed(self, values_N: Tensor) -> Tensor:
        """Return the sum of values over the tokens of each sequence, [R]."""
        zeros_R = values_N.new_zeros(self.count)
        return zeros_R.index_add(0, self.sequence_N, values_N)

    @property
    def sums_R(self) -> Tensor:
        """The log-probability of each sequence."""
        return self.summed(self.log_probs_N)

    @property
    def lengths_R(self) -> Tensor:
        """The learnt tokens of each sequence, at least 1."""
        return self.summed(torch.ones_like(self.log_probs_N)).clamp(min=1)

    @property
    def counted_R(self) -> Tensor:
        """1 for a sequence that has a learnt token, else 0: one that fills a batch up."""
        return self.summed(torch.ones_like(self.log_probs_N)).clamp(max=1)

    @property
    def log_ratios_R(self) -> Tensor:
        """The log-probability of each sequence beyond the reference's."""
        return self.sums_R - self.numbers[REFERENCE]


@dataclass(frozen=True, slots=True)
class Answer:
    """An objective of one micro-batch."""

    value: Tensor
    """Its part of the step's mean loss, 0-d."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Its parts of further means over the step, 0-d each, by name."""


Function = Callable[[Sequences, Any], Answer]
"""(learnt tokens, the settings of the row): an objective."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """An objective of one micro-batch, and how the loss of each token weighs in its gradient."""

    value: Tensor
    """Its part of the step's mean loss, 0-d float64."""
    weights_N: Tensor
    """Its derivative by the loss of each token, −d/d(log-probability), float64."""
    metrics: Mapping[str, Tensor]


@torch.no_grad()
def valued(facts: ObjectiveFacts, sequences: Sequences) -> Answer:
    """Return an objective without its derivative."""
    answer: Answer = resolved(facts.implementation)(sequences, facts.settings)
    return answer


def weighed(facts: ObjectiveFacts, sequences: Sequences) -> Weighed:
    """Return an objective with its derivative by each token's loss."""
    leaf_N = sequences.log_probs_N.detach().requires_grad_()
    with torch.enable_grad():
        leaves = replace(sequences, log_probs_N=leaf_N)
        answer: Answer = resolved(facts.implementation)(leaves, facts.settings)
    (slope_N,) = torch.autograd.grad(answer.value, leaf_N)
    metrics = {name: metric.detach() for name, metric in answer.metrics.items()}
    return Weighed(answer.value.detach(), -slope_N, metrics)


def of_sequences(
    facts: ObjectiveFacts,
    sums_R: npt.NDArray[np.float64],
    tokens_R: npt.NDArray[np.int64],
    numbers: Mapping[str, npt.NDArray[np.float64]],
) -> dict[str, float]:
    """Return an objective of whole sequences as evaluations measure it, as ``loss``, and its
    further means.

    Args:
        sums_R: the log-probability of each sequence.
        tokens_R: learnt tokens of each.
        numbers: numbers of the records by name, [R].
    """
    lengths_R = torch.from_numpy(tokens_R)
    sequence_N = torch.arange(len(tokens_R)).repeat_interleave(lengths_R)
    means_R = torch.from_numpy(sums_R) / lengths_R.clamp(min=1)
    chosen = int(lengths_R[:: facts.group].sum())
    counts = LearntCounts(len(sequence_N), int((lengths_R > 0).sum()), chosen)
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in numbers.items()}
    sequences = Sequences(means_R[sequence_N], sequence_N, len(tokens_R), tensors, counts)
    measured = replace(facts, implementation=facts.evaluated or facts.implementation)
    answer = valued(measured, sequences)
    metrics = {name: float(metric) for name, metric in answer.metrics.items()}
    return {"loss": float(answer.value), **metrics}


def dpo(sequences: Sequences, settings: DpoSettings) -> Answer:
    """Return Direct Preference Optimization's loss: −log σ of the pair's margin of rewards, β times
    the log-ratios to the reference.

    Sources: Rafailov et al. (2023), equation 7; label smoothing: Mitchell, "A note on DPO with
    noisy preferences" (2023), equation 3."""
    rewards_R = settings.beta * sequences.log_ratios_R
    margins_P = rewards_R[::2] - rewards_R[1::2]
    return mean_of_pairs(sequences, _smoothed(margins_P, settings.label_smoothing), rewards_R)


def ipo(sequences: Sequences, settings: IpoSettings) -> Answer:
    """Return IPO's loss: the square of the margin's distance from 1/(2β), of log-ratios a token.

    Source: Azar et al. (2023), equation 17; the mean over tokens as the authors' runs have it."""
    ratios_R = sequences.log_ratios_R
    means_R = ratios_R / sequences.lengths_R
    losses_P = (means_R[::2] - means_R[1::2] - 1 / (2 * settings.beta)) ** 2
    return mean_of_pairs(sequences, losses_P, settings.beta * ratios_R)


def simpo(sequences: Sequences, settings: SimpoSettings) -> Answer:
    """Return SimPO's loss: −log σ of the margin of log-probabilities a token, times β, minus γ.

    Source: Meng et al. (2024), equation 6."""
    rewards_R = settings.beta * sequences.sums_R / sequences.lengths_R
    margins_P = rewards_R[::2] - rewards_R[1::2] - settings.gamma
    losses_P = _smoothed(margins_P, settings.label_smoothing)
    return mean_of_pairs(sequences, losses_P, rewards_R, settings.cpo_alpha)


def cpo(sequences: Sequences, settings: CpoSettings) -> Answer:
    """Return CPO's loss: −log σ of β times the pair's margin of log-probabilities, and the
    cross-entropy of chosen answers.

    Source: Xu et al. (2024), equation 5."""
    rewards_R = settings.beta * sequences.sums_R
    losses_P = _smoothed(rewards_R[::2] - rewards_R[1::2], settings.label_smoothing)
    return mean_of_pairs(sequences, losses_P, rewards_R, settings.cpo_alpha)


def orpo(sequences: Sequences, settings: OrpoSettings) -> Answer:
    """Return ORPO's loss: the cross-entropy of chosen answers, and λ times −log σ of the log odds
    ratio, of log-probabilities a token.

    Source: Hong et al. (2024), equations 6 and 7."""
    means_R = (sequences.sums_R / sequences.lengths_R).clamp(max=-LEAST_MISS)
    odds_R = means_R - _log1mexp(means_R)
    losses_P = -settings.beta * F.logsigmoid(odds_R[::2] - odds_R[1::2])
    return mean_of_pairs(sequences, losses_P, settings.beta * means_R, 1.0)


def kto(sequences: Sequences, settings: KtoSettings) -> Answer:
    """Return KTO's loss: one minus σ of the distance of a log-ratio from the baseline, above it for
    answers that are desirable and below it for others.

    The baseline is the step's: the mean log-ratio of answers to other prompts, at least 0.

    Source: Ethayarajh et al. (2024), equation 8."""
    rewards_R = settings.beta * sequences.log_ratios_R
    baseline_R = settings.beta * sequences.numbers[BASELINE]
    desirable_R = sequences.numbers["desirable"] > 0
    sign_R = torch.where(desirable_R, 1.0, -1.0).to(rewards_R.dtype)
    weight_R = torch.where(desirable_R, settings.desirable_weight, settings.undesirable_weight)
    losses_R = weight_R * torch.sigmoid(sign_R * (baseline_R - rewards_R))
    counted_R = sequences.counted_R
    count = max(sequences.step.sequences, 1)
    right_R = (sign_R * (rewards_R - baseline_R) > 0).to(losses_R.dtype)
    metrics = {
        "reward_accuracy": (right_R * counted_R).sum() / count,
        "margin": (sign_R * (rewards_R - baseline_R) * counted_R).sum() / count,
    }
    return Answer((losses_R * counted_R).sum() / count, metrics)


def policy_gradient(sequences: Sequences, settings: PolicyGradientSettings) -> Answer:
    """Return the clipped surrogate of answers that were scored: of each token's ratio to the policy
    that wrote it, or of a sequence's. Without old log-probabilities the policy that wrote them is
    this one.

    Sources: Schulman et al. (2017), equation 7; Shao et al. (2024, GRPO), equation 3; Zheng et al.
    (2025, GSPO), equation 7; Yu et al. (2025, DAPO), equation 8; Ahmadian et al. (2024, RLOO)."""
    log_probs_N = sequences.log_probs_N
    old_N = sequences.numbers.get("old_log_probabilities", log_probs_N.detach())
    log_ratios_N = log_probs_N - old_N
    if settings.loss_type == "rloo":
        log_ratios_R = sequences.summed(log_ratios_N)
        losses_R, clipped_R = _clipped(log_ratios_R, sequences.numbers["advantages"], settings)
        counted_R = sequences.counted_R / max(sequences.step.sequences, 1)
        return Answer((losses_R * counted_R).sum(), {"clipped": (clipped_R * counted_R).sum()})
    if settings.importance_sampling_level == "sequence":
        means_R = sequences.summed(log_ratios_N) / sequences.lengths_R
        log_ratios_N = means_R[sequences.sequence_N]
    advantages_N = sequences.numbers["advantages"][sequences.sequence_N]
    losses_N, clipped_N = _clipped(log_ratios_N, advantages_N, settings)
    if settings.loss_type == "dapo":
        value = losses_N.sum() / max(sequences.step.tokens, 1)
    elif settings.loss_type == "grpo":
        means_R = sequences.summed(losses_N) / sequences.lengths_R
        value = means_R.sum() / max(sequences.step.sequences, 1)
    else:
        places = sequences.step.sequences * settings.max_completion_length
        value = losses_N.sum() / max(places, 1)
    return Answer(value, {"clipped": clipped_N.sum() / max(sequences.step.tokens, 1)})


def weighted_cross_entropy(sequences: Sequences, _settings: Any) -> Answer:
    """Return the cross-entropy of scored answers, a mean over tokens, each weighed by its answer's
    advantage: held-out answers have no policy that wrote them to compare with."""
    advantages_N = sequences.numbers["advantages"][sequences.sequence_N]
    sums = (advantages_N * sequences.log_probs_N).sum()
    return Answer(-sums / max(sequences.step.tokens, 1))


def _clipped(
    log_ratios: Tensor, advantages: Tensor, settings: PolicyGradientSettings
) -> tuple[Tensor, Tensor]:
    """Return the loss of each ratio, and 1 where it is clipped, else 0."""
    ratios = log_ratios.exp()
    least = 1 - settings.epsilon
    largest = 1 + (settings.epsilon_high or settings.epsilon)
    inside = ratios.clamp(least, largest)
    bounded = ratios.clamp(max=settings.delta) if settings.delta else ratios
    losses = -torch.minimum(bounded * advantages, inside * advantages)
    falls = (ratios < least) & (advantages < 0)
    rises = (ratios > largest) & (advantages > 0)
    return losses, (falls | rises).to(losses.dtype)


def _smoothed(margins_P: Tensor, smoothing: float) -> Tensor:
    """Return −log σ(margin), with a share of the pairs in the other order."""
    return -(1 - smoothing) * F.logsigmoid(margins_P) - smoothing * F.logsigmoid(-margins_P)


def mean_of_pairs(
    sequences: Sequences, losses_P: Tensor, rewards_R: Tensor, alpha: float = 0.0
) -> Answer:
    """Return a mean over the step's pairs, and ``alpha`` times the cross-entropy of its chosen
    answers, a mean over their tokens."""
    pairs = max(sequences.step.sequences // 2, 1)
    counted_P = sequences.counted_R[::2] * sequences.counted_R[1::2]
    value = (losses_P * counted_P).sum() / pairs
    if alpha:
        chosen_N = sequences.sequence_N % 2 == 0
        tokens = max(sequences.step.chosen_tokens, 1)
        value = value - alpha * sequences.log_probs_N[chosen_N].sum() / tokens
    margins_P = rewards_R[::2] - rewards_R[1::2]
    right_P = (margins_P > 0).to(margins_P.dtype)
    metrics = {
        "reward_accuracy": (right_P * counted_P).sum() / pairs,
        "margin": (margins_P * counted_P).sum() / pairs,
    }
    return Answer(value, metrics)


def _log1mexp(log_probs: Tensor) -> Tensor:
    """Return log(1 − exp(x)) of x < 0, without cancellation at either end (Mächler, 2012)."""
    is_small = log_probs > -0.6931471805599453
    inner = torch.where(is_small, log_probs, torch.full_like(log_probs, -0.5))
    outer = torch.where(is_small, torch.full_like(log_probs, -1.0), log_probs)
    return torch.where(is_small, (-torch.expm1(inner)).log(), torch.log1p(-outer.exp()))

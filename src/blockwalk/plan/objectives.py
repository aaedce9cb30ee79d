"""The table of objectives: what a training step makes of the log-probabilities of its learnt
tokens.

A row says what data it needs, how many neighbouring rows of a batch are one example, and which
function computes it. The functions stand in :mod:`blockwalk.estimators.objectives`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from blockwalk.plan.refusal import Refusals, nothing
from blockwalk.plan.row_settings import setting
from blockwalk.plan.table import Table

SFT = "sft"
"""The objective of plain fine-tuning: the loss itself, a mean over learnt tokens."""
PREFIX = "objective."
"""The beginning of the names of a batch's entries that an objective reads."""
ROW = f"{PREFIX}row"
"""The batch's entry with each row's number in its data set, int64 [rows]."""
REFERENCE = "reference_log_probabilities"
"""The number of a row that the reference answers: the sum over its learnt tokens."""
BASELINE = "baseline"
"""The number of a row that the step answers: KTO's mean log-ratio of answers to other prompts."""


@dataclass(frozen=True, slots=True)
class ObjectiveFacts:
    """One objective, as planning knows it."""

    implementation: Any = field(default=None, repr=False)
    """The function that computes it, or its place as ``module:name``: a
    :data:`~blockwalk.estimators.objectives.Function`. None: the loss itself, summed over tokens."""
    evaluated: Any = field(default=None, repr=False)
    """The function of whole sequences that evaluations measure in its place; None: the same."""
    group: int = 1
    """Neighbouring rows of a batch that are one example: 2 of a pair, the chosen row first."""
    numbers: tuple[str, ...] = ()
    """Names of the numbers that a record must bring, one a row."""
    token_numbers: tuple[str, ...] = ()
    """Names of the numbers that a record may bring, one a learnt token."""
    reference: bool = False
    """True where it compares with the log-probabilities of a reference."""
    mean_over: str = "tokens"
    """The unit that the step's loss is a mean over: tokens, sequences or pairs."""
    baseline: bool = False
    """True where it needs the step's mean log-ratio of answers to other prompts."""
    metrics: tuple[str, ...] = ()
    """Names of the further means over a step that its function answers."""
    settings: Any = None
    """The value of the row's settings."""
    against: Refusals = field(default=nothing, repr=False)
    """Further refusals of plans with it."""
    help: str = ""

    def refuses(self, plan: Any) -> Iterator[str]:
        """Yield what speaks against a plan with this objective."""
        if self.of_log_probabilities:
            yield from against_log_probabilities(plan)
        yield from self.against(plan)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the entries that a step's batch must have for it."""
        of_step = (REFERENCE,) * self.reference + (BASELINE,) * self.baseline
        return tuple(f"{PREFIX}{name}" for name in (*self.numbers, *of_step))

    @property
    def of_log_probabilities(self) -> bool:
        """True where it is a function of log-probabilities, and not the loss itself."""
        return self.implementation is not None


@dataclass(frozen=True)
class DpoSettings:
    """Settings of DPO."""

    beta: float = setting(
        0.1,
        above=0,
        help="The strength of the pull to the reference: a reward is beta times the log-ratio.",
    )
    label_smoothing: float = setting(
        0.0, least=0, below=0.5, help="The share of pairs whose order is taken to be wrong (cDPO)."
    )


@dataclass(frozen=True)
class IpoSettings:
    """Settings of IPO."""

    beta: float = setting(
        0.1, above=0, help="The regularisation: margins a token are pulled to 1 / (2 beta)."
    )


@dataclass(frozen=True)
class CpoSettings:
    """Settings of CPO."""

    beta: float = setting(0.1, above=0, help="The factor on the log-probabilities of a pair.")
    label_smoothing: float = setting(
        0.0, least=0, below=0.5, help="The share of pairs whose order is taken to be wrong."
    )
    cpo_alpha: float = setting(
        1.0, least=0, help="The weight of the chosen answers' cross-entropy beside it."
    )


@dataclass(frozen=True)
class SimpoSettings:
    """Settings of SimPO."""

    beta: float = setting(0.1, above=0, help="The factor on log-probabilities a token.")
    gamma: float = setting(0.5, least=0, help="The margin that a pair's rewards shall have.")
    label_smoothing: float = setting(
        0.0, least=0, below=0.5, help="The share of pairs whose order is taken to be wrong."
    )
    cpo_alpha: float = setting(
        0.0, least=0, help="The weight of the chosen answers' cross-entropy beside it."
    )


@dataclass(frozen=True)
class OrpoSettings:
    """Settings of ORPO."""

    beta: float = setting(0.1, above=0, help="The weight of the odds ratio, the paper's lambda.")


@dataclass(frozen=True)
class KtoSettings:
    """Settings of KTO."""

    beta: float = setting(0.1, above=0, help="The factor on log-ratios to the reference.")
    desirable_weight: float = setting(1.0, least=0, help="The weight of desirable answers.")
    undesirable_weight: float = setting(1.0, least=0, help="The weight of undesirable answers.")


@dataclass(frozen=True)
class PolicyGradientSettings:
    """Settings of the clipped policy gradient."""

    loss_type: str = setting(
        "dapo",
        words=("dapo", "grpo", "dr_grpo", "rloo"),
        help="The mean: over tokens (dapo), or over sequences. Of these grpo takes each by its"
        " mean, dr_grpo by its sum over max_completion_length, rloo as one ratio.",
    )
    importance_sampling_level: str = setting(
        "token",
        words=("token", "sequence"),
        help="The ratio that is clipped: of each token, or of a sequence by its mean (GSPO).",
    )
    epsilon: float = setting(0.2, least=0, below=1, help="The ratio may fall to 1 - epsilon.")
    epsilon_high: float = setting(
        0.0, least=0, help="The ratio may rise to 1 + epsilon_high; 0: as far as epsilon says."
    )
    delta: float = setting(
        0.0, least=0, help="The most that any ratio counts for, two-sided clipping; 0: none."
    )
    max_completion_length: int = setting(
        256, least=1, help="dr_grpo: the tokens that each sequence's sum is divided by."
    )


MODULE = "blockwalk.estimators.objectives"
REFERENCE_HELP = "against the model before its first step"


def _row(function: str, settings: Any, **facts: Any) -> ObjectiveFacts:
    facts.setdefault("metrics", ("reward_accuracy", "margin"))
    return ObjectiveFacts(f"{MODULE}:{function}", settings=settings, **facts)


def _dpo(settings: DpoSettings) -> ObjectiveFacts:
    return _row(
        "dpo",
        settings,
        group=2,
        reference=True,
        mean_over="pairs",
        help=f"pairs of answers, {REFERENCE_HELP}",
    )


def _ipo(settings: IpoSettings) -> ObjectiveFacts:
    return _row(
        "ipo",
        settings,
        group=2,
        reference=True,
        mean_over="pairs",
        help="pairs, pulled to a margin a token",
    )


def _simpo(settings: SimpoSettings) -> ObjectiveFacts:
    return _row(
        "simpo",
        settings,
        group=2,
        mean_over="pairs",
        help="pairs, by log-probabilities a token and without a reference",
    )


def _orpo(settings: OrpoSettings) -> ObjectiveFacts:
    return _row(
        "orpo",
        settings,
        group=2,
        mean_over="pairs",
        help="pairs, fine-tuning and an odds ratio at once, without a reference",
    )


def _kto(settings: KtoSettings) -> ObjectiveFacts:
    return _row(
        "kto",
        settings,
        numbers=("desirable",),
        reference=True,
        mean_over="sequences",
        baseline=True,
        help="single answers, each desirable or not",
    )


def _cpo(settings: CpoSettings) -> ObjectiveFacts:
    return _row(
        "cpo",
        settings,
        group=2,
        mean_over="pairs",
        help="pairs and the chosen answers' cross-entropy, without a reference",
    )


def _policy_gradient(settings: PolicyGradientSettings) -> ObjectiveFacts:
    return _row(
        "policy_gradient",
        settings,
        evaluated=f"{MODULE}:weighted_cross_entropy",
        numbers=("advantages",),
        token_numbers=("old_log_probabilities",),
        metrics=("clipped",),
        mean_over="tokens" if settings.loss_type == "dapo" else "sequences",
        help="answers with advantages that another program scored (GRPO, RLOO)",
    )


def against_log_probabilities(plan: Any) -> Iterator[str]:
    """Yield what speaks against an objective of log-probabilities in a plan."""
    name = plan.objective.partition("(")[0]
    if not plan.loss_facts.log_probabilities:
        yield (
            f"objective is {name}, a function of log-probabilities, and loss is {plan.loss}, which"
            " has none of single tokens; set loss: chunked"
        )
    if plan.ranks_words:
        yield (
            f"objective is {name}, and zo.objective is {plan.zo.objective}: both say what a step"
            " improves; set zo.objective: loss, or objective: sft"
        )
    if plan.mesh.context > 1:
        yield (
            f"objective is {name}, which needs the log-probability of a whole sequence, and"
            f" mesh.context is {plan.mesh.context}: each rank has a part of it; set mesh.context: 1"
        )


OBJECTIVES: Table[ObjectiveFacts] = Table(
    "objective", {SFT: ObjectiveFacts(help="the loss of single answers")}
)
"""Objectives by name."""
for _name, _function, _settings in (
    ("dpo", _dpo, DpoSettings),
    ("ipo", _ipo, IpoSettings),
    ("simpo", _simpo, SimpoSettings),
    ("orpo", _orpo, OrpoSettings),
    ("kto", _kto, KtoSettings),
    ("cpo", _cpo, CpoSettings),
    ("policy_gradient", _policy_gradient, PolicyGradientSettings),
):
    OBJECTIVES.register(_name, _function, _settings)

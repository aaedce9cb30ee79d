"""The table of zeroth-order kinds: a kind is a row here and a file of its name in
:mod:`blockwalk.estimators.zeroth_order`.

The row says which forwards a step has and what lies beside the weights; the file says what the
losses are turned into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from blockwalk.plan.choices import OptimizerSettings, ZerothOrderSettings
from blockwalk.plan.placement import Codec
from blockwalk.plan.refusal import Refusals, nothing
from blockwalk.plan.row_settings import require_fields
from blockwalk.plan.table import Table
from blockwalk.plan.update_rules import RULES

AT_REST = (0, 0.0)
"""The forward that sees the weights as they are, as (query, sign)."""


@dataclass(frozen=True, slots=True)
class KindFacts:
    """One zeroth-order kind, as planning knows it."""

    signs: tuple[float, ...]
    """The sides of each query's perturbation that have a forward."""
    at_rest: bool = False
    """True where a step begins with the forward of the weights as they are."""
    least_queries: int = 1
    because: str = ""
    """The reason for ``least_queries``, where that is more than 1."""
    states: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Tensors beside each trainable, of its shape, that forwards read: the field of ``zo.*`` that
    says its codec, and the value that it begins with."""
    settings: tuple[str, ...] = ()
    """Further fields of ``zo.*`` that an update reads."""
    implementation: Any = None
    """The kind's ``Kind``, of one registered from elsewhere; None: that of the file of its name in
    :mod:`blockwalk.estimators.zeroth_order`."""
    against: Refusals = nothing
    """Further refusals of plans with it."""
    help: str = ""

    def __post_init__(self) -> None:
        require_fields("zo", ZerothOrderSettings, self.settings)

    def refuses(self, plan: Any) -> Iterator[str]:
        """Yield what speaks against a plan with this kind."""
        zo = plan.zo
        if plan.estimator.facts.walks_back:
            return
        if zo.queries < self.least_queries:
            yield (
                f"zo.queries is {zo.queries}, and {zo.kind} needs at least {self.least_queries}:"
                f" it {self.because}"
            )
        for setting, _ in self.states.values():
            codec = getattr(zo, setting)
            if codec.facts.dtype is None:
                yield (
                    f"zo.{setting} is {codec}; what forwards read beside the weights is kept in"
                    " fp32, bf16 or fp16"
                )
        yield from self.against(plan)

    def passes(self, queries: int) -> tuple[tuple[int, float], ...]:
        """(query, sign) of each forward of a step, in the program's order."""
        return (AT_REST,) * self.at_rest + tuple(
            (query, sign) for query in range(queries) for sign in self.signs
        )


KINDS = Table(
    "zo.kind",
    {
        "spsa": KindFacts((1.0, -1.0), help="MeZO's two-point estimate"),
        "fzoo": KindFacts(
            (1.0,), True, 2, "divides by the standard deviation of its losses (8 in the paper)"
        ),
        "hizoo": KindFacts(
            (1.0, -1.0),
            True,
            states={"hessian": ("hessian_codec", 1.0)},
            settings=("hessian_alpha",),
        ),
    },
)
"""Zeroth-order kinds by ``zo.kind``."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """One target of zeroth order: the values that are trained."""

    scales: bool = False
    """True where the scales of codes are perturbed and trained, and the codes stay."""
    refuses: Refusals = nothing
    help: str = ""


def _against_scales(plan: Any) -> Iterator[str]:
    one_scale = len(plan.trainable.codec.facts.scales) == 1
    states = plan.kind.states or plan.update_rule.states
    if not one_scale or not plan.noise.elementwise or states:
        yield (
            "zo.target: scales is of codes with one scale a row or group, and of noise and rules"
            f" without more beside them; it has trainable: {plan.trainable}, {plan.zo.noise},"
            f" {plan.zo.kind}, {plan.optimizer.name}; use int8, fp8, int4 or nf4, gaussian or"
            " rademacher, spsa or fzoo, sgd or sign"
        )


TARGETS = Table(
    "zo.target",
    {
        "weights": TargetFacts(),
        "scales": TargetFacts(
            scales=True,
            refuses=_against_scales,
            help="those of matrices whose 4- or 8-bit codes stay as they are",
        ),
    },
)
"""Targets by ``zo.target``."""


def states_beside(
    zo: ZerothOrderSettings, optimizer: OptimizerSettings
) -> dict[str, tuple[Codec, float]]:
    """Return the tensors that a zeroth-order run keeps beside each trainable, the kind's and the
    rule's: codec and first value."""
    of_kind = {
        name: (getattr(zo, codec), begin) for name, (codec, begin) in KINDS[zo.kind].states.items()
    }
    return {**of_kind, **dict.fromkeys(RULES[optimizer.name].states, (Codec.FP32, 0.0))}

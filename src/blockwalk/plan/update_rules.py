"""The table of update rules: a rule is a row, and a function of its name in
:mod:`blockwalk.numerics.updates` or one that the row brings.

Nothing else names a rule: plans, programs, estimates and the engines read its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.placement import NOBODY
from blockwalk.plan.refusal import Refusals, nothing
from blockwalk.plan.row_settings import require_fields
from blockwalk.plan.table import Table, spoken

ELEMENTS = "elements"
MATRICES = "matrices"


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """One update rule, as planning knows it."""

    states: tuple[str, ...] = ()
    """Tensors kept from step to step beside each trainable: float32, of its shape, zero at
    first."""
    settings: tuple[str, ...] = ("weight_decay",)
    """The fields of ``optimizer.*`` that the rule reads. Settings of its own are given to
    :meth:`blockwalk.plan.table.Table.register`."""
    linear: bool = False
    """True where the update is θ ← (1 − lr·weight_decay)·θ − lr·g: a sum of directions may be
    applied one by one."""
    zeroth_order_only: bool = False
    needs: str = ELEMENTS
    """The parts that a call needs whole: *elements*, so that any range of a parameter may be
    updated by itself; or *matrices*, each parameter in its shape."""
    implementation: Any = None
    """The function that applies it, of a rule registered from elsewhere; None: that of its name in
    :mod:`blockwalk.numerics.updates`."""
    against: Refusals = nothing
    """Further refusals of plans with it."""
    help: str = ""

    def __post_init__(self) -> None:
        require_fields("optimizer", OptimizerSettings, self.settings)
        if self.needs not in (ELEMENTS, MATRICES):
            raise ValueError(f"needs is {self.needs!r}; it must be {ELEMENTS} or {MATRICES}")
        if self.linear and self.needs == MATRICES:
            raise ValueError(f"a linear rule is one of {ELEMENTS}: leave needs out")

    def refuses(self, plan: Any) -> Iterator[str]:
        """Yield what speaks against a plan with this rule."""
        name = plan.optimizer.name
        if self.zeroth_order_only and plan.estimator.facts.walks_back:
            first_order = (rule for rule, facts in RULES.items() if not facts.zeroth_order_only)
            yield f"optimizer.name: {name} is a zeroth-order rule; use {', '.join(first_order)}"
        if len(self.states) > 1 and plan.home.outlives(plan):
            stateless = (rule for rule, facts in RULES.items() if not facts.states)
            yield (
                f"{name} keeps {' and '.join(self.states)} beside each trainable: use it with"
                f" resident trainables (LoRA), or optimizer.name: {' or '.join(stateless)}"
            )
        if self.needs == MATRICES:
            yield from _against_slices(plan)
        yield from self.against(plan)


def _against_slices(plan: Any) -> Iterator[str]:
    """Yield what speaks against a rule that needs whole matrices: slices that cut through them."""
    name = f"optimizer.name is {plan.optimizer.name}, which needs whole {MATRICES}"
    elements = (rule for rule, facts in RULES.items() if facts.needs == ELEMENTS)
    instead = f"use a method of one process (plain, mebp), or optimizer.name: {spoken(elements)}"
    if not plan.estimator.facts.walks_back:
        yield f"{name}, and method {plan.method!r} updates rows a range at a time; {instead}"
    for kind in ("trainable", "gradient", "optimizer_state"):
        group = getattr(plan, kind).group
        if group != NOBODY:
            yield f"{name}, and {kind} is cut into slices over {group}; {instead}"


RULES: Table[RuleFacts] = Table(
    "optimizer.name",
    {
        "adamw": RuleFacts(("exp_avg", "exp_avg_sq"), ("betas", "eps", "weight_decay")),
        "sgd": RuleFacts(linear=True),
        "momentum": RuleFacts(("momentum_buffer",), ("momentum", "weight_decay")),
        "sign": RuleFacts(zeroth_order_only=True, help="zeroth order alone"),
    },
)
"""Update rules by ``optimizer.name``."""

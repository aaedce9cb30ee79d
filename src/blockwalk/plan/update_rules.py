"""The table of update rules: a rule is a row here and a function of its name in
:mod:`blockwalk.numerics.updates`.

Nothing else names a rule: plans, programs, estimates and the engines read its row.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.table import Table


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """One update rule, as planning knows it."""

    states: tuple[str, ...] = ()
    """Tensors kept from step to step beside each trainable: float32, of its shape, zero at
    first."""
    settings: tuple[str, ...] = ("weight_decay",)
    """The fields of ``optimizer.*`` that the rule reads."""
    linear: bool = False
    """True where the update is θ ← (1 − lr·weight_decay)·θ − lr·g: a sum of directions may be
    applied one by one."""
    zeroth_order_only: bool = False
    help: str = ""


RULES = Table(
    "optimizer.name",
    {
        "adamw": RuleFacts(("exp_avg", "exp_avg_sq"), ("betas", "eps", "weight_decay")),
        "sgd": RuleFacts(linear=True),
        "momentum": RuleFacts(("momentum_buffer",), ("momentum", "weight_decay")),
        "sign": RuleFacts(zeroth_order_only=True, help="zeroth order alone"),
    },
)
"""Update rules by ``optimizer.name``."""

"""The table of zeroth-order kinds: a kind is a row here and a file of its name in
:mod:`blockwalk.estimators.zeroth_order`.

The row says which forwards a step has and what lies beside the weights; the file says what the
losses are turned into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blockwalk.plan.choices import OptimizerSettings, ZerothOrderSettings
from blockwalk.plan.placement import Codec
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
    help: str = ""

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


def states_beside(
    zo: ZerothOrderSettings, optimizer: OptimizerSettings
) -> dict[str, tuple[Codec, float]]:
    """Return the tensors that a zeroth-order run keeps beside each trainable, the kind's and the
    rule's: codec and first value."""
    of_kind = {
        name: (getattr(zo, codec), begin) for name, (codec, begin) in KINDS[zo.kind].states.items()
    }
    return {**of_kind, **dict.fromkeys(RULES[optimizer.name].states, (Codec.FP32, 0.0))}

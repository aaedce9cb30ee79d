"""The table of zeroth-order noises: a noise is a row, and a maker in
:mod:`blockwalk.estimators.zeroth_order.draws` or one that the row brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blockwalk.plan.choices import ZerothOrderSettings
from blockwalk.plan.refusal import Refusals, must_be, nothing
from blockwalk.plan.row_settings import require_fields
from blockwalk.plan.table import Reference, Table


@dataclass(frozen=True, slots=True)
class NoiseFacts:
    """One noise, as planning knows it."""

    settings: tuple[str, ...] = ()
    """The fields of ``zo.*`` that its draws read."""
    elementwise: bool = True
    """True where each element is drawn by itself, by a forward as it reads it."""
    own_seeds: bool = False
    """True where each step has a seed of its own, as the original draws it from numpy's
    generator."""
    beside: bool = False
    """True where a forward adds products with thin factors of z to those with the weight, which all
    forwards have in common."""
    in_place: bool = False
    """True where weights are perturbed where they lie: the original's arithmetic."""
    element: str = "gaussian"
    """The distribution of an element that is drawn by itself, as kernels know it."""
    estimator: str = ""
    """The estimator that computes with it, where it needs one of its own in the method's place."""
    replay: Reference = ""
    """A function of (cut model, trainables by name, entries, rule) that replays a ledger, where its
    draws go through all parameters at once."""
    draws_whole: bool = False
    """True where all of a parameter's draws lie in memory at once."""
    implementation: Any = None
    """The maker of the noise, of one registered from elsewhere; None: that of its name in
    :mod:`blockwalk.estimators.zeroth_order.draws`."""
    against: Refusals = nothing
    """The refusals of plans with it, beside those for settings that it does not read."""
    help: str = ""

    def __post_init__(self) -> None:
        require_fields("zo", ZerothOrderSettings, self.settings)

    def refuses(self, plan: Any) -> Iterator[str]:
        """Yield what speaks against a plan with this noise."""
        no_use = f"zo.noise: {plan.zo.noise} has no use for it"
        for setting, unset in (("seed_pool", 0), ("noise_rank", 1), ("noise_interval", 1)):
            if setting not in self.settings:
                yield from must_be(plan, f"zo.{setting}", unset, no_use)
        yield from self.against(plan)

    @property
    def drawn_in_forwards(self) -> bool:
        """True where a forward draws z in the weight's size."""
        return not (self.in_place or self.beside)


NOISES = Table(
    "zo.noise",
    {
        "gaussian": NoiseFacts(("seed_pool",)),
        "rademacher": NoiseFacts(("seed_pool",), element="rademacher"),
        "lowrank": NoiseFacts(
            ("seed_pool", "noise_rank", "noise_interval"),
            elementwise=False,
            beside=True,
            help="a matrix's noise is a product of thin factors",
        ),
        "torch": NoiseFacts(
            elementwise=False, own_seeds=True, draws_whole=True, help="the original's draws"
        ),
    },
)
"""Noises by ``zo.noise``."""

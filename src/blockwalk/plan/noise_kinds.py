"""The table of zeroth-order noises: a noise is a row, and a maker in
:mod:`blockwalk.estimators.zeroth_order.draws`."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.table import Table


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
    draws_whole: bool = False
    """True where all of a parameter's draws lie in memory at once."""
    help: str = ""

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
        "mezo": NoiseFacts(
            elementwise=False,
            own_seeds=True,
            in_place=True,
            help="its draws and its in-place arithmetic",
        ),
    },
)
"""Noises by ``zo.noise``."""

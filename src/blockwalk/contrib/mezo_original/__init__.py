"""The original MeZO, bit for bit: weights perturbed and updated where they lie (``zo.noise:
mezo``).

These are its rows; ``turns`` is its program, ``in_place`` its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from blockwalk.plan.choices import Timing
from blockwalk.plan.estimators import ESTIMATORS
from blockwalk.plan.noise_kinds import NOISES, NoiseFacts
from blockwalk.plan.placement import Placement
from blockwalk.plan.refusal import must_be
from blockwalk.program.op_kinds import OP_KINDS, OpFacts

NAME = "mezo-original"


def _against_in_place(plan: Any) -> Iterator[str]:
    """Yield the settings that differ from those of the original, whose arithmetic is reproduced."""
    original = "zo.noise: mezo reproduces the original's"
    in_place = "zo.noise: mezo perturbs the weights"
    for setting, value, because in (
        ("update.timing", Timing.STEP, f"{original} arithmetic, in place over the whole model"),
        ("zo.kind", "spsa", f"{original} two-point estimate"),
        ("zo.queries", 1, f"{original} two-point estimate"),
        ("trainable", Placement(), f"{in_place} where they lie"),
        ("optimizer.name", "sgd", f"{original} update"),
        ("optimizer.max_grad_norm", 0, f"{original} update"),
        ("zo.rounding", "nearest", f"{original} arithmetic"),
        ("mesh.perturb", 1, f"{in_place} one forward after the other"),
    ):
        yield from must_be(plan, setting, value, because)


def _against_naming_it(_plan: Any) -> Iterator[str]:
    """Yield what speaks against a plan that names the estimator itself."""
    yield f"estimator is {NAME}, which zo.noise: mezo brings with it; set estimator: zeroth-order"


OP_KINDS.register(
    "PERTURB",
    OpFacts(
        doing="perturbing",
        draws=True,
        help="The resident weights are perturbed in place, all of them in one pass of draws.",
    ),
)
OP_KINDS.register(
    "UPDATE_ALL",
    OpFacts(
        doing="updating",
        draws=True,
        help="The resident weights are updated in place, all of them in one pass of draws.",
    ),
)
OP_KINDS.register(
    "REPLAY",
    OpFacts(
        help=(
            "The steps of an earlier process are done again on all weights, perturbations "
            "and updates."
        )
    ),
)
ESTIMATORS.register(
    NAME,
    replace(
        ESTIMATORS["zeroth-order"],
        turns=f"{__name__}.turns:turns",
        make=f"{__name__}.in_place:make",
        refuses=_against_naming_it,
        help="brought by zo.noise: mezo",
    ),
)
NOISES.register(
    "mezo",
    NoiseFacts(
        elementwise=False,
        own_seeds=True,
        in_place=True,
        estimator=NAME,
        implementation="blockwalk.estimators.zeroth_order.draws:stream",
        against=_against_in_place,
        replay=f"{__name__}.in_place:replayed",
        help="its draws and its in-place arithmetic",
    ),
)

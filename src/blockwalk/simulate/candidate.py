"""A plan that was looked at, and what it takes. No torch."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import dataclass

from blockwalk.plan.plan import Plan
from blockwalk.plan.words import duration
from blockwalk.program.program import Pool, human_bytes
from blockwalk.simulate.simulator import Simulation

ZEROTH_ORDER_STEPS = 44
"""Two-point steps that make the progress of one step with exact gradients, as measured:
``benchmarks/zo_converge.py``, a small Llama on sentiment, batch 16, three seeds at the best of the
learning rates that were tried. 500 steps of two-point SPSA brought the held-out loss from 0.87 to
0.47; exact gradients (AdamW) were there, by interpolation, after 11."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan, what it takes, and why it is left out (empty: it is not)."""

    plan: Plan
    label: str
    peaks: Counter[Pool]
    simulation: Simulation | None = None
    refused: str = ""

    @property
    def progress(self) -> float:
        """Tokens per second, those of zeroth-order steps at their measured worth."""
        if self.simulation is None:
            return 0.0
        steps = 1 if self.plan.estimator.facts.walks_back else ZEROTH_ORDER_STEPS
        return self.simulation.tokens_per_second / steps

    @property
    def a_token(self) -> float:
        """Seconds of a token; infinite where the plan does not fit."""
        simulation = self.simulation
        return math.inf if simulation is None else simulation.seconds / simulation.tokens

    def line(self) -> str:
        """Return the candidate as a row of a table, of 100 columns; a reason against it goes on
        below."""
        device, host = (human_bytes(self.peaks[pool]) for pool in (Pool.DEVICE, Pool.HOST))
        memory = f"{self.label:<46} {device:>9} {host:>9}"
        if self.simulation is None:
            return textwrap.fill(f"{memory}  {self.refused}", 100, subsequent_indent=" " * 8)
        speed = f"{self.simulation.tokens_per_second:,.0f}"
        return f"{memory} {duration(self.simulation.seconds):>13} {speed:>15}"

    def bound(self) -> str:
        """Return what bounds the step of a candidate that fits, in a line."""
        if self.simulation is None:
            return ""
        mfu = 100 * self.simulation.mfu
        return f"   {self.label}: {self.simulation.bottleneck()}; MFU {mfu:.1f}%"

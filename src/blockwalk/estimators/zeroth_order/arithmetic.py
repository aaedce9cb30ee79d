"""The arithmetic of a zeroth-order step: the perturbation under which a forward reads weights, and
how the step's entry changes them.

:class:`PerturbedCopies` perturbs what forwards read, and updates a unit when the program says so.
An arithmetic of another kind, with ops of its own, is given to
:class:`~blockwalk.estimators.zeroth_order.estimator.ZerothOrder` in its place."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from blockwalk.engine.bucket_tensors import STATE
from blockwalk.engine.buckets import Buckets
from blockwalk.engine.engine import Engine
from blockwalk.engine.home import Job
from blockwalk.estimators.zeroth_order.kind import Numbers
from blockwalk.estimators.zeroth_order.perturbed_units import PerturbedUnits
from blockwalk.estimators.zeroth_order.perturbed_weight import Perturbation
from blockwalk.estimators.zeroth_order.step_entries import StepEntries
from blockwalk.estimators.zeroth_order.step_state import StepState
from blockwalk.estimators.zeroth_order.updates import (
    ZerothOrderRule,
    apply_all_,
    fuses,
    reserve,
)
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.sizes import UPDATE_ELEMENTS
from blockwalk.program.program import Op


class Arithmetic(Protocol):
    """The way in which weights are perturbed and updated."""

    units: PerturbedUnits

    def perturbation(self, forward_pass: int, state: StepState) -> Perturbation:
        """Return the perturbation under which a forward reads the weights."""

    def scalars(self, losses: tuple[float, ...], state: StepState) -> tuple[Numbers, Numbers]:
        """Return the projected gradients and the curvatures of a step's queries, from the losses of
        its forwards."""

    def prepare(self, op: Op, state: StepState | None) -> Job:
        """Return the work of an op that changes weights: UPDATE, or one of its own."""


class PerturbedCopies:
    """Weights that are perturbed as they are read, and updated in the slot or on the device.

    Args:
        engine: the cut model.
        buckets: the home of its trainables.
        rule: what turns an entry into an update.
        entries: the steps of the run.
    """

    def __init__(
        self, engine: Engine, buckets: Buckets, rule: ZerothOrderRule, entries: StepEntries
    ) -> None:
        self.buckets = buckets
        self.rule = rule
        self.entries = entries
        self.device = engine.device
        self.stochastic = engine.plan.zo.rounding == "stochastic"
        self.units = PerturbedUnits(engine, buckets, rule)
        self.slice_scratch = ScratchArena()
        """Scratch of updates to slices, which run beside the forwards."""
        self._reserve()

    def _reserve(self) -> None:
        """Make what updates work in now: the first one comes with the second step, where nothing is
        to be allocated."""
        fused = fuses(self.rule, self.device)
        for number, unit in enumerate(self.buckets.units):
            scratch = self.slice_scratch if self.buckets.sliced(number) else self.units.scratch
            for param in unit.params:
                layout = param.layout(32)
                if fused and not (layout.groups and is_cpu(self.device)):
                    continue
                state = param.name.partition(STATE)[2]
                reserve(self.rule, state, layout, scratch, self.device)

    def perturbation(self, forward_pass: int, state: StepState) -> Perturbation:
        query, sign = state.passes[forward_pass]
        scale = sign * self.rule.zo.epsilon
        return Perturbation(state.seed, state.request.number, query, scale, self.stochastic)

    def scalars(self, losses: tuple[float, ...], _state: StepState) -> tuple[Numbers, Numbers]:
        return self.rule.kind.scalars(self.rule.zo, losses)

    def prepare(self, op: Op, _state: StepState | None) -> Job:
        return partial(self._update, op.unit)

    @torch.no_grad()
    def _update(self, unit: int) -> None:
        """Apply the entries that a unit has not seen to its copy on the device."""
        buckets = self.buckets
        entries = self.entries.since(buckets.step(unit))
        if buckets.sliced(unit):
            ranges = buckets.ranges(unit, UPDATE_ELEMENTS[self.device.type])
            apply_all_(self.rule, entries, ranges, self.slice_scratch)
        else:
            apply_all_(self.rule, entries, buckets.tensors[unit].items(), self.units.scratch)
        buckets.advance(unit, self.entries.steps)

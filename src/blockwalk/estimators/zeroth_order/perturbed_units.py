"""The trainables of units as forwards read them: under the perturbation of each, never changed
where they lie.

Matrices are perturbed as they are read, a range at a time
(:mod:`blockwalk.estimators.zeroth_order.perturbed_weight`); vectors and odd shapes are copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from blockwalk.engine.bucket_tensors import BucketTensor
from blockwalk.engine.buckets import Buckets
from blockwalk.engine.engine import Engine
from blockwalk.estimators.head import Matrix, Vector
from blockwalk.estimators.zeroth_order.draws import Elementwise
from blockwalk.estimators.zeroth_order.perturbed_weight import (
    Perturbation,
    PerturbedWeight,
    perturbed_at_once,
    with_scales,
)
from blockwalk.estimators.zeroth_order.updates import ZerothOrderRule
from blockwalk.numerics.codecs.weights import DenseWeight, Value, Weight
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.noise.cpu import has_runs
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.model_spec import ParamSpec

NO_STATES: dict[str, BucketTensor] = {}
VECTOR = 1 << 16
"""Elements of a vector at most."""
REST = Perturbation(seed=0, step=0, query=0, scale=0.0)
"""The weights as they are."""


class PerturbedUnits:
    """The trainables of a run's units under any perturbation.

    Args:
        engine: the cut model.
        buckets: the home of its trainables.
        rule: what says the noise and its direction.
    """

    def __init__(self, engine: Engine, buckets: Buckets, rule: ZerothOrderRule) -> None:
        self.engine = engine
        self.buckets = buckets
        self.rule = rule
        self.scratch = ScratchArena()
        self._states = tuple(engine.plan.kind.states)
        self._dtypes = {name: engine.compute_dtype_of(name) for name in buckets.home}
        self._vectors = [
            [p.name for p in engine.trainables(unit) if not read_in_ranges(p)]
            for unit in range(len(engine.spec.units))
        ]
        """The trainables of each unit that are no matrices."""
        self._made: tuple[int, tuple[Perturbation, ...], list[dict[str, Value]]] | None = None
        """The unit and the perturbations that were asked for last, and their answer."""

    def forget(self) -> None:
        """Drop what was made: the weights may have changed since."""
        self._made = None

    def values(
        self, unit: int, perturbations: Sequence[Perturbation], *, copies: bool = False
    ) -> list[dict[str, Value]]:
        """Return a unit's trainables by name, in the compute dtype, under each perturbation. They
        are made for the first micro-batch of a pass and serve all; with ``copies`` a block's are
        all whole, for many of them."""
        key = tuple(perturbations)
        if self._made is None or self._made[:2] != (unit, key):
            values = [
                self._values(unit, perturbation, number, copies)
                for number, perturbation in enumerate(key)
            ]
            self._made = (unit, key, values)
        return self._made[2]

    def _values(
        self, unit: int, perturbation: Perturbation, number: int, copies: bool
    ) -> dict[str, Value]:
        """Return a unit's trainables under one of several perturbations, by its number: matrices as
        they are read, the rest as copies. Those of a compiled block are all whole, in buffers that
        blocks share."""
        compiled = self.engine.plan.compile
        block = 0 < unit < self.engine.cut.epilogue_index
        copied = block and (compiled or copies)
        trainables = self.engine.trainables(unit)
        values: dict[str, Value] = {}
        if not (block and compiled):
            values |= self._vectors_at_once(unit, perturbation, number)
        for place, p in enumerate(trainables):
            if p.name not in values:
                values[p.name] = self._value(p, perturbation, f"whole {place}" if copied else None)
        return values

    def _vectors_at_once(
        self, unit: int, perturbation: Perturbation, number: int
    ) -> dict[str, Tensor]:
        """Return those of a unit's vectors whose numbers are plain and whose noise is drawn by
        element, under a perturbation, in buffers that units share; none where no call serves
        many."""
        names = self._vectors[unit]
        if not (names and perturbation.scale) or self.rule.kind.direction_ is not None:
            return {}
        if perturbation.stochastic or (is_cpu(self.engine.device) and not has_runs()):
            return {}
        tensors = self.buckets.tensors[unit]
        masters = []
        noises = []
        outs: dict[str, Tensor] = {}
        for place, name in enumerate(names):
            master = tensors[name][""]
            noise = perturbation.noise(self.rule.draws, name)
            if not (master.dense and isinstance(noise, Elementwise)):
                continue
            masters.append(master)
            noises.append(noise)
            outs[name] = self._place(f"vector {number} {place}", master, self._dtypes[name])
        if outs:
            scale = 0.0 if self.rule.trains_scales else perturbation.scale
            perturbed_at_once(masters, noises, list(outs.values()), scale)
        return outs

    def _place(self, buffer: str, master: BucketTensor, dtype: torch.dtype) -> Tensor:
        """Return memory for a perturbed copy: a buffer for vectors; what is larger, as experts in
        one tensor, is let go with its unit."""
        shape = master.layout.shape
        if math.prod(shape) > VECTOR:
            return torch.empty(shape, dtype=dtype, device=master.bytes_P.device)
        return self.scratch.take(buffer, *shape, like=master.bytes_P, dtype=dtype)

    def _value(self, param: ParamSpec, perturbation: Perturbation, buffer: str | None) -> Value:
        """Return a trainable under a perturbation: whole in the named buffer, or in whatever form
        takes the least."""
        weight = self.weight(param.name, perturbation)
        master = weight.master
        if not weight.scale and master.dense and master.tensor.dtype == weight.dtype:
            return master.tensor
        if buffer is None:
            return weight.lazily() if read_in_ranges(param) else weight.whole()
        out = self.scratch.take(buffer, *param.shape, like=master.bytes_P, dtype=weight.dtype)
        weight.into(out.view(weight.shape))
        # products by range, whose bits are the same in any copy
        ranges = read_in_ranges(param) and not self.engine.plan.compile
        return DenseWeight(out, weight.dtype) if ranges else out

    def readers(self, perturbation: Perturbation) -> tuple[Matrix, Vector]:
        """Return functions that read the head's matrices and vectors, perturbed where they are
        trained."""
        home = self.buckets.home

        @cache
        def matrix(name: str) -> Weight:
            if name in home:
                return self.weight(name, perturbation).lazily()
            return self.engine.weight(name)

        @cache
        def vector(name: str | None) -> Tensor | None:
            if name in home:
                return self.weight(name, perturbation).whole()
            return self.engine.vector(name)

        return matrix, vector

    def weight(self, name: str, perturbation: Perturbation) -> PerturbedWeight:
        """Return one trainable under a perturbation."""
        tensors = self.buckets.tensors[self.buckets.home[name]][name]
        states = {state: tensors[state] for state in self._states} if self._states else NO_STATES
        noise = perturbation.noise(self.rule.draws, name)
        master = tensors[""]
        scale = perturbation.scale
        if scale and self.rule.trains_scales:
            master = master if master.dense else with_scales(master, noise, scale, self.scratch)
            scale = 0.0
        return PerturbedWeight(
            master,
            noise,
            scale,
            self._dtypes[name],
            self.scratch,
            states,
            self.rule.kind.direction_,
            perturbation.rounding(name),
        )


class AtRest:
    """The weights of a zeroth-order run between two steps
    (:class:`~blockwalk.estimators.protocol.Weights`)."""

    def __init__(self, units: PerturbedUnits, loss_scratch: ScratchArena) -> None:
        self.units = units
        self.loss_scratch = loss_scratch

    def bind(self, unit: int) -> None:
        (values,) = self.units.values(unit, [REST])
        self.units.engine.cut.bind(unit, values)

    def weight(self, name: str) -> Weight:
        return self.units.readers(REST)[0](name)

    def vector(self, name: str | None) -> Tensor | None:
        return self.units.readers(REST)[1](name)


def read_in_ranges(param: ParamSpec) -> bool:
    """Return whether a trainable is a matrix, of which no more than a range is perturbed at a
    time."""
    return param.quantizable and len(param.shape) == 2

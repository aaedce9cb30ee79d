"""The original MeZO's arithmetic: all weights perturbed and updated in place, one generator over
all parameters.

For comparison with the original only: in 16 bits, adding and taking away ε·z moves the weights more
than the updates do. The oracle is :mod:`blockwalk.reference.mezo`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.cut_model import CutModel
from blockwalk.engine.buckets import Buckets
from blockwalk.engine.engine import Engine
from blockwalk.engine.home import Job
from blockwalk.estimators.losses import Objective
from blockwalk.estimators.zeroth_order.estimator import ZerothOrder, agree
from blockwalk.estimators.zeroth_order.kind import Numbers
from blockwalk.estimators.zeroth_order.perturbed_units import REST, PerturbedUnits
from blockwalk.estimators.zeroth_order.perturbed_weight import Perturbation
from blockwalk.estimators.zeroth_order.step_entries import StepEntries
from blockwalk.estimators.zeroth_order.step_state import StepState
from blockwalk.estimators.zeroth_order.updates import ZerothOrderRule
from blockwalk.program.program import Op, OpKind
from blockwalk.ranks.forward_sharing import ForwardSharing
from blockwalk.ranks.ranks import Ranks

SIGNS = (1, -2, 1)
"""The three passes of perturbation: to θ + ε·z, to θ − ε·z, and back."""


class MezoNoise:
    """The original MeZO's perturbations: one pass of torch's generator over the trainable
    parameters.

    Each iteration over this object is one pass: a generator seeded with ``seed``, then one
    ``torch.normal(0, 1, size)`` in each parameter's own dtype and on its device, in the order
    given, which must be that of the deduplicated ``named_parameters()`` for the original's draws.
    They are those that follow ``torch.manual_seed(seed)``, but the process's own generators stay as
    they are. A draw depends on those before it: nothing here can be had alone."""

    def __init__(self, seed: int, parameters: Iterable[Tensor]) -> None:
        self.seed = seed
        self._parameters = tuple(parameters)

    def __iter__(self) -> Iterator[Tensor]:
        generators: dict[torch.device, torch.Generator] = {}
        for parameter in self._parameters:
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(self.seed)
            yield torch.normal(
                mean=0.0,
                std=1.0,
                size=tuple(parameter.shape),
                generator=generators[device],
                device=device,
                dtype=parameter.dtype,
            )


def order_of(cut: CutModel) -> list[str]:
    """Return canonical names of the trainables in the order of the deduplicated
    ``named_parameters()``: that of the draws."""
    return [
        canonical_name(name, cut.adapters)
        for name, p in cut.model.named_parameters()
        if p.requires_grad
    ]


def perturb_(parameters: Mapping[str, Tensor], seed: int, sign: int, epsilon: float) -> None:
    """p ← p + (sign·z)·ε, in the order given: that of the deduplicated ``named_parameters()``."""
    for p, z in zip(parameters.values(), MezoNoise(seed, parameters.values()), strict=True):
        p.add_(z.mul_(sign).mul_(epsilon))


def update_(parameters: Mapping[str, Tensor], entry: LedgerEntry, rule: ZerothOrderRule) -> None:
    """p ← p − η·(g·z + λ·p), without the decay term where the name is spared."""
    (projected_grad,) = entry.projected_grads
    for (name, p), z in zip(
        parameters.items(), MezoNoise(entry.seed, parameters.values()), strict=True
    ):
        direction = z.mul_(projected_grad)
        if rule.decays(name):
            direction.add_(p * rule.optimizer.weight_decay)
        p.sub_(direction.mul_(entry.learning_rate))


def replay_(parameters: Mapping[str, Tensor], entry: LedgerEntry, rule: ZerothOrderRule) -> None:
    """One whole step again, with the drift that its perturbations leave."""
    for sign in SIGNS:
        perturb_(parameters, entry.seed, sign, entry.epsilon)
    update_(parameters, entry, rule)


class InPlace:
    """The original's arithmetic, see :mod:`blockwalk.estimators.zeroth_order.arithmetic`: forwards
    read the weights as they lie, which PERTURB, UPDATE_ALL and REPLAY change.

    Arguments as those of ``PerturbedCopies``."""

    def __init__(
        self, engine: Engine, buckets: Buckets, rule: ZerothOrderRule, entries: StepEntries
    ) -> None:
        self.buckets = buckets
        self.rule = rule
        self.entries = entries
        self.units = PerturbedUnits(engine, buckets, rule)
        self._sums = engine.plan.loss_facts.for_head(custom=engine.cut.head.custom).by_chunks
        self._parameters = {
            name: buckets.tensors[buckets.home[name]][name][""].tensor
            for name in order_of(engine.cut)
        }
        """All trainables in the order of the draws; bound for good."""

    def perturbation(self, _forward_pass: int, _state: StepState) -> Perturbation:
        """Return none: the weights were perturbed where they lie."""
        return REST

    def scalars(self, losses: tuple[float, ...], state: StepState) -> tuple[Numbers, Numbers]:
        """Return the projected gradient, in the dtype of the model's own losses where those are all
        there is, as the original has it."""
        if len(state.batches) > 1 or self._sums or state.by_row:
            return self.rule.kind.scalars(self.rule.zo, losses)
        difference = state.losses[0, 0] - state.losses[0, 1]
        return ((difference / (2 * self.rule.zo.epsilon)).item(),), ()

    def prepare(self, op: Op, state: StepState | None) -> Job:
        """Return the work of PERTURB, UPDATE_ALL or REPLAY."""
        if op.kind is OpKind.REPLAY:
            return self._replay
        assert state is not None
        if op.kind is OpKind.PERTURB:
            sign = SIGNS[op.forward_pass]
            return partial(perturb_, self._parameters, state.seed, sign, self.rule.zo.epsilon)
        return partial(self._update_all, state)

    @torch.no_grad()
    def _update_all(self, state: StepState) -> None:
        assert state.entry is not None
        update_(self._parameters, state.entry, self.rule)
        self._advance()

    @torch.no_grad()
    def _replay(self) -> None:
        for entry in self.entries.since(self.entries.steps - self.entries.waiting()):
            replay_(self._parameters, entry, self.rule)
        self._advance()

    def _advance(self) -> None:
        """Note that all units are up to date."""
        for unit in set(self.buckets.home.values()):
            self.buckets.advance(unit, self.entries.steps)


def make(
    engine: Engine,
    home: Buckets,
    ranks: Ranks,
    sharing: ForwardSharing,
    objective: Objective | None,
) -> ZerothOrder:
    """Return zeroth order with the original's arithmetic."""
    agree(home, ranks, sharing)
    return ZerothOrder(engine, home, sharing, objective, InPlace)


def replayed(
    cut: CutModel,
    tensors: Mapping[str, Tensor],
    entries: Iterable[LedgerEntry],
    rule: ZerothOrderRule,
) -> None:
    """Bring trainables, by name, from the beginning of a run to its end, in place: all at once, for
    a draw goes through them all."""
    parameters = {name: tensors[name] for name in order_of(cut) if name in tensors}
    for entry in entries:
        replay_(parameters, entry, rule)

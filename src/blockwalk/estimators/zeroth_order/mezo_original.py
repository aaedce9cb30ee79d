"""The original MeZO's arithmetic: all weights perturbed and updated in place, one generator over
all parameters.

For comparison with the original only: in 16 bits, adding and taking away ε·z moves the weights more
than the updates do. The oracle is :mod:`blockwalk.reference.mezo`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from blockwalk.checkpoints.ledger import LedgerEntry
from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.cut_model import CutModel
from blockwalk.engine.engine import Engine
from blockwalk.estimators.losses import Objective
from blockwalk.estimators.zeroth_order.estimator import ZerothOrder
from blockwalk.estimators.zeroth_order.perturbed_weight import Perturbation
from blockwalk.estimators.zeroth_order.step import Step
from blockwalk.estimators.zeroth_order.updates import ZerothOrderRule
from blockwalk.program.program import Op
from blockwalk.ranks.shared_forwards import SharedForwards

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


class MezoOriginal(ZerothOrder):
    """The estimator that answers the compute ops of the original's program: forwards read the
    weights as they lie, which PERTURB, UPDATE_ALL and REPLAY change in place. Arguments as
    :class:`~blockwalk.estimators.zeroth_order.estimator.ZerothOrder`."""

    def __init__(
        self,
        engine: Engine,
        objective: Objective | None = None,
        ranks: SharedForwards | None = None,
    ) -> None:
        super().__init__(engine, objective, ranks)
        buckets = engine.buckets
        self._parameters = {
            n: buckets.tensors[buckets.home[n]][n][""].tensor for n in order_of(engine.cut)
        }
        """All trainables in the order of the draws; bound for good."""

    def _reserve(self) -> None:
        """A draw is a whole parameter's: nothing is made beforehand."""

    def _perturbation(self, op: Op, state: Step) -> Perturbation:
        """None: the weights were perturbed where they lie."""
        return Perturbation(state.seed, state.asked.step, 0, 0.0)

    def _scalars(
        self, losses: tuple[float, ...], state: Step
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the projected gradient, in the dtype of the model's own losses where those are all
        there is, as the original has it."""
        if len(state.batches) > 1 or self.loss.sums or state.by_row:
            return super()._scalars(losses, state)
        return (
            ((state.losses[0, 0] - state.losses[0, 1]) / (2 * self.plan.zo.epsilon)).item(),
        ), ()

    def _perturb(self, op: Op, state: Step) -> None:
        perturb_(self._parameters, state.seed, SIGNS[op.forward_pass], self.plan.zo.epsilon)

    @torch.no_grad()
    def _update_all(self, _op: Op, state: Step) -> None:
        assert state.entry is not None
        update_(self._parameters, state.entry, self.rule)
        self._advance()

    @torch.no_grad()
    def _replay(self, _op: Op, _state: Step | None) -> None:
        for entry in self.entries[len(self.entries) - self.waiting() :]:
            replay_(self._parameters, entry, self.rule)
        self._advance()

    def _advance(self) -> None:
        for unit in set(self.engine.buckets.home.values()):
            self.engine.buckets.advance(unit, self.steps)

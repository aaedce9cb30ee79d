"""Oracle: the same estimator as a plain loop over the whole model, with torch's own optimizer.

The estimator is one of its own: antithetic pairs of forwards at θ ± ε·z, whose slopes are averaged
into a gradient, which any update rule of the house then uses. It is registered from here; nothing
of it is in the package."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockwalk import Plan, Walker, method
from blockwalk.data.batch import Batch, loss_tokens
from blockwalk.engine.engine import Engine
from blockwalk.engine.home import Job
from blockwalk.engine.master_updates import MasterUpdates
from blockwalk.engine.masters import Masters
from blockwalk.estimators.head import Ending
from blockwalk.estimators.losses import Objective, loss_of
from blockwalk.estimators.protocol import StepFigures
from blockwalk.estimators.walk_request import Step
from blockwalk.numerics.codecs.weights import DenseWeight, Weight
from blockwalk.plan.choices import Timing
from blockwalk.plan.estimators import ESTIMATORS, EstimatorFacts
from blockwalk.program import turns
from blockwalk.program.lower import Builder
from blockwalk.program.program import Op, Shape
from blockwalk.program.zeroth_order import exchange, forwards, local_pieces
from blockwalk.ranks.forward_sharing import ForwardSharing
from blockwalk.ranks.ranks import Ranks
from tests.models import random_batch, tiny_model
from tests.support.rows import registered

NAME = "antithetic-pairs"
PAIRS = 2
EPSILON = 1e-2
SIGNS = (1.0, -1.0)


def noise(name: str, step: int, pair: int, shape: Sequence[int]) -> Tensor:
    """The direction of one parameter in one pair of one step, float32."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {pair}".encode()))
    return torch.randn(tuple(shape), generator=generator)


def pairs_turns(b: Builder, step: turns.Step) -> None:
    """Every forward of a step while the unit is there; then the gradient, and the updates."""
    b.walk(forwards(b, local_pieces(b, range(2 * PAIRS))))
    b.update_all([exchange(b)])


class AntitheticPairs:
    """The estimator: it computes what the ops of :func:`pairs_turns` stand for."""

    def __init__(self, engine: Engine, home: Masters, objective: Objective | None) -> None:
        self.engine = engine
        self.home = home
        self.checkpointed = MasterUpdates(engine, home)
        self.at_rest = engine
        self.loss = loss_of(engine.plan.loss_facts, engine.cut.head, objective)
        self.batches: Sequence[Batch] = ()
        self.labels: Sequence[Tensor] = ()
        self.step = Step(0)
        self.prologues: dict[int, Any] = {}
        self.hidden: dict[int, Tensor] = {}
        self.losses: dict[int, float] = {}

    def reserve(self, shape: Shape) -> None: ...

    def waiting(self) -> int:
        return 0

    def resume(self, steps: int) -> None: ...

    def undo(self) -> None:
        self.checkpointed.undo()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.checkpointed.load_state_dict(state)

    def begin(self, batches: Sequence[Batch], labels: Sequence[Tensor], step: Step) -> None:
        self.engine.module.eval()
        self.home.gradients.begin()
        self.batches = batches
        self.labels = labels
        self.step = step
        self.losses.clear()

    def figures(self) -> StepFigures:
        return StepFigures(self.losses[0], loss_tokens({"labels": self.labels[0]}))

    def prepare(self, op: Op) -> Job:
        return partial(getattr(self, f"_{op.kind.lower()}"), op)

    def _perturbed(self, op: Op, name: str) -> Tensor:
        pair, side = divmod(op.forward_pass, 2)
        value = self.home.value(name)
        z = noise(name, self.step.number, pair, value.shape)
        return value + SIGNS[side] * EPSILON * z

    def _bind(self, op: Op) -> dict[str, Tensor]:
        values = {p.name: self._perturbed(op, p.name) for p in self.engine.trainables(op.unit)}
        self.engine.cut.bind(op.unit, values)
        return values

    @torch.no_grad()
    def _prologue(self, op: Op) -> None:
        self._bind(op)
        prologue = self.engine.cut.prologue(self.batches[0])
        self.prologues[op.forward_pass] = prologue
        self.hidden[op.forward_pass] = prologue.hidden_BSD
        self.engine.unbind(0)

    @torch.no_grad()
    def _forward(self, op: Op) -> None:
        self._bind(op)
        call = self.prologues[op.forward_pass].calls[op.unit - 1]
        hidden_BSD = self.hidden[op.forward_pass]
        self.hidden[op.forward_pass] = self.engine.cut.forward(call, hidden_BSD)
        self.engine.unbind(op.unit)

    def _loss(self, op: Op) -> None:
        values = self._bind(op)

        def matrix(name: str) -> Weight:
            return DenseWeight(values[name]) if name in values else self.engine.weight(name)

        ending = Ending(
            self.engine.cut,
            self.prologues.pop(op.forward_pass),
            self.hidden.pop(op.forward_pass),
            self.batches[0],
            self.labels[0],
            matrix,
            self.engine.vector,
        )
        loss = float(self.loss.forward(ending, by_row=False))
        self.losses[op.forward_pass] = loss / (ending.counted if self.loss.sums else 1)
        self.engine.unbind(op.unit)

    def _exchange(self, _op: Op) -> None:
        for p in self.engine.spec.params(trainable=True):
            gradient = torch.zeros(p.shape)
            for pair in range(PAIRS):
                slope = (self.losses[2 * pair] - self.losses[2 * pair + 1]) / (2 * EPSILON)
                gradient += slope / PAIRS * noise(p.name, self.step.number, pair, p.shape)
            self.home.gradients.add([p.name], [gradient])

    def _update(self, op: Op) -> None:
        rate = self.step.learning_rate
        self.checkpointed.apply(op.unit, step=self.step.number, learning_rate=rate)


def make(
    engine: Engine,
    home: Masters,
    _ranks: Ranks,
    _sharing: ForwardSharing,
    objective: Objective | None,
) -> AntitheticPairs:
    """Return the estimator of the row below."""
    return AntitheticPairs(engine, home, objective)


ROW = EstimatorFacts(
    turns=pairs_turns,
    make=make,
    home="masters",
    home_over_ranks="masters",
    spreads=(),
    timings=(Timing.STEP,),
    help="slopes of pairs of forwards, averaged",
)


@pytest.fixture(autouse=True)
def _row() -> Iterator[None]:
    with registered(ESTIMATORS, NAME, ROW):
        yield


def plan_of(rate: float, loss: str, **settings: Any) -> Plan:
    optimizer = {"name": "adamw", "learning_rate": rate, "weight_decay": 0.0}
    return method("plain", estimator=NAME, optimizer=optimizer, loss=loss, **settings)


def plain_loop(model: Any, batches: Sequence[Batch], rate: float) -> list[float]:
    """Train the whole model in memory, and return the losses of the steps' first forwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    named = dict(model.named_parameters())
    at_rest = {name: p.detach().clone() for name, p in named.items()}
    losses = []
    for step, batch in enumerate(batches, 1):
        for name, p in named.items():
            at_rest[name].copy_(p.detach())
            p.grad = torch.zeros_like(p)
        for pair in range(PAIRS):
            sides = []
            for sign in SIGNS:
                with torch.no_grad():
                    for name, p in named.items():
                        p.copy_(at_rest[name] + sign * EPSILON * noise(name, step, pair, p.shape))
                    sides.append(float(model(**batch, use_cache=False).loss))
            losses += sides[:1] if pair == 0 else []
            slope = (sides[0] - sides[1]) / (2 * EPSILON)
            for name, p in named.items():
                assert p.grad is not None
                p.grad += slope / PAIRS * noise(name, step, pair, p.shape)
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(at_rest[name])
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("loss", "tier"), [("model", "device"), ("model", "disk"), ("chunked", "device")]
)
def test_an_estimator_from_outside_trains_as_its_plain_loop(
    loss: str, tier: str, tmp_path: Path
) -> None:
    rate = 1e-2
    batches = [random_batch(seed=seed) for seed in range(4)]
    model = tiny_model("llama")
    model.eval()
    expected = copy.deepcopy(model)
    losses = plain_loop(expected, batches, rate)
    tiers = {"trainable": f"{tier} × fp32", "optimizer_state": f"{tier} × fp32"}
    plan = plan_of(rate, loss, **tiers)
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        trained = [walker.step(batch).loss for batch in batches[:2]]
        walker.save_state(tmp_path / "saved")
        walker.step(batches[3])  # undone by what was saved
        walker.load_state(tmp_path / "saved")
        trained += [walker.step(batch).loss for batch in batches[2:]]
        evaluated = walker.evaluate(batches[0])
        weights = walker.state_dict()
    assert trained == pytest.approx(losses, rel=1e-5)
    with torch.no_grad():
        mean = float(expected(**batches[0], use_cache=False).loss)
    assert evaluated.loss == pytest.approx(mean, rel=1e-4)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=1e-4)

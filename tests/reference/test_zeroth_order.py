"""Oracle: the naive whole-model loops of :mod:`blockwalk.reference`, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockwalk import method
from blockwalk.reference.mezo import mezo_step
from blockwalk.reference.zeroth_order import masters_of, spsa_step
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.zeroth_order_runs import RATE, assert_same, names_of, trained

CASES = [("opt", True), ("opt", False), ("llama", True), ("llama", False)]
COUNTED = [*CASES, ("gpt2", True)]


@pytest.mark.parametrize(("kind", "tied"), CASES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_mezo_noise_is_the_original_bit_for_bit(
    kind: str, tied: bool, weight_decay: float, tmp_path: Path
) -> None:
    """Losses, g and weights, with the seeds that the original draws when it was given the run's;
    OPT's execution order is not that of its names."""
    model = tiny_model(kind, tied=tied)
    control = copy.deepcopy(model)
    settings = {
        "learning_rate": RATE,
        "weight_decay": weight_decay,
        "schedule": "linear",
        "total_steps": 6,
    }
    plan = method(
        "mezo", zo={"noise": "mezo"}, loss="model", optimizer={"name": "sgd", **settings}, seed=5
    )
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        found = [walker.step(random_batch(seed=step)) for step in range(5)]
        weights = trained(walker)
    np.random.seed(5)
    for step, result in enumerate(found):
        rate = RATE * (1 - step / 6)  # the scheduler steps after the update
        expected = mezo_step(
            control,
            random_batch(seed=step),
            learning_rate=rate,
            weight_decay=weight_decay,
            epsilon=1e-3,
        )
        assert result.learning_rate == pytest.approx(rate)
        assert (result.loss, result.projected_grad) == (
            expected.losses[0],
            expected.projected_grads[0],
        )
    assert_same(weights, names_of(control))


@pytest.mark.parametrize(("kind", "tied"), COUNTED)
@pytest.mark.parametrize(
    ("noise", "queries"), [("gaussian", 1), ("gaussian", 3), ("rademacher", 2)]
)
def test_counter_noise_is_the_reference_bit_for_bit(
    kind: str, tied: bool, noise: Any, queries: int, tmp_path: Path
) -> None:
    model = tiny_model(kind, tied=tied)
    control = copy.deepcopy(model)
    masters = masters_of(model)
    plan = method(
        "mezo",
        loss="model",
        zo={"noise": noise, "queries": queries},
        optimizer={
            "learning_rate": RATE,
            "weight_decay": 0.1,
            "schedule": "linear",
            "total_steps": 6,
        },
        seed=7,
    )
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(1, 4):
            batch = random_batch(seed=step)
            found = walker.step(batch)
            rate = RATE * (7 - step) / 6
            assert found.learning_rate == pytest.approx(rate)
            expected = spsa_step(
                control,
                masters,
                batch,
                step=step,
                seed=7,
                learning_rate=found.learning_rate,
                weight_decay=0.1,
                queries=queries,
                kind=noise,
            )
            assert found.loss == expected.losses[0]
            assert found.projected_grad == pytest.approx(
                sum(expected.projected_grads) / queries, rel=1e-15
            )
        weights = trained(walker)
    assert_same(weights, masters)

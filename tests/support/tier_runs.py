"""A zeroth-order run of a few steps on any tier: losses, held-out loss, weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from blockwalk import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch
from tests.support.zeroth_order_runs import assert_same, trained

Run = tuple[list[tuple[float, float | None]], float, dict[str, torch.Tensor]]


SCHEDULE = {"learning_rate": 3e-2, "schedule": "linear", "total_steps": 12, "warmup_steps": 3}


def run(
    name: str, model: Any, folder: Path, *, steps: int = 6, lora: Any = None, **settings: Any
) -> Run:
    """(loss, g) of each step, the loss of a held-out batch afterwards, and the weights."""
    settings = {"optimizer": {"name": "sgd", **SCHEDULE}, **settings}
    with Walker(
        copy.deepcopy(model), method(name, **settings), lora=lora, workdir=folder, device="cpu"
    ) as walker:
        results = [walker.step(random_batch(seed=step)) for step in range(steps)]
        evaluated = walker.evaluate(random_batch(seed=99)).loss
        return [(r.loss, r.projected_grad) for r in results], evaluated, trained(walker)


def assert_equal(found: Run, expected: Run) -> None:
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert_same(found[2], expected[2])

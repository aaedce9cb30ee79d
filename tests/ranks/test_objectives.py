"""Oracle: the same walk by one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.objectives import judged_batch
from tests.support.processes import run_ranks

OBJECTIVES = ("dpo(beta=0.3)", "cpo(beta=0.3)", "policy_gradient(epsilon_high=0.3)")
ALIKE = 1e-6

Case = tuple[str, int, dict[str, Any], dict[str, Any]]
"""A method, rows of the batch, settings, and the mesh of several ranks."""

CASES: list[Case] = [
    # three pairs over two ranks: the last one's copy fills up
    ("zero3", 6, {}, {}),
    ("zero3", 8, {"gradient_accumulation_steps": 2}, {}),
    ("zero3", 8, {"gradient_accumulation_steps": 2}, {"pipeline": 2}),
    ("distzo2", 8, {"zo.queries": 2}, {"data": 2}),
    ("distzo2", 8, {"zo.queries": 2}, {"perturb": 2}),
]


def walked(_rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Loss, further means and the gradient of a step, by case and objective."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    answers = []
    for name, rows, settings, mesh in cases:
        ranks = {"world": world, "ranks_per_node": world, **(mesh if world > 1 else {})}
        for objective in OBJECTIVES:
            plan = method(name, mesh=ranks, objective=objective, **settings)
            model = tiny_model("llama", num_hidden_layers=4)
            batch = judged_batch(seed=8, rows=rows)
            with Walker(model, plan, device="cpu") as walker:
                gradients = {}
                if plan.estimator.facts.walks_back:
                    gradients = walker.gradients(batch)
                step = walker.step(batch)
                answers.append(
                    {
                        "figures": {"loss": step.loss, **step.metrics},
                        "gradients": gradients,
                        "losses": [
                            entry.losses for entry in getattr(walker.estimator, "entries", [])
                        ],
                    }
                )
    return answers


def test_two_ranks_are_one_process() -> None:
    """Rows and stages over ranks; shares of the batch and of the forwards in zeroth order."""
    single = walked(0, CASES)
    for answers in run_ranks(2, walked, CASES):
        for expected, answer in zip(single, answers, strict=True):
            assert answer["figures"] == pytest.approx(expected["figures"], rel=ALIKE, abs=ALIKE)
            for one, other in zip(expected["losses"], answer["losses"], strict=True):
                assert other == pytest.approx(one, rel=ALIKE, abs=ALIKE)
            assert answer["gradients"].keys() == expected["gradients"].keys()
            for name, gradient in expected["gradients"].items():
                size = max(float(torch.linalg.norm(gradient)), 1e-6)
                change = float(torch.linalg.norm(answer["gradients"][name] - gradient))
                assert change <= 2e-6 * size, name

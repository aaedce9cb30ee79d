"""Oracle: the kernel's byte counters on the link of each node. What is simulated knows the model's
configuration alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.program.program import Lane, Shape
from blockwalk.simulate import hardware
from blockwalk.simulate.planner import Task, programs_of
from blockwalk.simulate.simulator import simulate
from blockwalk.walk.unit_costs import UnitCosts
from blockwalk.walk.walker import StepResult, Walker
from tests.models import random_batch, tiny_model
from tests.support.cluster import cluster, payload_of, whole_step

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
}
METHODS = ("zero3", "zeropp", "mics", "fcdp", "hzp")
MESH = {"world": 4, "ranks_per_node": 2}


def model() -> torch.nn.Module:
    return tiny_model("llama", **SIZES)


def _step_bytes(rank: int) -> list[tuple[int, int]]:
    """Bytes that this rank's node sent in a steady step, and that the walker's own program says."""
    counted = []
    for name in METHODS:
        with Walker(model(), method(name, mesh=MESH), device="cpu") as walker:
            whole_step(walker, random_batch(16, 8))
            results: list[StepResult] = []
            sent = payload_of(
                lambda: results.append(whole_step(walker, random_batch(16, 8, seed=1)))  # noqa: B023 - called at once
            )
            counted.append((sent, 2 * results[0].bytes.get(Lane.INTER, 0)))
    return counted


@pytest.mark.root
def test_what_is_simulated_is_what_the_program_says_and_the_kernel_counts() -> None:
    """Within 2 % and 16 KB of headers and scalars, two nodes of two ranks, every sharded method."""
    made: Any = model()
    certified(made)
    with cluster(2, 2) as nodes:
        answers = nodes.run(_step_bytes)
    machine = hardware.load("a40-48gb-x8-eth1")
    costs_of = UnitCosts(made.config, device=machine.device)
    task = Task(costs_of.spec(), costs_of, machine, Shape(4, 8))
    for name, counts in zip(METHODS, zip(*answers[::2], strict=True), strict=True):
        plan = method(name, mesh=MESH)
        programs, costs = programs_of(task, plan)
        simulated = 2 * simulate(programs, plan, task.model, machine, costs).bytes_by_lane.get(
            Lane.INTER, 0
        )
        for sent, said in counts:
            assert said == simulated, name
            assert simulated * 0.99 <= sent <= simulated * 1.02 + 16_384, (name, sent, simulated)

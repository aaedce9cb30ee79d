"""Oracle: the same steps on a CPU, in the laziest order that a device may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.objectives import judged_batch
from tests.support.simulated_device import Simulated


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("mebp", "dpo(beta=0.3)"),
        ("plain", "cpo(beta=0.3)"),
        ("zo2", "policy_gradient(epsilon_high=0.3)"),
    ],
)
def test_steps_are_those_of_a_cpu(
    name: str, objective: str, sim: Simulated, tmp_path: Path
) -> None:
    """LoRA, whose head is read once; every parameter, whose head is read twice; forwards alone."""
    lora = {"rank": 3} if name == "mebp" else None
    figures = {}
    for device in ("cpu", "sim:1"):
        plan = method(name, objective=objective, gradient_accumulation_steps=2)
        with Walker(
            tiny_model("llama", tied=True),
            plan,
            lora=lora,
            workdir=tmp_path / device.replace(":", ""),
            device=device,
        ) as walker:
            steps = [walker.step(judged_batch(seed=seed)) for seed in range(2)]
            figures[device] = [(step.loss, dict(step.metrics)) for step in steps]
    assert figures["cpu"] == figures["sim:1"]

"""Oracle: the bits of each master, and one process: a parameter that the model keeps in float32 is
read in float32 over ranks too, among others that travel in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.plan.placement import StateKind
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.held import masters
from tests.support.processes import run_ranks

GATE = "model.layers.1.mlp.gate.weight"
"""The router of the second block, which transformers keeps in float32."""
STEPS = 2
SETTINGS: dict[str, Any] = {"compute_dtype": "bfloat16", "optimizer.learning_rate": 1e-2}
ROWS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "fcdp": {"gradient_accumulation_steps": 2, "optimizer.max_grad_norm": 0.5},
    "hzp": {"optimizer_state": "host × fp32 × world", "update.timing": "block"},
}


def mixture() -> Any:
    """A model of four experts in bfloat16, whose routers are in float32."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    experts = {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
    }
    made = tiny_model(
        "ernie4_5_moe", **sizes, **experts, num_key_value_heads=2, head_dim=8, pad_token_id=0
    )
    made.config.dtype = torch.bfloat16
    for name, param in made.named_parameters():
        param.data = param.data if name.endswith("mlp.gate.weight") else param.data.bfloat16()
    return made


def reads(walker: Walker) -> torch.Tensor:
    """The router as the forward of its block reads it."""
    home = walker.engine.homes[StateKind.TRAINABLE]
    found = []
    values = home.values

    def noted(unit: int) -> Any:
        answer = values(unit)
        found.extend(value.clone() for name, value in answer.items() if name == GATE)
        return answer

    home.values = noted  # type: ignore[method-assign]
    walker.evaluate(random_batch(4, 10))
    home.values = values  # type: ignore[method-assign]
    return torch.as_tensor(found[0])


def _walked(rank: int, folder: Path, out: Path) -> dict[str, Any]:
    answers = {}
    for name, changes in ROWS.items():
        plan = method(name, mesh={"world": 4, "ranks_per_node": 2}, **SETTINGS, **changes)
        with Walker(folder, plan, device="cpu") as walker:
            first = reads(walker)
            losses = [walker.step(random_batch(8, 10, seed=step)).loss for step in range(STEPS)]
            walker.save_state(out / name)
            answers[name] = (first, losses, reads(walker), masters(walker)[GATE])
            if rank == 0:
                (out / f"{name}-weights").mkdir()
            walker.save_pretrained(out / f"{name}-weights")
    return answers


def test_a_parameter_that_is_computed_in_float32_travels_with_all_its_bits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    mixture().save_pretrained(folder)
    certified(mixture())
    answers = run_ranks(4, _walked, folder, tmp_path)
    with Walker(folder, method("plain", **SETTINGS), device="cpu") as walker:
        start = reads(walker)
        losses = [walker.step(random_batch(8, 10, seed=step)).loss for step in range(STEPS)]
        alone = reads(walker)
    for name in ROWS:
        for answer in answers:
            first, ours, read, master = answer[name]
            assert torch.equal(first, start), name
            assert read.dtype == torch.float32
            assert torch.equal(read, master), name
            assert not torch.equal(read, read.bfloat16().float()), name
            assert ours == pytest.approx(losses, rel=5e-3), name
            moved = torch.nn.functional.cosine_similarity(
                (read - start).flatten(), (alone - start).flatten(), dim=0
            )
            assert moved > 0.9, (name, float(moved))
        with Walker(folder, method("plain", **SETTINGS), device="cpu") as walker:
            walker.load_state(tmp_path / name)
            assert torch.equal(reads(walker), answers[0][name][2]), name
        with Walker(
            tmp_path / f"{name}-weights", method("plain", **SETTINGS), device="cpu"
        ) as walker:
            assert torch.equal(reads(walker), answers[0][name][2]), name

"""Oracle: the naive zeroth-order loops of blockwalk.reference, whose loss is an objective of whole
logits (tests/support/objectives.py)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockwalk.plan.methods import method
from blockwalk.reference.zeroth_order import fzoo_step, hizoo_step, masters_of, spsa_step
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.objectives import FORMULAS, judged_batch, on_whole_logits

RATE = 1e-3
KINDS: dict[str, dict[str, Any]] = {
    "spsa": {},
    "fzoo": {"queries": 2, "noise": "rademacher"},
    "hizoo": {"hessian_alpha": 1e-6},
}


def losses_of(model: nn.Module, kind: str, batch: Mapping[str, Tensor], objective: str) -> Any:
    """The losses of the reference loop's first step."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return on_whole_logits(FORMULAS[objective], model(**inputs, use_cache=False).logits, batch)

    control = copy.deepcopy(model)
    masters = masters_of(control)
    call: dict[str, Any] = {"step": 1, "seed": 0, "learning_rate": RATE, "loss": loss}
    if kind == "spsa":
        return spsa_step(control, masters, batch, **call).losses
    if kind == "fzoo":
        return fzoo_step(control, masters, batch, queries=2, **call).losses
    ones = {name: torch.ones_like(master) for name, master in masters.items()}
    return hizoo_step(control, masters, ones, batch, alpha=1e-6, **call).losses


def walked(
    model: nn.Module, batch: Mapping[str, Tensor], objective: str, folder: Path, **settings: Any
) -> tuple[float, ...]:
    plan = method("zo2", objective=objective, optimizer={"learning_rate": RATE}, **settings)
    with Walker(copy.deepcopy(model), plan, workdir=folder, device="cpu") as walker:
        walker.step(batch)
        return tuple(walker.estimator.entries[0].losses)  # type: ignore[union-attr]


@pytest.mark.parametrize("objective", ["dpo(beta=0.3)", "policy_gradient(epsilon_high=0.3)"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, objective: str, tmp_path: Path) -> None:
    """The losses of a step's forwards, its batch cut into 1 and 4 micro-batches."""
    model = tiny_model("llama", tied=True)
    batch = judged_batch(seed=6)
    expected = losses_of(model, kind, batch, objective)
    for count in (1, 4):
        losses = walked(
            model,
            batch,
            objective,
            tmp_path / str(count),
            zo={"kind": kind, **KINDS[kind]},
            gradient_accumulation_steps=count,
        )
        assert losses == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_noise_beside_the_weights(tmp_path: Path) -> None:
    """Oracle: the objective at rest, which both sides of a small perturbation have between them.
    All forwards of a micro-batch share one product with the head."""
    model = tiny_model("llama")
    batch = judged_batch(seed=7)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits_BSV = model(**inputs, use_cache=False).logits
    value = float(on_whole_logits(FORMULAS["ipo(beta=0.3)"], logits_BSV, batch))
    for count in (1, 2):
        noise = {"noise": "lowrank", "epsilon": 1e-5}
        losses = walked(
            model,
            batch,
            "ipo(beta=0.3)",
            tmp_path / str(count),
            zo=noise,
            gradient_accumulation_steps=count,
        )
        assert sum(losses) / 2 == pytest.approx(value, rel=3e-6)

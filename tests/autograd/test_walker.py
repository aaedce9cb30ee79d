"""Oracle: the model's own forward, autograd and torch.optim over the whole model in memory."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.walker_plans import PLANS, own_gradients


@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_full_gradients_are_those_of_autograd(
    kind: str, tied: bool, plan: dict[str, Any], tmp_path: Path
) -> None:
    dropout = {
        "opt": {"dropout": 0.0},
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    model = tiny_model(kind, tied=tied, **dropout.get(kind, {}))
    batch = random_batch()
    loss, expected = own_gradients(model, batch)
    with Walker(copy.deepcopy(model), method(**plan), workdir=tmp_path, device="cpu") as walker:
        gradients = walker.gradients(batch)
        evaluated = walker.evaluate(batch)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = expected[name].norm()
        assert (gradient - expected[name]).norm() <= 2e-6 * scale + 1e-9, name
    assert evaluated.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_twenty_steps_are_those_of_torch_adamw(plan: dict[str, Any], tmp_path: Path) -> None:
    """Control: torch.optim.AdamW on the model's own gradients, whose norm clip_grad_norm_ tells;
    weights after 20 steps to rounding."""
    model = tiny_model("llama", tied=True)
    control = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(
        control.parameters(), lr=1e-3, weight_decay=0.01, foreach=False, fused=False
    )
    settings = {**plan, "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.01, "decay": "all"}}
    losses = []
    own = []
    norms = []
    own_norms = []
    with Walker(copy.deepcopy(model), method(**settings), workdir=tmp_path, device="cpu") as walker:
        for step in range(20):
            batch = random_batch(seed=step)
            result = walker.step(batch)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            loss = control(**batch, use_cache=False).loss
            loss.backward()
            own_norms.append(float(torch.nn.utils.clip_grad_norm_(control.parameters(), math.inf)))
            optimizer.step()
            optimizer.zero_grad()
            own.append(float(loss.detach()))
        masters = walker.state_dict()
    assert losses == pytest.approx(own, rel=1e-5)
    assert norms == pytest.approx(own_norms, rel=1e-4)
    for name, parameter in control.named_parameters():
        difference = (masters[name] - parameter.detach()).norm() / parameter.detach().norm()
        assert difference < 1e-4, name


def test_clipping_is_that_of_torch(tmp_path: Path) -> None:
    """Control: torch.nn.utils.clip_grad_norm_ before torch.optim.SGD."""
    model = tiny_model("llama")
    control = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(control.parameters(), lr=0.1)
    plan = method("plain", optimizer={"name": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.05})
    with Walker(copy.deepcopy(model), plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(3):
            batch = random_batch(seed=step)
            result = walker.step(batch)
            control(**batch, use_cache=False).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(control.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)
        masters = walker.state_dict()
    for name, parameter in control.named_parameters():
        assert torch.allclose(masters[name], parameter.detach(), rtol=1e-6, atol=1e-7), name


def test_all_plans_give_the_same_bits_after_five_steps(tmp_path: Path) -> None:
    """Oracle: the plan with everything resident. Where bytes live changes nothing that is
    computed."""
    model = tiny_model("llama", tied=True)
    ends = {}
    for name, plan in PLANS.items():
        if "accumulated" in name:
            continue
        with Walker(
            copy.deepcopy(model), method(**plan), workdir=tmp_path / name, device="cpu"
        ) as walker:
            losses = [walker.step(random_batch(seed=step)).loss for step in range(5)]
            ends[name] = (
                losses,
                {key: t.clone() for key, t in walker.engine.trained.masters.items()},
            )
    losses, masters = ends.pop("plain")
    for name, (other_losses, other) in ends.items():
        assert other_losses == losses, name
        assert all(torch.equal(other[key], masters[key]) for key in masters), name


def test_dropout_is_recomputed_with_the_same_masks(tmp_path: Path) -> None:
    """Oracle: the same step with every graph kept, so that nothing is recomputed."""
    model = tiny_model("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    batch = random_batch()
    found = []
    for recompute in ("none", "all"):
        with Walker(
            copy.deepcopy(model),
            method("plain", recompute=recompute),
            workdir=tmp_path,
            device="cpu",
        ) as walker:
            found.append(walker.gradients(batch))
    _, without = own_gradients(model.eval(), batch)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    name = "transformer.wte.weight"
    assert (found[0][name] - without[name]).norm() > 0.1 * without[name].norm(), (
        "dropout changed nothing"
    )


def test_a_step_without_labels_is_refused(tmp_path: Path) -> None:
    batch = random_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with (
        Walker(tiny_model("llama"), method("plain"), workdir=tmp_path, device="cpu") as walker,
        refused(ValueError, "label|labels ignored"),
    ):
        walker.step(batch)


def test_a_compute_dtype_leaves_the_rotary_frequencies_alone(tmp_path: Path) -> None:
    """Oracle: the loss of transformers' own model whose parameters alone are bfloat16, as it loads
    them."""
    model = tiny_model("llama")
    batch = random_batch()
    own = copy.deepcopy(model)
    for parameter in own.parameters():
        parameter.data = parameter.data.bfloat16()
    expected = own(**batch).loss.item()
    plan = method("plain", compute_dtype="bfloat16")
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        assert walker.evaluate(batch).loss == pytest.approx(expected, rel=1e-3)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_schedule_belongs_to_training(tmp_path: Path) -> None:
    """Oracle: the model's own loss; and the order: what cannot be trained is refused before the
    model is opened."""
    plan = method("plain", optimizer={"schedule": "cosine"})
    with refused(ValueError, "optimizer.total_steps 0"):
        Walker(tmp_path / "absent", plan)
    model = tiny_model("llama")
    batch = random_batch()
    loss, _ = own_gradients(model, batch)
    with Walker(model, plan, training=False, device="cpu") as walker:
        assert walker.evaluate(batch).loss == pytest.approx(loss, rel=1e-6)
        with refused(ValueError, "training=False"):
            walker.step(batch)

"""Steps of a tiny model over ranks, beside the same steps by torch's optimizer in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blockwalk.plan.methods import method
from blockwalk.program.program import Shape, StepKind
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.held import masters

LEARNING_RATE = 1e-3


DECAY = 0.5
"""Weight decay that shows where a slice, which cuts through parameters, decays a norm or a bias."""


def groups(trained: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters in AdamW's groups: norms and biases do not decay."""
    spared = [p for name, p in trained.items() if "norm" in name or "bias" in name]
    decayed = [p for name, p in trained.items() if not ("norm" in name or "bias" in name)]
    return [{"params": decayed}, *([{"params": spared, "weight_decay": 0.0}] if spared else [])]


def plain_run(
    model: nn.Module, batches: list[dict[str, torch.Tensor]], max_norm: float = 0.0
) -> dict[str, Any]:
    """Losses, the first step's gradients and the last weights of a plain training loop; those
    gradients in float64 as well."""
    exact_model: Any = copy.deepcopy(model).double().train()
    exact_model.set_experts_implementation("eager")  # grouped products have no float64
    _loss(exact_model, batches[0], torch.float64).backward()
    exact = {name: p.grad for name, p in exact_model.named_parameters() if p.grad is not None}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        groups(trained), lr=LEARNING_RATE, weight_decay=DECAY, foreach=False
    )
    losses = []
    norms = []
    first = {}
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        bound = max_norm or math.inf
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), bound, foreach=False)))
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        evaluated = float(_loss(model, random_batch(3, 10, seed=99)))
    weights = {name: p.detach().clone() for name, p in trained.items()}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": first,
        "exact": exact,
        "weights": weights,
        "evaluated": evaluated,
    }


def _loss(
    model: nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    logits_BSV = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits_BSV[:, :-1].flatten(0, 1).to(dtype), batch["labels"][:, 1:].flatten()
    )


def canonical(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", "")


def make(kind: str, lora: bool) -> nn.Module:
    changes: dict[str, Any] = {"tied": True} if kind == "opt" else {}
    if kind == "opt":
        changes["dropout"] = 0.0
    model = tiny_model(kind, **changes)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        targets = ["q_proj", "v_proj"]
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        )
    return model


def walked(
    kind: str,
    lora: bool,
    name: str,
    mesh: dict[str, int],
    steps: int,
    look: Callable[[Walker], Any] = lambda walker: None,
    **changes: Any,
) -> dict[str, Any]:
    """What a walker came to after some steps, and what ``look`` saw of it."""
    model = make(kind, lora)
    settings = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": DECAY,
        "max_grad_norm": changes.pop("max_grad_norm", 0.0),
    }
    nested = {
        key.removeprefix("mesh."): changes.pop(key)
        for key in list(changes)
        if key.startswith("mesh.")
    }
    plan = method(name, mesh={**mesh, **nested}, optimizer=settings, **changes)
    with Walker(model, plan, device="cpu") as walker:
        gradients = walker.gradients(random_batch(8, 10, seed=0))
        results = [walker.step(random_batch(8, 10, seed=step)) for step in range(steps)]
        evaluated = walker.evaluate(random_batch(3, 10, seed=99))
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "gradients": gradients,
            "weights": masters(walker),
            "evaluated": evaluated.loss,
            "kept": sum(op.keep_graph for op in walker.program(StepKind.TRAIN, Shape(2, 10)).ops),
            "looked": look(walker),
        }


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return bool((one - other).norm() <= tolerance * other.norm() + 1e-9)


def compare(found: dict[str, Any], plain: dict[str, Any], case: object) -> None:
    """Losses and first gradients to 1e-6, weights to 1e-4 of each tensor's norm, the gradients'
    norms to 1e-5. Where a gradient is a small difference the plain loop itself is further than that
    from the truth (an adapter's, 1.25e-6): ours has to be as near to float64's then."""
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-6), case
    assert found["norms"] == pytest.approx(plain["norms"], rel=1e-5), case
    assert found["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-5), case
    for key in ("gradients", "weights"):
        assert found[key].keys() == {canonical(name) for name in plain[key]}, case
    for name, value in plain["weights"].items():
        if (
            "k_proj.bias" not in name
        ):  # its gradient is zero in exact arithmetic: AdamW follows the rounding
            assert close(found["weights"][canonical(name)], value, 1e-4), (case, name)
    for name, value in plain["gradients"].items():
        gradient = found["gradients"][canonical(name)]
        vanishes = float(value.norm()) < 1e-7
        within = close(gradient, value, 1e-6) or close(
            gradient.double(), plain["exact"][name], 1e-6
        )
        assert vanishes or within, (case, name)

"""Oracle: the same run with ``compile: false``; and how many graphs a backend is given, which a
kind of block needs one of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk import method
from blockwalk.plan.choices import LoraSettings
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.zeroth_order_runs import trained

Graphs = list[torch.fx.GraphModule]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """The graphs that blocks are compiled to, run as they are: what a code generator would make of
    them is its own affair."""
    found: Graphs = []
    compiler = torch.compile

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function: compiler(function, backend=backend))
    return found


ZEROTH_ORDER: dict[str, dict[str, Any]] = {
    "resident": {"name": "mezo"},
    "disk": {"name": "zo2", "trainable": "disk", "frozen": "disk", "update": {"flush_every": 2}},
    "fp8": {"name": "zo2", "trainable": "host × fp8"},
    "hizoo": {"name": "mezo", "zo": {"kind": "hizoo", "hessian_alpha": 1e-3}},
    "the original's noise": {"name": "mezo", "zo": {"noise": "mezo"}, "loss": "model"},
}


@pytest.mark.parametrize("settings", ZEROTH_ORDER.values(), ids=ZEROTH_ORDER)
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_one_graph_serves_every_block(
    kind: str, settings: dict[str, Any], graphs: Graphs, tmp_path: Path
) -> None:
    model = tiny_model(kind, tied=True)
    runs = []
    for compiled in (False, True):
        plan = method(**settings, optimizer={"learning_rate": 1e-3}, compile=compiled)
        with Walker(
            copy.deepcopy(model), plan, workdir=tmp_path / str(compiled), device="cpu"
        ) as walker:
            results = [walker.step(random_batch(seed=step), seed=step) for step in range(3)]
            losses = [walker.evaluate(random_batch(seed=9)).loss, *(r.loss for r in results)]
            runs.append((losses, [r.projected_grad for r in results], trained(walker)))
    assert len(graphs) == 1
    (losses, grads, weights), (found_losses, found_grads, found_weights) = runs
    assert found_losses == pytest.approx(losses, rel=1e-6)
    assert found_grads == pytest.approx(grads, rel=1e-2)
    for name, weight in weights.items():
        torch.testing.assert_close(found_weights[name], weight)


BACKPROP: dict[str, dict[str, Any]] = {
    "plain": {"name": "plain"},
    "plain, recomputed": {"name": "plain", "recompute": "all"},
    "mebp": {"name": "mebp", "frozen": "disk"},
}


@pytest.mark.parametrize("settings", BACKPROP.values(), ids=BACKPROP)
def test_gradients_through_compiled_blocks(
    settings: dict[str, Any], graphs: Graphs, tmp_path: Path
) -> None:
    """A forward without a graph and one with: two graphs."""
    lora = LoraSettings(rank=2) if settings["name"] == "mebp" else None
    model = tiny_model("llama", tied=True)
    found = []
    for compiled in (False, True):
        plan = method(**settings, compute_dtype="float32", compile=compiled)
        with Walker(
            copy.deepcopy(model), plan, lora=lora, workdir=tmp_path / str(compiled), device="cpu"
        ) as walker:
            found.append(walker.gradients(random_batch(seed=1)))
            walker.step(random_batch(seed=2))
    assert 1 <= len(graphs) <= 2
    for name, gradient in found[0].items():
        torch.testing.assert_close(
            found[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_weights_that_are_never_whole_are_refused(tmp_path: Path) -> None:
    with refused(ValueError, "weights compile: false"):
        method("mebp", compile=True)
    stored = tiny_model("llama").to(torch.bfloat16)
    plan = method("mebp", frozen="disk", compute_dtype="float32", compile=True)
    with refused(ValueError, "q_proj.weight compile: false"):
        Walker(stored, plan, lora=LoraSettings(rank=2), workdir=tmp_path, device="cpu")
    with refused(ValueError, "ranks compile: false"):
        method("fcdp", compile=True)

"""Oracle: ``torch.optim`` on the model's own gradients, with the parameter groups of
``transformers.Trainer``'s own rule."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from blockwalk.plan.methods import method
from blockwalk.system import atomic_files
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused

DECAY = 2.0
RATE = 1e-2
STEPS = 4
EPS = 1e-3
"""Far above rounding, which is all the gradient that a key's bias has."""


def groups(model: nn.Module, decay: float = DECAY) -> list[dict[str, Any]]:
    """Parameter groups as Trainer makes them."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda made: torch.optim.AdamW(made, lr=RATE, eps=EPS, foreach=False, fused=False),
    "sgd": lambda made: torch.optim.SGD(made, lr=RATE, foreach=False),
    "momentum": lambda made: torch.optim.SGD(made, lr=RATE, momentum=0.9, foreach=False),
}


def control(model: nn.Module, rule: str, made: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The weights of a plain loop."""
    optimizer = OPTIMIZERS[rule](made)
    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**random_batch(seed=step), use_cache=False).loss.backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def model_of(kind: str) -> nn.Module:
    dropouts = {"opt": ["dropout"], "gpt2": ["resid_pdrop", "embd_pdrop", "attn_pdrop"]}
    return tiny_model(kind, **dict.fromkeys(dropouts.get(kind, []), 0.0))


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, weight in expected.items():
        assert (found[name] - weight).norm() <= 1e-4 * weight.norm() + 1e-6, name


@pytest.mark.parametrize(
    ("kind", "rule", "plan"),
    [
        ("llama", "adamw", {"name": "plain"}),
        ("phi", "adamw", {"name": "mebp", "frozen": "disk"}),
        ("opt", "adamw", {"name": "plain", "trainable": "host", "optimizer_state": "host"}),
        ("gpt2", "sgd", {"name": "plain", "trainable": "disk", "optimizer_state": "disk"}),
        ("opt", "momentum", {"name": "plain", "update.timing": "block"}),
    ],
)
def test_norms_and_biases_do_not_decay(
    kind: str, rule: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    model = model_of(kind)
    settings = {"name": rule, "learning_rate": RATE, "weight_decay": DECAY, "eps": EPS}
    with Walker(
        copy.deepcopy(model), method(**plan, optimizer=settings), workdir=tmp_path, device="cpu"
    ) as walker:
        for step in range(STEPS):
            walker.step(random_batch(seed=step))
        found = walker.state_dict()
    same(found, control(model, rule, groups(model)))


def test_all_decays_everything(tmp_path: Path) -> None:
    model = model_of("opt")
    settings = {"learning_rate": RATE, "weight_decay": DECAY, "decay": "all", "eps": EPS}
    with Walker(
        copy.deepcopy(model), method("plain", optimizer=settings), workdir=tmp_path, device="cpu"
    ) as walker:
        for step in range(STEPS):
            walker.step(random_batch(seed=step))
        found = walker.state_dict()
    same(found, control(model, "adamw", [{"params": [*model.parameters()], "weight_decay": DECAY}]))


def test_a_run_of_an_older_checkpoint_goes_on_as_it_began(tmp_path: Path) -> None:
    """A checkpoint without the fact that the decay spares anything; the checkpoint that the resumed
    run writes is one too."""
    model = model_of("opt")
    plan = method("plain", optimizer={"learning_rate": RATE, "weight_decay": DECAY, "eps": EPS})

    def walker() -> Walker:
        return Walker(copy.deepcopy(model), plan, device="cpu")

    with walker() as first:
        first.save_state(tmp_path / "0")
        assert first.notes() == []
    table = tmp_path / "0" / "rank-00000.json"
    text = json.loads(table.read_text())
    old = {key: value for key, value in text.items() if key not in ("facts", [*text][-1])}
    atomic_files.write_sealed(table, old)
    for step in range(STEPS):
        with walker() as resumed:
            resumed.load_state(tmp_path / str(step))
            assert "norms and biases" in resumed.notes()[0]
            resumed.step(random_batch(seed=step))
            resumed.save_state(tmp_path / str(step + 1))
            found = resumed.state_dict()
    same(found, control(model, "adamw", [{"params": [*model.parameters()], "weight_decay": DECAY}]))


def test_zeroth_order_keeps_the_rule_of_the_original() -> None:
    with refused(ValueError, "optimizer.decay"):
        method("mezo", optimizer={"decay": "all"})

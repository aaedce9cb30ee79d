"""Oracle: torch.optim.SGD with Nesterov momentum over the whole model. The rule is registered from
here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockwalk import method
from blockwalk.cli.settings_help import described
from blockwalk.numerics.updates import UPDATE_CHUNK
from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.update_rules import RULES, RuleFacts
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.rows import registered

RATE = 0.05


def nesterov(
    settings: OptimizerSettings,
    work: Tensor,
    p: Tensor,
    g: Tensor,
    b: Tensor,
    *,
    step: int,
    lr: float,
) -> None:
    """b ← momentum·b + g, θ ← θ − lr·(g + momentum·b)."""
    b.mul_(settings.momentum).add_(g)
    p.add_(torch.add(g, b, alpha=settings.momentum, out=work), alpha=-lr)


@pytest.fixture(autouse=True)
def rule() -> Iterator[None]:
    row = RuleFacts(
        states=("velocity",), settings=("momentum",), implementation=nesterov, help="looks ahead"
    )
    with registered(RULES, "nesterov", row):
        yield


@pytest.mark.parametrize("name", ["plain", "mebp"])
def test_a_rule_from_outside_trains_as_torchs(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    control = copy.deepcopy(model).train()
    torchs = torch.optim.SGD(control.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    settings = {"name": "nesterov", "learning_rate": RATE}
    plan = method(name, optimizer=settings, frozen="device × raw")
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        for step in range(4):
            batch = random_batch(seed=step)
            loss = control(**batch, use_cache=False).loss
            assert walker.step(batch).loss == pytest.approx(float(loss.detach()), rel=1e-5)
            torchs.zero_grad()
            loss.backward()
            torchs.step()
        masters = walker.engine.trained.masters
        for key, parameter in control.named_parameters():
            torch.testing.assert_close(masters[key], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_help_and_messages_know_it() -> None:
    words, sentence = described("optimizer.name")
    assert words.endswith("|nesterov")
    assert "nesterov: looks ahead" in sentence
    with refused(ValueError, "optimizer.name nestorov nesterov"):
        method("plain", **{"optimizer.name": "nestorov"})
    with refused(ValueError, "optimizer.name nesterov taken|already"):
        RULES.register("nesterov", RuleFacts())


def spectral(
    settings: OptimizerSettings,
    work: Tensor,
    p: Tensor,
    g: Tensor,
    b: Tensor,
    *,
    step: int,
    lr: float,
) -> None:
    """b ← momentum·b + g, θ ← θ − lr·b / σ of b's largest singular value; of a vector its norm."""
    b.mul_(settings.momentum).add_(g)
    p.sub_(torch.div(b, torch.linalg.norm(b, 2), out=work), alpha=lr)


MATRIX_RULE = RuleFacts(
    states=("velocity",), settings=("momentum",), needs="matrices", implementation=spectral
)


@pytest.mark.parametrize("name", ["plain", "mebp"])
def test_a_rule_of_matrices_gets_each_whole(name: str, tmp_path: Path) -> None:
    """Oracle: the formula on the whole model's gradients, by torch's autograd and svdvals. A matrix
    has more elements than a chunk of an update, and there are vectors."""
    model = tiny_model("llama", vocab_size=2100)
    control = copy.deepcopy(model).train()
    velocities = {key: torch.zeros_like(p) for key, p in control.named_parameters()}
    settings = {"name": "spectral", "learning_rate": 1e-3, "momentum": 0.8}
    with registered(RULES, "spectral", MATRIX_RULE):
        plan = method(name, optimizer=settings, frozen="device × raw")
        with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
            for step in range(2):
                batch = random_batch(seed=step)
                walker.step(batch)
                control.zero_grad()
                control(**batch, use_cache=False).loss.backward()
                for key, parameter in control.named_parameters():
                    b = velocities[key].mul_(0.8).add_(parameter.grad)
                    matrix = b if b.ndim == 2 else b[None]
                    largest = torch.linalg.svdvals(matrix)[0]
                    parameter.data.sub_(b / largest, alpha=1e-3)
            masters = walker.engine.trained.masters
            assert max(p.numel() for p in control.parameters()) > UPDATE_CHUNK
            for key, parameter in control.named_parameters():
                torch.testing.assert_close(masters[key], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_slices_that_cut_through_matrices_are_refused() -> None:
    """Oracle: the plans. Whole parameters are updated on one process and in first order alone."""
    mesh = {"mesh.world": 2, "mesh.ranks_per_node": 2}
    with registered(RULES, "spectral", MATRIX_RULE):
        for name, settings, facts in (
            ("zero3", mesh, "optimizer_state|trainable world"),
            ("fcdp", mesh, "optimizer_state|trainable world|node"),
            ("zo2", {}, "zo2"),
            ("mezo", {}, "mezo"),
        ):
            with refused(ValueError, "spectral matrices sgd", facts):
                method(name, **{"optimizer.name": "spectral", **settings})
    with refused(ValueError, "needs rows elements matrices"):
        RuleFacts(needs="rows")
    with refused(ValueError, "needs linear elements"):
        RuleFacts(needs="matrices", linear=True)

"""Oracle: torch's cross_entropy(label_smoothing=) on the whole model's logits, and autograd. The
losses here are rows that src does not know."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockwalk.estimators.head import Ending
from blockwalk.numerics.losses.by_logits import by_logits
from blockwalk.plan.losses import LOSSES, LossCall, LossCost, LossFacts, by_tokens, whole_logits
from blockwalk.plan.methods import method
from blockwalk.program.program import Shape
from blockwalk.reference.zeroth_order import masters_of, spsa_step
from blockwalk.walk.unit_costs import UnitCosts
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.rows import registered

SMOOTHING = 0.1


def smoothed(logits_nV: Tensor, labels_n: Tensor) -> Tensor:
    """The cross-entropy with a label of probability 1 − ε, and ε spread evenly over all."""
    log_sum_n = logits_nV.logsumexp(1)
    label_n = logits_nV.gather(1, labels_n.unsqueeze(1)).squeeze(1)
    return log_sum_n - (1 - SMOOTHING) * label_n - SMOOTHING * logits_nV.mean(1)


BY_TOKENS = by_logits(smoothed, tokens=7)


def of_batch(ending: Ending) -> Tensor:
    """The same loss, a mean over a batch, of all its logits at once."""
    logits_NV = ending.logits()[:, :-1].flatten(0, 1).float()
    labels_N = ending.batch["labels"][:, 1:].flatten()
    counts_N = labels_N != -100
    return smoothed(logits_NV[counts_N], labels_N[counts_N]).mean()


ROWS = {
    "label_smoothing": LossFacts(BY_TOKENS, by_tokens, by_chunks=True),
    "label_smoothing_of_batches": LossFacts(of_batch, whole_logits),
}


@pytest.fixture(params=list(ROWS))
def loss(request: pytest.FixtureRequest) -> Iterator[str]:
    with registered(LOSSES, request.param, ROWS[request.param]):
        yield request.param


def torchs(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The control's loss."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits_BSV = model(**inputs, use_cache=False).logits[:, :-1].float()
    labels_BS = batch["labels"][:, 1:]
    return F.cross_entropy(logits_BSV.transpose(1, 2), labels_BS, label_smoothing=SMOOTHING)


def adapted(model: nn.Module) -> nn.Module:
    """The model with LoRA on its head and one projection, B drawn as well."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    modules = ["lm_head", "q_proj"]
    return get_peft_model(model, LoraConfig(r=3, target_modules=modules, init_lora_weights=False))


@pytest.mark.parametrize("name", ["plain", "mebp"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("gemma2", False)])
def test_gradients_and_losses(name: str, kind: str, tied: bool, loss: str, tmp_path: Path) -> None:
    """Plain trains every parameter, the head among them, in two micro-batches that count
    unequally; mebp a LoRA on the head. gemma2 has a soft cap."""
    model = tiny_model(kind, tied=tied)
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2}
    if name == "mebp":
        model = adapted(model)
        settings = {"frozen": "disk × raw"}
    batch = random_batch(seed=3)
    expected = torchs(model, batch)
    expected.backward()
    mean = float(expected.detach())
    plan = method(name, loss=loss, **settings)
    with Walker(copy.deepcopy(model), plan, workdir=tmp_path, device="cpu") as walker:
        assert walker.evaluate(batch).loss == pytest.approx(mean, rel=1e-6)
        gradients = walker.gradients(batch)
        assert walker.step(batch).loss == pytest.approx(mean, rel=1e-6)
        assert walker.step(batch).loss < mean
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = gradients.pop(key.removeprefix("base_model.model.").replace(".default", ""))
            assert parameter.grad is not None
            assert (gradient - parameter.grad).norm() <= 3e-6 * parameter.grad.norm(), key
    assert not gradients


@pytest.mark.parametrize("name", ["mezo", "zo2"])
def test_zeroth_order(name: str, loss: str, tmp_path: Path) -> None:
    """Losses of the step's two forwards, and of the model that it leaves: the naive loop with
    torch's loss."""
    model = tiny_model("llama", tied=True)
    masters = masters_of(model)
    control = copy.deepcopy(model)
    batch = random_batch(seed=4)
    optimizer = {"learning_rate": 1e-3}
    plan = method(name, loss=loss, optimizer=optimizer, gradient_accumulation_steps=2)
    with Walker(model, plan, workdir=tmp_path, device="cpu") as walker:
        result = walker.step(batch)
        expected = spsa_step(
            control, masters, batch, step=1, seed=0, learning_rate=1e-3, loss=torchs
        )
        losses = walker.estimator.entries[0].losses  # type: ignore[union-attr]
        assert losses == pytest.approx(expected.losses, rel=1e-6)
        assert result.loss == losses[0]
        with torch.no_grad():
            for key, parameter in control.named_parameters():
                parameter.copy_(masters[key])
            after = float(torchs(control, batch))
        assert walker.evaluate(batch).loss == pytest.approx(after, rel=1e-5)


def test_forecasts_know_its_bytes_and_its_work() -> None:
    """Closed form: a row that says that its loss takes a megabyte and a thousand FLOPs more than
    another one takes so much more in the epilogue."""
    taken = LossFacts(BY_TOKENS, by_tokens, by_chunks=True)

    def more(call: LossCall) -> LossCost:
        cost = by_tokens(call)
        return replace(
            cost,
            gradient_buffers=cost.gradient_buffers + (1 << 20),
            with_gradient=cost.with_gradient + cost.forward,
        )

    costs = UnitCosts(tiny_model("llama").config)
    shape = Shape(2, 64)
    with (
        registered(LOSSES, "one", taken),
        registered(LOSSES, "two", replace(taken, cost=more)),
    ):
        one, two = (
            costs(method("plain", loss=name), shape).of("epilogue") for name in ("one", "two")
        )
    product = 2 * 126 * 32 * 101
    assert two.backward_transient - one.backward_transient == 1 << 20
    assert two.forward.flops - one.forward.flops == product
    logits = 126 * 101 * 4
    assert one.backward_transient > 3 * logits


def test_its_name_is_refused_until_it_is_there() -> None:
    """Oracle: the table."""
    with refused(ValueError, "loss label_smoothing"):
        method("plain", loss="label_smoothing")
    with registered(LOSSES, "label_smoothing", ROWS["label_smoothing"]):
        assert method("plain", loss="label_smoothing").loss_facts.by_chunks
    with refused(ValueError, "loss objective function"):
        Walker(tiny_model("llama"), method("plain", loss="objective"), device="cpu")

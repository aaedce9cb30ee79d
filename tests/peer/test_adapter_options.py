"""Oracle: PEFT's own optimizer for LoRA+, over the whole PeftModel in memory; transformers' NEFTune
and autograd over the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from transformers.integrations.neftune import activate_neftune

from blockwalk.cutting.peft_models import adapter_parameters, add_adapter, lora_config
from blockwalk.numerics.noise.key import derive_seed
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused


def test_lora_plus_is_that_of_peft() -> None:
    """Four steps of AdamW with weight decay, B at sixteen times the rate of A: losses and
    adapters."""
    model = tiny_model("llama").float()
    batches = [random_batch(seed=i) for i in range(4)]
    control = add_adapter(copy.deepcopy(model), config=lora_config(4, 8), seed=0).train()
    rates = {"lr": 2e-3, "loraplus_lr_ratio": 16.0, "loraplus_weight_decay": 0.1}
    optimizer = create_loraplus_optimizer(control, torch.optim.AdamW, **rates)
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = control(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    plan = method(
        "plain", optimizer={"learning_rate": 2e-3, "lora_b_ratio": 16.0, "weight_decay": 0.1}
    )
    with Walker(model, plan, lora={"rank": 4, "alpha": 8}, device="cpu") as walker:
        assert [walker.step(batch).loss for batch in batches] == pytest.approx(expected, rel=1e-5)
        found = walker.state_dict()
    for name, parameter in adapter_parameters(control).items():
        torch.testing.assert_close(found[name], parameter.data, rtol=1e-3, atol=2e-5, msg=name)


def test_noise_on_embeddings_is_that_of_transformers() -> None:
    """The gradients of a noisy step; an evaluation without noise."""
    model = tiny_model("llama").float()
    batch = random_batch()
    plan = method("plain", neftune_noise_alpha=5.0)
    with Walker(copy.deepcopy(model), plan, device="cpu") as walker:
        found = walker.gradients(batch)
        evaluated = walker.evaluate(batch).loss
        stepped = walker.step(batch).loss
    assert evaluated == pytest.approx(float(model.eval()(**batch).loss), rel=1e-5)
    activate_neftune(model.train(), 5.0)
    torch.manual_seed(derive_seed(plan.seed, "dropout", 1, 0, 0))
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert stepped == pytest.approx(float(loss), rel=1e-5) != pytest.approx(evaluated, rel=1e-3)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("mezo", {"optimizer": {"lora_b_ratio": 4.0}}, "ledger optimizer.lora_b_ratio 1"),
        ("zero3", {"optimizer": {"lora_b_ratio": 4.0}, "mesh": {"world": 2}}, "A B"),
        ("zo2", {"neftune_noise_alpha": 5.0}, "perturbation"),
        ("plain", {"neftune_noise_alpha": -1.0}, "neftune_noise_alpha -1.0 0"),
    ],
)
def test_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with refused(ValueError, words):
        method(name, **settings)

"""Oracle: autograd over PEFT's own model, whose logits are whole in memory; here they never are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.cut_model import CutModel
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model


def adapted(kind: str, tied: bool) -> Any:
    """A model with LoRA on its head and one projection, B drawn as well."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(
        r=3, lora_alpha=7, target_modules=["lm_head", "q_proj"], init_lora_weights=False
    )
    return get_peft_model(tiny_model(kind, tied=tied), config)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the logits are made whole")


@pytest.mark.parametrize("plan", ["plain", "mebp", "fcdp", "mezo", "zo2"])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("gemma2", False)])
def test_a_head_with_lora_has_a_chunked_loss(
    plan: str, kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(kind, tied).eval()
    batch = random_batch()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    with torch.no_grad():
        logits_BV = model(input_ids=batch["input_ids"], use_cache=False).logits[:, -1]
    settings = {"frozen": "disk × raw"} if plan == "mebp" else {}
    with Walker(
        copy.deepcopy(model), method(plan, **settings), workdir=tmp_path, device="cpu"
    ) as walker:
        monkeypatch.setattr(CutModel, "logits", refuse)  # once the model is known to be cut right
        monkeypatch.setattr(CutModel, "own_loss", refuse)
        assert walker.evaluate(batch).loss == pytest.approx(float(loss.detach()), rel=1e-6)
        torch.testing.assert_close(walker.next_logits(batch), logits_BV, rtol=1e-5, atol=1e-6)
        if plan in ("mezo", "zo2"):
            walker.step(batch)
            return
        found = walker.gradients(batch)
        walker.step(batch)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 3e-6 * gradient.norm(), name

"""Oracle: autograd through transformers and PEFT. Models with a vision tower, as the hub's folders
have them, learn text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

from blockwalk import Walker, method
from blockwalk.cutting.saved_adapters import load_adapter
from blockwalk.plan.choices import LoraSettings
from tests.support.vision_models import batch_of_text, make


@pytest.mark.parametrize(
    ("targets", "options", "in_text", "in_vision"),
    [
        ("all-linear", {}, 14, 0),
        ("all-linear", {"exclude_modules": ["o_proj"]}, 12, 0),
        ("all-linear", {"exclude_modules": r".*\.mlp\..*"}, 8, 0),
        (("q_proj", "v_proj"), {}, 4, 4),
    ],
)
def test_adapters_of_a_model_with_a_vision_tower(
    targets: Any, options: dict[str, Any], in_text: int, in_vision: int, tmp_path: Path
) -> None:
    """Oracle: PEFT's gradients of the same adapters; the counts of linear layers in the two
    configurations above."""
    model = make()
    batch = batch_of_text()
    model.save_pretrained(tmp_path / "model")
    lora = LoraSettings(rank=2, target_modules=targets, options=options)
    plan = method("mebp", frozen="disk × raw", optimizer={"learning_rate": 1e-2})
    with Walker(tmp_path / "model", plan, lora=lora, workdir=tmp_path, device="cpu") as walker:
        walker.step(batch)
        walker.save_pretrained(tmp_path / "adapter")
        gradients = walker.gradients(batch)
        names = [name for name in walker.engine.trained.masters if "lora_A" in name]
    assert sum("language_model" in name for name in names) == in_text
    assert sum("vision_tower" in name for name in names) == in_vision
    control = load_adapter(model, tmp_path / "adapter").train()
    control(**batch, use_cache=False).loss.backward()
    for name, param in control.named_parameters():
        if param.requires_grad and param.grad is not None:
            mine = gradients.pop(name.removeprefix("base_model.model.").replace(".default", ""))
            assert (mine - param.grad).norm() <= 1e-5 * param.grad.norm(), name
    assert not gradients


@pytest.mark.parametrize(
    ("kind", "adapted"),
    [("mistral3", 14), ("qwen2_5_vl", 14), ("llama4", 8), ("phi4_multimodal", 8)],
)
def test_a_model_with_pictures_learns_text(kind: str, adapted: int, tmp_path: Path) -> None:
    """Oracle: PEFT's gradients, in transformers' whole class, which the saved adapter fits; the
    linear layers of the text but those where a mixture's experts stand in any layer."""
    model = make(kind)
    batch = batch_of_text()
    try:
        model(**batch, use_cache=False)
    except AttributeError as error:  # llama4 in transformers 5.24.0
        pytest.skip(
            f"transformers {transformers.__version__}: the model's own forward fails: {error}"
        )
    model.save_pretrained(tmp_path / "model")
    plan = method("mebp", frozen="disk × raw", optimizer={"learning_rate": 1e-2})
    with Walker(
        tmp_path / "model", plan, lora={"rank": 2}, workdir=tmp_path, device="cpu"
    ) as walker:
        walker.step(batch)
        walker.save_pretrained(tmp_path / "adapter")
        gradients = walker.gradients(batch)
        assert not [
            p.name
            for p in walker.spec.params()
            if any(tower in p.name for tower in ("vision", "visual", "extend"))
        ]
    assert len(gradients) == 2 * adapted
    control = load_adapter(model, tmp_path / "adapter").train()
    control(**batch, use_cache=False).loss.backward()
    named = {
        n.removeprefix("base_model.model.").replace(".default", ""): p
        for n, p in control.named_parameters()
    }
    for name, mine in gradients.items():
        assert (mine - named[name].grad).norm() <= 1e-5 * named[name].grad.norm(), name


def test_what_text_does_not_reach_is_saved_as_it_came(tmp_path: Path) -> None:
    """Oracle: transformers' own reading. Every parameter is trained but the tower's, which no text
    reaches."""
    make().save_pretrained(tmp_path / "model")
    plan = method("plain", optimizer={"learning_rate": 1e-2, "weight_decay": 0.1, "decay": "all"})
    with Walker(tmp_path / "model", plan, workdir=tmp_path, device="cpu") as walker:
        walker.step(batch_of_text())
        walker.save_pretrained(tmp_path / "saved")
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").state_dict()
    saved, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    changed = {
        name for name, value in saved.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {name for name in before if "vision" not in name and "projector" not in name}

"""Oracle: PEFT's own forward, autograd and files, for a ``PeftModel`` in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftModel,
    RandLoraConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file

from blockwalk import Walker, method
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.owners_changes import disable_adapter, freeze_factors, scale_adapter

LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"]}


def _adapted(**settings: Any) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(**LORA, r=4, init_lora_weights=False, **settings)
    return get_peft_model(tiny_model("llama"), config)


def _plan(name: str) -> Any:
    exact = {"compute_dtype": "float32", "optimizer.learning_rate": 1e-2}
    return method(name, **exact, **({"frozen": "disk × raw"} if name == "mebp" else {}))


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


def _layer_frozen(model: Any) -> None:
    for name, param in model.named_parameters():
        if "layers.0" in name:
            param.requires_grad_(False)


def _second_of_two(model: Any) -> None:
    model.add_adapter("second", LoraConfig(**LORA, r=2, init_lora_weights=False))
    model.set_adapter("second")


def _hooked(model: Any) -> None:
    layer = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    layer.lora_A.default.register_forward_hook(lambda _m, _i, out: torch.tanh(out))


STATES: dict[str, Callable[[Any], None]] = {
    function.__name__.strip("_"): function
    for function in (scale_adapter, freeze_factors, _layer_frozen, _second_of_two, _hooked)
}


@pytest.mark.parametrize("name", ["plain", "mebp"])
@pytest.mark.parametrize("change", STATES.values(), ids=STATES.keys())
def test_the_state_of_an_adapter_is_followed(
    name: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    batch = random_batch()
    model = _adapted()
    change(model)
    loss = model(**batch).loss
    loss.backward()
    expected = sorted(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    before = {n: p.clone() for n, p in model.named_parameters() if "lora_" in n}
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    handed = _adapted()
    change(handed)
    (active,) = handed.active_adapters
    with Walker(handed, _plan(name)) as walker:
        gradients = walker.gradients(batch)
        assert walker.evaluate(batch).loss == pytest.approx(loss.item(), abs=2e-6)
        assert sorted(float(g.norm()) for g in gradients.values()) == pytest.approx(
            expected, rel=1e-4
        )
        walker.step(batch)
        walker.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    for parameter, tensor in again.named_parameters():
        original = parameter.replace(".default.", f".{active}.")
        if original in before:
            assert torch.equal(tensor, before[original]) == (original in frozen), original


@pytest.mark.parametrize("name", ["plain", "mebp", "zo2"])
def test_a_disabled_adapter_answers_nothing(name: str) -> None:
    batch = random_batch()
    model = _adapted()
    disable_adapter(model)
    with Walker(model, _plan(name), training=False) as walker:
        assert walker.evaluate(batch).loss == pytest.approx(
            _loss(tiny_model("llama"), batch), abs=2e-6
        )


def test_an_adapter_on_rounded_weights_keeps_its_scale() -> None:
    batch = random_batch()
    losses = []
    for scale in (1.0, 3.0):
        model = _adapted()
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(scale)
        expected = _loss(model, batch)
        with Walker(model, method("mebp", compute_dtype="float32", frozen="disk × int8")) as walker:
            losses.append(walker.evaluate(batch).loss - expected)
    assert losses == pytest.approx([0.0, 0.0], abs=2e-3)


def test_zeroth_order_leaves_frozen_factors_alone(tmp_path: Path) -> None:
    model = _adapted()
    freeze_factors(model)
    before = {n: p.clone() for n, p in model.named_parameters() if "lora_" in n}
    with Walker(model, _plan("zo2")) as walker:
        walker.step(random_batch())
        walker.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    for name, tensor in again.named_parameters():
        if name in before:
            assert torch.equal(tensor, before[name]) == ("lora_A" in name), name


def _merged(model: Any) -> None:
    model.merge_adapter()


def _both(model: Any) -> None:
    _second_of_two(model)
    model.base_model.set_adapter(["default", "second"])


@pytest.mark.parametrize(
    ("change", "facts"),
    [(_merged, "merged unmerge_adapter q_proj"), (_both, "2 default second set_adapter")],
)
@pytest.mark.parametrize("name", ["plain", "mebp"])
def test_a_state_that_no_walk_follows_is_named(
    name: str, change: Callable[[Any], None], facts: str
) -> None:
    model = _adapted()
    change(model)
    with refused(ValueError, facts):
        Walker(model, _plan(name))


def test_an_adapter_with_a_loss_of_its_own_is_named() -> None:
    config = AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=10)
    with refused(ValueError, "AdaLoraModel LoRA"):
        Walker(get_peft_model(tiny_model("llama"), config), _plan("plain"))


@pytest.mark.parametrize(
    "settings", [{"bias": "all"}, {"bias": "lora_only"}, {"alora_invocation_tokens": [5]}]
)
def test_an_adapter_that_changes_more_than_its_layers_is_named(settings: dict[str, Any]) -> None:
    ((field, value),) = settings.items()
    with refused(ValueError, f"{field} {str(value).strip('[]')}"):
        Walker(_adapted(**settings), _plan("plain"))


@pytest.mark.parametrize(
    "config",
    [
        VeraConfig(**LORA, r=4),
        RandLoraConfig(**LORA, r=4),
        OFTConfig(**LORA, oft_block_size=8),
        IA3Config(**LORA, feedforward_modules=["down_proj"]),
    ],
    ids=["VeRA", "RandLoRA", "OFT", "IA3"],
)
def test_a_file_of_another_adapter_is_pefts(config: Any, tmp_path: Path) -> None:
    batch = random_batch()

    def made() -> Any:
        torch.manual_seed(1)
        return get_peft_model(tiny_model("llama"), config)

    made().save_pretrained(tmp_path / "peft")
    with Walker(made(), _plan("plain")) as walker:
        walker.step(batch)
        loss = walker.evaluate(batch).loss
        walker.save_pretrained(tmp_path / "walk")
    name = "adapter_model.safetensors"
    assert load_file(tmp_path / "walk" / name).keys() == load_file(tmp_path / "peft" / name).keys()
    again = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "walk")
    assert _loss(again, batch) == pytest.approx(loss, abs=2e-6)

"""Oracle: the models' own forward, autograd and generation. Their later layers attend to keys and
values of earlier ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.walk.context_check import require_parts
from blockwalk.walk.stages_check import require_stages
from blockwalk.walk.walker import Walker
from tests.models import random_batch
from tests.support.control import tiny_config
from tests.support.control import tiny_model as rough_model
from tests.support.messages import refused
from tests.support.walker_plans import PLANS, own_gradients

FAMILIES: dict[str, dict[str, Any]] = {
    "wide": {
        "num_kv_shared_layers": 12,
        "hidden_size_per_layer_input": 32,
        "use_double_wide_mlp": True,
    },
    "narrow": {"num_kv_shared_layers": 6, "hidden_size_per_layer_input": 32},
}
"""Settings of Gemma 4: what its later layers have in place of keys and values of their own."""


def family(kind: str) -> Any:
    """A random model of which the last layers have no keys and values of their own."""
    return rough_model(tiny_config("gemma4_text", **FAMILIES[kind])).eval()


def batch_of(model: Any) -> dict[str, torch.Tensor]:
    batch = random_batch(batch=2, sequence=9)
    assert model.config.get_text_config().vocab_size > int(batch["input_ids"].max())
    return batch


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gradients_through_shared_keys_and_values(
    kind: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    model = family(kind)
    batch = batch_of(model)
    loss, expected = own_gradients(model, batch)
    shares = min(plan.get("gradient_accumulation_steps", 1), 2)
    together = min(plan.get("together", 1), shares)
    plan = {**plan, "gradient_accumulation_steps": shares, "together": together}
    with Walker(copy.deepcopy(model), method(**plan), workdir=tmp_path, device="cpu") as walker:
        gradients = walker.gradients(batch)
        evaluated = walker.evaluate(batch)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 5e-6 * expected[name].norm() + 1e-8, name
    assert evaluated.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_frozen_writer_hands_its_gradient_on(kind: str, tmp_path: Path) -> None:
    """The gradient of an adapter below the writer passes through its keys and values: PEFT's
    autograd is the oracle."""
    from peft import LoraConfig, get_peft_model

    model = family(kind)
    batch = batch_of(model)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    adapted: Any = get_peft_model(copy.deepcopy(model), config)
    adapted(**batch, use_cache=False).loss.backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in adapted.named_parameters()
        if p.grad is not None
    }
    plan = method("mebp", frozen="disk × raw")
    with Walker(adapted, plan, workdir=tmp_path, device="cpu") as walker:
        gradients = walker.gradients(batch)
    assert gradients.keys() == expected.keys()
    assert any(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 5e-6 * expected[name].norm() + 1e-9, name


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", ["plain", "mezo"])
def test_generation_shares_keys_and_values(kind: str, name: str) -> None:
    model = family(kind)
    prompt_BS = torch.randint(3, 101, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = model.generate(
        prompt_BS, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with Walker(copy.deepcopy(model), method(name), training=False, device="cpu") as walker:
        written = walker.generate(prompt_BS, 8)
    assert written.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", FAMILIES)
def test_zeroth_order_on_disk_is_zeroth_order_in_memory(kind: str, tmp_path: Path) -> None:
    """Oracle: the same steps with every weight resident, whose losses are the model's own at the
    same noise."""
    model = family(kind)
    losses = {}
    for name, settings in (("mezo", {"noise": "gaussian"}), ("zo2", {"noise": "gaussian"})):
        plan = method(name, zo={**settings, "epsilon": 1e-5}, optimizer={"learning_rate": 1e-4})
        with Walker(copy.deepcopy(model), plan, workdir=tmp_path / name, device="cpu") as walker:
            losses[name] = [walker.step(batch_of(model)).loss for _ in range(2)]
    assert losses["mezo"] == losses["zo2"]
    own = float(model(**batch_of(model), use_cache=False).loss.detach())
    assert losses["mezo"][0] == pytest.approx(own, rel=1e-3)


def test_what_is_handed_on_is_foreseen() -> None:
    """Oracle: the size of keys and values by arithmetic: two writers, each B × S × heads × width ×
    2, and their gradients."""
    from blockwalk.program.program import Shape
    from blockwalk.walk.unit_costs import UnitCosts

    config = tiny_config("gemma4_text", **FAMILIES["wide"])
    cut = certified(build_skeleton(config))
    assert cut.anatomy.hands_on
    costs = UnitCosts(config, lora=LoraSettings(rank=4))
    plan = method("mebp", frozen="disk × raw", compute_dtype="float32")
    shape = Shape(2, 9)
    saved = costs(plan, shape).of("prologue").saved
    model = family("wide")
    shared = [
        layer.self_attn for layer in model.model.layers if layer.self_attn.store_full_length_kv
    ]
    elements = sum(2 * shape.tokens * attention.k_proj.out_features for attention in shared)
    assert len(shared) == 2
    assert saved >= 2 * 4 * elements


def test_entries_that_no_layer_reads_stand_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the model's own autograd, on whole rows. Gemma 4 without shared keys may store the
    last keys of each type for an assistant model, by its version of transformers: stages and parts
    of its sequences are allowed."""
    config = tiny_config("gemma4_text", num_kv_shared_layers=0, hidden_size_per_layer_input=0)

    def stored(self: Any) -> list[str | None]:
        kinds = self.layer_types
        last = {len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds}
        return ["store" if layer in last else None for layer in range(len(kinds))]

    monkeypatch.setattr(type(config), "kv_sharing_modes", property(stored))
    model = rough_model(config).eval()
    assert any(layer.self_attn.store_full_length_kv for layer in model.model.layers)
    assert not certified(copy.deepcopy(model)).anatomy.hands_on
    require_parts(model, method("hzp", mesh={"world": 2, "context": 2}))
    require_stages(model, method("hzp", mesh={"world": 2, "pipeline": 2}))
    batch = batch_of(model)
    loss, expected = own_gradients(model, batch)
    with Walker(copy.deepcopy(model), method("plain", recompute="all"), device="cpu") as walker:
        gradients = walker.gradients(batch)
        assert walker.evaluate(batch).loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 5e-6 * expected[name].norm() + 1e-8, name
    shared = family("wide")
    assert certified(shared).anatomy.hands_on
    with refused(ValueError, "hand tensors to later ones"):
        require_parts(shared, method("hzp", mesh={"world": 2, "context": 2}))


def test_dropout_in_attention_is_refused_with_the_entry_that_turns_it_off() -> None:
    """Oracle: the same configuration with that entry, which is not refused."""
    in_parts = method("hzp", mesh={"world": 2, "context": 2})
    drops = rough_model(tiny_config("seed_oss", attention_dropout=0.1))
    with refused(ValueError, "dropout 0.1 set attention_dropout: 0 config.json mesh.context: 1"):
        require_parts(drops, in_parts)
    require_parts(rough_model(tiny_config("seed_oss", attention_dropout=0.0)), in_parts)

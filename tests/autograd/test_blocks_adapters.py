"""Oracle: plain PEFT on the whole model. The same adapter at the same seed, the same logits, loss
and gradients."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.adapters import adapt, as_adapters
from blockwalk.cutting.anatomy import canonical_name
from blockwalk.cutting.peft_models import add_adapter, lora_config
from blockwalk.cutting.saved_adapters import load_adapter, save_adapter
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.cutting.verify import certified
from tests.support.control import assert_same, control, tiny_batch, tiny_config, tiny_model, walk
from tests.support.messages import refused


def canonical(model) -> dict[str, torch.Tensor]:
    return {canonical_name(n, ("default",)): p.detach() for n, p in model.named_parameters()}


def controlled(model, batch, layers, *, seeded: bool):
    loss, logits, grads = control(model, batch, layers, seeded=seeded)
    return loss, logits, {canonical_name(name, ("default",)): grad for name, grad in grads.items()}


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = {
    "mixtral": [*ATTENTION, "gate", "w1", "w2", "w3"],
    "qwen3_moe": ["gate_proj", "up_proj", "down_proj"],
}
"""Experts by the names that their layers once had, which PEFT takes for the fused ones."""


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_adapter_on_a_skeleton_is_pefts_own(model_type: str) -> None:
    """Oracle: `get_peft_model` on the float32 model after `torch.manual_seed`."""
    from peft import get_peft_model

    config = tiny_config(model_type)
    targets = EXPERTS.get(model_type, "all-linear")
    torch.manual_seed(5)
    theirs = get_peft_model(tiny_model_before_seed(config), lora_config(4, target_modules=targets))
    before = torch.get_rng_state()
    ours = add_adapter(
        build_skeleton(config, torch.bfloat16), lora_config(4, target_modules=targets), seed=5
    )
    assert torch.equal(before, torch.get_rng_state()), "the global generator moved"
    mine = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert mine
    assert all(p.is_meta for p in ours.parameters() if not p.requires_grad)
    for name, param in theirs.named_parameters():
        assert param.requires_grad == (name in mine), name
        if param.requires_grad:
            assert mine[name].dtype == torch.float32
            assert torch.equal(mine[name], param), name


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_all_linear_leaves_experts_and_routers_out(model_type: str, tmp_path) -> None:
    """Oracle: the names, and `PeftModel.from_pretrained`, which takes names of a dense layer's or a
    shared expert's for the routed experts': the saved adapter has none of these."""
    from peft import PeftModel

    config = tiny_config(model_type)
    model = add_adapter(tiny_model(config), lora_config(2))
    names = [name for name in canonical(model) if ".lora_" in name]
    assert names
    assert all(".self_attn." in name for name in names)
    save_adapter(model, canonical(model), tmp_path)
    theirs = PeftModel.from_pretrained(tiny_model(config), str(tmp_path))
    assert [n for n, _ in theirs.named_parameters() if "lora_" in n] == [
        n for n, _ in model.named_parameters() if "lora_" in n
    ]


CARRIED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "afmoe": (
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_dense_layers": 1},
        {"q_proj", "k_proj", "v_proj", "o_proj"},
    ),
    "nemotron_h": (
        {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]},
        {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"},
    ),
    "nemotron_h with experts": (
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj"},
    ),
    "jetmoe": ({}, {"kv_proj"}),
    "falcon_h1": (
        {},
        {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_all_linear_is_what_peft_takes_in_the_model(name: str, tmp_path: Path) -> None:
    """Oracle: ``PeftModel.from_pretrained`` takes the saved adapter, and refuses the names that are
    left out; the names of each family's linear layers."""
    from peft import PeftModel

    settings, leaves = CARRIED[name]
    model_type = name.partition(" ")[0]
    config = tiny_config(model_type, num_hidden_layers=4, **settings)
    model = add_adapter(tiny_model(config), lora_config(2))
    adapted = {name.partition(".lora_")[0] for name in canonical(model) if ".lora_" in name}
    assert {name.rpartition(".")[2] for name in adapted} == leaves
    assert not any("experts" in name or "router" in name for name in adapted)
    save_adapter(model, canonical(model), tmp_path)
    theirs = PeftModel.from_pretrained(tiny_model(config), str(tmp_path))
    assert [n for n, _ in theirs.named_parameters() if "lora_" in n] == [
        n for n, _ in model.named_parameters() if "lora_" in n
    ]
    refused_name = "gate_proj" if model_type == "afmoe" else "out_proj"
    with refused(ValueError, "lora.target_modules", refused_name, *leaves):
        add_adapter(tiny_model(config), lora_config(2, target_modules=[refused_name]))


def tiny_model_before_seed(config):
    model = tiny_model(config)
    torch.manual_seed(5)
    return model


@pytest.mark.parametrize("model_type", ["llama", "opt", "gpt2", "gemma3_text", "qwen3_moe"])
def test_walk_with_lora_dropout_is_pefts_autograd(model_type: str) -> None:
    """Oracle: autograd of the whole PeftModel, in training mode with dropout in the adapter (and
    the model's own)."""
    config = tiny_config(model_type)
    dropout = (
        0.0 if model_type == "qwen3_moe" else 0.2
    )  # PEFT adapts fused experts without dropout only
    targets = EXPERTS.get(model_type, "all-linear")
    model = add_adapter(
        tiny_model(config), lora_config(3, dropout=dropout, target_modules=targets), seed=1
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.2)
    cut = certified(
        add_adapter(build_skeleton(config), lora_config(3, dropout=dropout, target_modules=targets))
    )
    cut.take_parameters()
    model.train()
    cut.model.train()
    batch = tiny_batch(config.vocab_size)
    layers = [model.get_base_model().get_submodule(block.name) for block in cut.spec().blocks]
    walked = walk(cut, canonical(model), batch)
    assert len(walked[2]) == len([p for p in model.parameters() if p.requires_grad])
    assert_same(walked, controlled(model, batch, layers, seeded=True), 2e-6)


def test_saved_adapter_loads_in_plain_peft(tmp_path) -> None:
    """Oracle: `PeftModel.from_pretrained` gives the logits of the model that was saved; so does
    `load_adapter`."""
    from peft import PeftModel

    config = tiny_config("llama")
    trained = add_adapter(tiny_model(config), lora_config(4, alpha=12.0), seed=3)
    with torch.no_grad():
        for name, param in trained.named_parameters():
            if "lora_B" in name:
                param.normal_()
    trained.eval()
    batch = {"input_ids": tiny_batch(config.vocab_size)["input_ids"]}
    save_adapter(trained, canonical(trained), tmp_path)
    base = tiny_model(config)
    assert not torch.equal(base.eval()(**batch).logits, trained(**batch).logits)
    theirs = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    assert torch.equal(theirs(**batch).logits, trained(**batch).logits)
    ours = load_adapter(tiny_model(config), tmp_path).eval()
    assert torch.equal(ours(**batch).logits, trained(**batch).logits)
    partial = dict(list(canonical(trained).items())[:-8])
    with refused(ValueError, "missing"):
        save_adapter(trained, partial, tmp_path / "partial")
    with refused(ValueError, "names|is"):
        load_adapter(tiny_model(tiny_config("opt")), tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "eva"}, "init_lora_weights"),
        ({"init_lora_weights": "orthogonal"}, "init_lora_weights"),
        ({"use_dora": True, "target_modules": ["embed_tokens"]}, "use_dora model.embed_tokens"),
        ({"bias": "all"}, "bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    ],
)
def test_configurations_that_touch_base_weights_are_refused(settings: dict, reason: str) -> None:
    """Oracle: PEFT's documentation of these settings: each reads, changes or trains base
    weights."""
    config = lora_config(4, **settings)
    with refused(ValueError, reason):
        add_adapter(build_skeleton(tiny_config("llama")), config)


def test_lora_on_the_head_is_described() -> None:
    """Oracle: autograd of the whole PeftModel with an adapter on the output embedding."""
    config = tiny_config("llama")
    targets = ["lm_head", "q_proj"]
    model = add_adapter(tiny_model(config), lora_config(3, target_modules=targets), seed=1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.2)
    cut = certified(add_adapter(build_skeleton(config), lora_config(3, target_modules=targets)))
    cut.take_parameters()
    head = cut.head
    assert head.lora == ("lm_head.lora_A.weight", "lm_head.lora_B.weight", 16 / 3)
    assert (head.weight, head.custom, head.tied) == ("lm_head.weight", False, False)
    values = canonical(model)
    batch = tiny_batch(config.vocab_size)
    with torch.no_grad():
        cut.bind(0, {spec.name: values[spec.name] for spec in cut.spec().prologue.params})
        prologue = cut.prologue(batch)
        hidden = prologue.hidden_BSD
        for call, unit in zip(prologue.calls, cut.spec().blocks, strict=True):
            cut.bind(call.unit, {spec.name: values[spec.name] for spec in unit.params})
            hidden = cut.forward(call, hidden)
        cut.bind(cut.epilogue_index, {"model.norm.weight": values["model.norm.weight"]})
        normed = cut.head_input(prologue, hidden, batch)
        down, up, factor = head.lora
        logits = normed @ (values[head.weight] + factor * values[up] @ values[down]).T
        torch.testing.assert_close(logits, model(**batch).logits)


@pytest.mark.filterwarnings("error")
def test_adapters_may_be_settings_a_mapping_or_pefts_own_configuration() -> None:
    """Oracle: `get_peft_model` of the same configuration; no library's note reaches the caller."""
    from peft import LoraConfig, get_peft_model

    import blockwalk

    config = tiny_config("llama")
    given = LoraConfig(r=3, lora_alpha=5, lora_dropout=0.25, target_modules=["q_proj", "v_proj"],
                       use_rslora=True, rank_pattern={"v_proj": 2},
                       task_type="CAUSAL_LM")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what newer versions of PEFT say
        theirs = (
            get_peft_model(tiny_model_before_seed(config), given).peft_config["default"].to_dict()
        )
    mapping = {"rank": 3, "alpha": 5, "dropout": 0.25, "target_modules": ["v_proj", "q_proj"],
               "options": {"use_rslora": True, "rank_pattern": {"v_proj": 2}}}  # fmt: skip
    settings = blockwalk.LoraSettings(3, 5, 0.25, ("q_proj", "v_proj"), mapping["options"])
    for lora in (given, mapping, settings):
        ours = adapt(build_skeleton(config), as_adapters(lora)).peft_config["default"].to_dict()
        assert {**ours, "base_model_name_or_path": None} == {
            **theirs,
            "base_model_name_or_path": None,
        }


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (3, "lora 3 blockwalk.LoraSettings"),
        ({"r": 8}, "lora.r lora.rank"),
        ({"rank": 0}, "lora.rank 0"),
        ({"use_qalora": True}, "use_qalora"),
        ({"task_type": "SEQ_CLS"}, "task_type SEQ_CLS"),
        ({}, "target_modules None"),
    ],
)
def test_adapters_that_cannot_be_carried_are_refused(lora: object, message: str) -> None:
    """Oracle: the field's name; the last three are PEFT's own configurations."""
    from peft import LoraConfig

    peft_own = isinstance(lora, dict) and not lora.keys() & {"r", "rank"}
    with refused(ValueError, message):
        as_adapters(LoraConfig(**lora) if peft_own else lora)

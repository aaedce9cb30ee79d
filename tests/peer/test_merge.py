"""Oracle: PEFT. A merged folder loads in transformers with the weights of ``merge_and_unload`` and
the adapter's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from blockwalk.convert.merge import merge
from blockwalk.engine.pack import pack
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import EncodedWeight
from blockwalk.plan.placement import Codec
from blockwalk.tiers.block_store.store import BlockStore
from blockwalk.tiers.model_folder import safetensors
from blockwalk.tiers.model_folder.safetensors import save_model
from tests.support.codecs import encode
from tests.support.messages import refused

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # PEFT's, about tied and Conv1D layers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MIXTRAL = {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TIED = {**SIZES, "tie_word_embeddings": True}
ATTENTION = ["q_proj", "v_proj"]

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "all linear": ("llama", SIZES, {"target_modules": "all-linear", "r": 4, "lora_alpha": 7}),
    "rslora": ("llama", SIZES, {"target_modules": ATTENTION, "r": 4, "use_rslora": True}),
    "patterns": (
        "llama",
        SIZES,
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"q_proj": 3},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 33},
        },
    ),
    "conv1d": ("gpt2", GPT2, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "embedding": ("llama", SIZES, {"target_modules": ["embed_tokens", "q_proj"]}),
    "bias": ("qwen2", SIZES, {"target_modules": ATTENTION, "bias": "all", "lora_bias": True}),
    "modules_to_save": (
        "llama",
        SIZES,
        {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]},
    ),
    "tied": ("llama", TIED, {"target_modules": ATTENTION}),
    "saved where tied": (
        "llama",
        TIED,
        {
            "target_modules": ATTENTION,
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "dora": ("qwen2", SIZES, {"target_modules": "all-linear", "r": 4, "use_dora": True}),
    "experts fused": ("mixtral", MIXTRAL, {"target_modules": ATTENTION}),
}


def make(folder: Path, case: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """A random model and a random adapter: every factor and every saved module differs from its
    initial value."""
    family, sizes, settings = CASES[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=dtype)
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    adapted = get_peft_model(model, LoraConfig(**settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder / "adapter")
    return folder / "model", folder / "adapter"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(24).view(2, 12), use_cache=False).logits


@pytest.mark.parametrize("case", CASES)
def test_merged_as_peft_merges(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the state dict of ``merge_and_unload`` and the logits of the unmerged
    ``PeftModel``."""
    model, adapter = make(tmp_path, case)
    monkeypatch.setattr(safetensors, "SHARD_BYTES", 50_000)
    merge(model, adapter, tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors.index.json").is_file()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)
    expected = theirs.merge_and_unload().state_dict()
    changed = 0
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
        if torch.equal(expected[name], before[name]):
            assert torch.equal(tensor, before[name]), f"{name} is copied bit for bit"
        else:
            changed += 1
    assert changed >= 3


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    """Oracle: ``merge_and_unload`` of float32 factors into bfloat16 weights, bit for bit up to the
    order of R additions."""
    model, adapter = make(tmp_path, "all linear", torch.bfloat16)
    merge(model, adapter, tmp_path / "merged")
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype="auto"), adapter
    )
    differing = 0
    total = 0
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        assert ours[name].dtype == torch.bfloat16
        torch.testing.assert_close(ours[name], tensor, rtol=2**-7, atol=1e-6)
        differing += int((ours[name] != tensor).sum())
        total += tensor.numel()
    assert differing <= total // 1000


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["lm_head"]}, {"target_modules": ["embed_tokens"]}]
)
def test_a_tied_weight_that_the_adapter_changes_once_is_parted(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: the logits of the unmerged ``PeftModel`` (``merge_and_unload`` changes both turns,
    and its own logits)."""
    CASES["parted"] = ("llama", TIED, settings)
    model, adapter = make(tmp_path, "parted")
    merge(model, adapter, tmp_path / "merged")
    assert (
        json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
        is False
    )
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT4])
def test_merging_into_a_block_store(codec: Codec, tmp_path: Path) -> None:
    """Oracle: ``merge_and_unload`` on a model that holds what the store decodes to."""
    model, adapter = make(tmp_path, "all linear", torch.bfloat16)
    pack(model, tmp_path / "store", codec)
    store = BlockStore(tmp_path / "store")
    base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            store.read_into(name, parameter)
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    merge(tmp_path / "store", adapter, tmp_path / "merged")
    for name, tensor in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict().items()
    ):
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, expected[name], rtol=2**-7, atol=1e-6)


def test_the_checkpoints_own_names_are_kept(tmp_path: Path) -> None:
    """Oracle: the names in the original files, those of tensors that the model fuses too."""
    model, adapter = make(tmp_path, "experts fused")
    seen: list[tuple[int, int]] = []
    merge(
        model, adapter, tmp_path / "merged", progress=lambda done, total: seen.append((done, total))
    )
    theirs: dict[str, torch.Tensor] = {}
    for file in model.glob("*.safetensors"):
        theirs |= load_file(file)
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert seen[-1] == (seen[-1][1], sum(tensor.nbytes for tensor in ours.values()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_saved_model_loads_in_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: ``from_pretrained`` gives the weights that were saved: tensors, encoded ones decoded,
    tied ones tied."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(GPT2 if family == "gpt2" else TIED))
    )
    weights: dict[str, Any] = {
        name: parameter.detach() for name, parameter in model.named_parameters()
    }
    name = next(name for name, tensor in weights.items() if tensor.dim() == 2)
    layout = Layout(tuple(weights[name].shape), Codec.INT8)
    encoded_P = encode(weights[name], Codec.INT8, torch.empty(layout.nbytes, dtype=torch.uint8))
    weights[name] = EncodedWeight(encoded_P, layout, torch.float32)
    monkeypatch.setattr(safetensors, "SHARD_BYTES", 30_000)
    save_model(tmp_path / "saved", model, weights)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for key, parameter in loaded.named_parameters():
        assert torch.equal(
            parameter, weights[key].rows(0, layout.rows) if key == name else weights[key]
        )


REFUSED = {
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 1]],
    "init_lora_weights": "pissa",
    "peft_type": "IA3",
    "a_future_variant": {"strength": 2},
}


@pytest.mark.parametrize("key", REFUSED)
def test_adapters_that_are_no_plain_lora_are_refused(key: str, tmp_path: Path) -> None:
    """Oracle: the setting that the test wrote into the adapter's configuration. Nothing is left
    behind."""
    model, adapter = make(tmp_path, "rslora")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: REFUSED[key]}))
    with refused(ValueError, {"init_lora_weights": "pissa", "peft_type": "IA3"}.get(key, key)):
        merge(model, adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]


def test_another_models_adapter_is_refused(tmp_path: Path) -> None:
    """Oracle: the tensors that the test changed."""
    model, adapter = make(tmp_path, "rslora")
    file = adapter / "adapter_model.safetensors"
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    tensors = load_file(file)

    def expect(changed: dict[str, torch.Tensor], message: str) -> None:
        save_file(changed, file)
        with refused(ValueError, message):
            merge(model, adapter, tmp_path / "merged")

    expect({**tensors, key: torch.zeros(40, 4)}, "q_proj.weight (32, 32) (40, 32)")
    expect({k: v for k, v in tensors.items() if k != key}, "layers.0.self_attn.q_proj weight")
    expect(
        {k.replace("layers.1", "layers.7"): v for k, v in tensors.items()},
        "layers.7.self_attn.q_proj|layers.7.self_attn.v_proj weight",
    )
    expect(
        {**tensors, "base_model.model.lm_head.weight": torch.zeros(97, 32)},
        "lm_head.weight (96, 32)",
    )
    expect({**tensors, "base_model.model.score.weight": torch.zeros(2, 32)}, "score.weight")
    (tmp_path / "merged").mkdir()
    with refused(ValueError, "exists"):
        merge(model, adapter, tmp_path / "merged")
    with refused(ValueError, "PEFT adapter_config.json"):
        merge(model, model, tmp_path / "other")

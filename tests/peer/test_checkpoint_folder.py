"""Oracle: transformers itself. A checkpoint folder read as a tier gives bit for bit what
``from_pretrained`` loads."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockwalk.cutting.shrink import shrink
from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from blockwalk.tiers.model_folder.safetensors import read_header
from tests.support.messages import refused, says, warned

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_local_experts": 3,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}

MODELS = {
    "llama": (SIZES, {}),
    "llama tied": (SIZES, {"tie_word_embeddings": True}),
    "qwen2": (SIZES, {"tie_word_embeddings": True}),
    "gemma3_text": (SIZES, {"head_dim": 8}),
    "gpt2": ({"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, {}),
    "opt": ({**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, {}),
    "bloom": ({"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}, {}),
    "mixtral": (SIZES, EXPERTS),
    "qwen3_moe": (SIZES, {**EXPERTS, "head_dim": 8}),
    "qwen2_moe": (SIZES, {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "deepseek_v3": (
        SIZES,
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (SIZES, {**EXPERTS, "head_dim": 8}),
    "granitemoe": (SIZES, EXPERTS),
    "phi3": (SIZES, {"pad_token_id": 0}),
    "hrm_text": (SIZES, {"head_dim": 8}),  # one stored tensor becomes several parameters
    "olmo_hybrid": (
        SIZES,
        {"layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0},
    ),
}


def save_model(
    family: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB"
) -> Path:
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if family.split()[0] not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    sizes, more = MODELS[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family.split()[0], **{**sizes, **more}), dtype=dtype
    )
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # biases and norms too: zeros and ones would hide a mix-up
            parameter.copy_(torch.randn_like(parameter.float()))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict())


@pytest.mark.parametrize("family", MODELS)
def test_every_tensor_is_what_from_pretrained_loads(family: str, tmp_path: Path) -> None:
    """Oracle: ``from_pretrained(...).state_dict()``, sharded files, every parameter and persistent
    buffer."""
    folder = save_model(family, tmp_path / "model", shard="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    theirs = loaded(folder)
    source = CheckpointFolder(folder, build_skeleton(folder))
    seen = {id_: name for name, id_ in ((n, t.data_ptr()) for n, t in theirs.items())}
    assert len(source.names()) == len(seen), "each tensor once"
    for name in source.names():
        ours = source.weights([name])[name]
        assert isinstance(ours, torch.Tensor)
        assert ours.dtype == theirs[name].dtype
        assert torch.equal(ours, theirs[name]), name
        out = torch.empty(theirs[name].shape, dtype=torch.float64)
        source.read_into(name, out)
        assert torch.equal(out, theirs[name].double()), name
        assert source.prefetch([name]) >= ours.nbytes
    source.close()


def test_single_experts_are_stored_and_fused(tmp_path: Path) -> None:
    """Oracle: the checkpoint's own headers. The mixtral files really hold single experts, the model
    fused ones."""
    folder = save_model("mixtral", tmp_path / "model")
    keys = read_header(folder / "model.safetensors")
    assert any("experts.2.w3" in key for key in keys)
    source = CheckpointFolder(folder, build_skeleton(folder))
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    assert source.original_key(fused) is None
    assert source.prefetch([fused]) == sum(
        t.nbytes for k, t in keys.items() if "layers.0." in k and ("w1" in k or "w3" in k)
    )
    assert source.original_key("model.norm.weight") == "model.norm.weight"


def test_raw_tensors_are_views_of_the_map(tmp_path: Path) -> None:
    """Oracle: the file itself. A change of the file's bytes shows in a tensor that was handed out
    before."""
    folder = save_model("llama", tmp_path / "model", dtype=torch.bfloat16)
    source = CheckpointFolder(folder, build_skeleton(folder))
    name = "model.layers.1.mlp.up_proj.weight"
    view = source.weights([name])[name]
    stored = read_header(folder / "model.safetensors")[name]
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(stored.offset)
        file.write(torch.full((7,), 3.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    assert view.flatten()[:7].tolist() == [3.0] * 7
    source.close()
    assert view.flatten()[0].item() == 3.0, "a view outlives its source"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_dtype_is_the_one_stored_whatever_the_skeletons(family: str, tmp_path: Path) -> None:
    """Oracle: ``from_pretrained`` in the stored dtype, and torch's own cast."""
    folder = save_model(family, tmp_path / "model", dtype=torch.float16)
    source = CheckpointFolder(folder, build_skeleton(folder, dtype=torch.bfloat16))
    for name, theirs in loaded(folder).items():
        ours = source.weights([name])[name]
        assert ours.dtype == torch.float16
        assert torch.equal(ours, theirs)
        out = torch.empty(theirs.shape, dtype=torch.bfloat16)
        source.read_into(name, out)
        assert torch.equal(out, theirs.to(torch.bfloat16))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_what_does_not_fit_is_named_before_any_work(tmp_path: Path) -> None:
    """Oracle: the tensors that the test removed, reshaped and added."""
    folder = save_model("llama", tmp_path / "model")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(5, 32)
        tensors["vision.patch"] = torch.zeros(2)

    rewrite(folder, spoil)
    with pytest.raises(ValueError) as error:
        CheckpointFolder(folder, build_skeleton(folder))
    for part in (
        "1 missing (model.layers.0.self_attn.q_proj.weight)",
        "model.layers.1.mlp.up_proj.weight (model (48, 32), checkpoint (5, 32))",
        "1 unknown to the model (vision.patch)",
    ):
        says(str(error.value), part)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """Oracle: the one expert that the test removed."""
    folder = save_model("mixtral", tmp_path / "model")
    rewrite(
        folder, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w1.weight")
    )
    with refused(ValueError, "1 model.layers.1.mlp.experts.gate_up_proj"):
        CheckpointFolder(folder, build_skeleton(folder))


def test_tensors_that_the_model_does_not_use_are_a_warning(tmp_path: Path) -> None:
    """Oracle: transformers, which warns of the first and is silent about the second."""
    folder = save_model("llama", tmp_path / "model")
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(
        folder, lambda tensors: tensors.update({"extra": torch.zeros(1), inv_freq: torch.zeros(4)})
    )
    with warned(UserWarning, "1 LlamaForCausalLM extra"):
        CheckpointFolder(folder, build_skeleton(folder))


@pytest.mark.parametrize("kept", ["both", "lm_head.weight"])
def test_a_tied_weight_under_any_of_its_names(kept: str, tmp_path: Path) -> None:
    """Oracle: ``from_pretrained``, which ties to whichever of the two names the files hold."""
    folder = save_model("llama tied", tmp_path / "model")
    embed = "model.embed_tokens.weight"

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors[embed].clone()
        if kept != "both":
            del tensors[embed]

    rewrite(folder, rename)
    source = CheckpointFolder(folder, build_skeleton(folder))
    assert "lm_head.weight" not in source.names()
    assert torch.equal(source.weights([embed])[embed], loaded(folder)[embed])

    if kept == "both":
        rewrite(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
        with refused(ValueError, "tie_word_embeddings"):
            CheckpointFolder(folder, build_skeleton(folder))


def test_folders_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    """Oracle: the defect that the test made."""
    folder = save_model("llama", tmp_path / "model", shard="40KB")
    model = build_skeleton(folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    with refused(ValueError, "truncated"):
        CheckpointFolder(folder, model)
    shard.write_bytes(b"\xff" * 64)
    with refused(ValueError, "safetensors"):
        CheckpointFolder(folder, model)
    shard.unlink()
    with refused(ValueError, f"{shard.name}"):
        CheckpointFolder(folder, model)
    (folder / "model.safetensors.index.json").unlink()
    with refused(ValueError, "1 index"):
        CheckpointFolder(folder, model)
    with refused(ValueError, "folder"):
        CheckpointFolder(tmp_path / "nowhere", model)


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_codes_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """Oracle: the tensor that the test stored in another dtype; fused experts, too."""
    for family, key in (
        ("llama", QUERY),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
    ):
        folder = save_model(family, tmp_path / family)
        rewrite(folder, lambda tensors, key=key: tensors.update({key: tensors[key].to(dtype)}))  # type: ignore[misc]
        with refused(ValueError, f"model.safetensors {key} {str(dtype)[6:]}"):
            CheckpointFolder(folder, build_skeleton(folder))


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "input_scale", "scales"])
def test_a_scale_beside_a_weight_is_no_spare_tensor(scale: str, tmp_path: Path) -> None:
    """Oracle: the scale that the test added; one of a module that is not the model's is a warning
    still."""
    folder = save_model("llama", tmp_path / "model")
    key = QUERY.replace("weight", scale)
    rewrite(folder, lambda tensors: tensors.update({"vision.norm.scale": torch.ones(2)}))
    with warned(UserWarning, "vision.norm.scale"):
        CheckpointFolder(folder, build_skeleton(folder))
    rewrite(folder, lambda tensors: tensors.update({key: torch.ones(1)}))
    with refused(ValueError, f"{key} float32 {QUERY}"):
        CheckpointFolder(folder, build_skeleton(folder))


def test_a_quantisation_that_the_outer_configuration_names(tmp_path: Path) -> None:
    """Oracle: the codes and the scale that the test stored; the class is built from the text part,
    which does not say so."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if "qwen3_5" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no qwen3_5")
    config = shrink(AutoConfig.for_model("qwen3_5"))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    model = build_skeleton(tmp_path)
    assert type(model.config) is not type(config)
    source = CheckpointFolder(tmp_path, model)
    name = next(name for name in source.names() if name.endswith("mlp.up_proj.weight"))
    key = source.original_key(name)
    codes = torch.randn(source.shape(name)).to(torch.float8_e4m3fn)
    source.close()
    assert key is not None
    scale = {f"{key}_scale_inv": torch.tensor([0.25])}
    rewrite(tmp_path, lambda tensors: tensors.update({key: codes, **scale}))
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}})
    )
    whole = torch.empty(codes.shape)
    CheckpointFolder(tmp_path, build_skeleton(tmp_path)).read_into(name, whole)
    assert torch.equal(whole, codes.float() * 0.25)


def test_the_opened_folder_needs_no_skeleton_any_more(tmp_path: Path) -> None:
    """Oracle: ``from_pretrained``. PEFT renames a skeleton's modules after opening; what is read
    does not change."""
    from peft import LoraConfig, get_peft_model

    folder = save_model("mixtral", tmp_path / "model")
    model = build_skeleton(folder)
    source = CheckpointFolder(folder, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    theirs = loaded(folder)
    for name in source.names():
        assert torch.equal(source.weights([name])[name], theirs[name])


def test_a_header_of_any_length(tmp_path: Path) -> None:
    """Oracle: the safetensors package, which reads tensors wherever they begin. Found by fuzzing:
    those that do not begin at a multiple of their elements' size ended in a RuntimeError."""
    folder = save_model("llama", tmp_path)
    path = folder / "model.safetensors"
    model = build_skeleton(folder)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    )
    source = CheckpointFolder(folder, model)
    for name, expected in load_file(path).items():
        (weight,) = source.weights([name]).values()
        source.read_into(name, out := torch.empty(expected.shape))
        assert torch.equal(out, expected), name
        assert torch.equal(weight, expected), name

"""Oracle: the base's own files, tensor by tensor: what training did not change has the name, the
dtype and the bytes that it has there. transformers loads the rest as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import blockwalk
from blockwalk.convert.merge import merge
from blockwalk.cutting.shrink import shrink

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 3, **EXPERTS},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **EXPERTS,
    },
}
# What a walker trains is not among them, in name or in bytes.
ELSEWHERE = {
    "mtp.fc.weight",
    "mtp.norm.weight",
    "model.layers.2.eh_proj.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
}


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def _base(folder: Path, family: str) -> dict[str, Tensor]:
    """A folder in bfloat16, with heads that predict further tokens, a stale buffer, and a tied
    head that is written twice."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = _tensors(folder)
    further = {
        "mtp.fc.weight": torch.randn(8, 8).bfloat16(),
        "mtp.norm.weight": torch.randn(8),
        "model.layers.2.eh_proj.weight": torch.randn(8, 8).bfloat16(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4),
    }
    if config.tie_word_embeddings:
        further["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors |= further
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Names whose dtype, shape or bytes are others."""
    assert before.keys() == after.keys()
    return {
        name
        for name, tensor in before.items()
        if tensor.dtype != after[name].dtype
        or tensor.shape != after[name].shape
        or not torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8))
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("error:.*does not use")
def test_a_merged_folder_is_the_base_but_for_the_adapted_weights(
    family: str, tmp_path: Path
) -> None:
    before = _base(tmp_path / "base", family)
    target = "o_proj"
    with pytest.warns(UserWarning, match="does not use"):
        walker = blockwalk.Walker(
            str(tmp_path / "base"),
            blockwalk.method("mebp", frozen="disk × raw", compute_dtype="float32"),
            lora=blockwalk.LoraSettings(rank=2, target_modules=[target]),
        )
    with walker:
        walker.step(_batch())
        walker.step(_batch())
        walker.save_pretrained(tmp_path / "adapter")
    merge(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    changed = {f"model.layers.{layer}.self_attn.{target}.weight" for layer in range(2)}
    assert _differing(before, _tensors(tmp_path / "merged")) == changed


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["plain", "mezo"])
@pytest.mark.filterwarnings("ignore:.*does not use")
def test_full_fine_tuning_writes_the_names_of_the_base_and_what_it_does_not_train(
    family: str, method: str, tmp_path: Path
) -> None:
    before = _base(tmp_path / "base", family)
    with blockwalk.Walker(str(tmp_path / "base"), blockwalk.method(method)) as walker:
        walker.step(_batch())
        walker.save_pretrained(tmp_path / "tuned")
        loss = walker.evaluate(_batch()).loss
    after = _tensors(tmp_path / "tuned")
    assert before.keys() == after.keys()
    assert not ELSEWHERE & {name for name in before if not torch.equal(before[name], after[name])}
    assert all(before[name].dtype == after[name].dtype for name in ELSEWHERE)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    with torch.no_grad():
        assert float(loaded(**_batch()).loss) == pytest.approx(loss, rel=2e-2)
    with blockwalk.Walker(
        str(tmp_path / "tuned"), blockwalk.method("plain"), training=False
    ) as walker:
        assert walker.evaluate(_batch()).loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("form", ["projections cut out of one", "another prefix"])
@pytest.mark.filterwarnings("ignore")
def test_keys_that_are_no_names_of_the_model_are_kept(form: str, tmp_path: Path) -> None:
    """Oracle: PEFT's merge and transformers' own saving of it, which cuts and renames back."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if form == "another prefix":
        config: Any = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True)
        targets = ["q_proj"]
    else:
        if "hrm_text" not in CONFIG_MAPPING:
            pytest.skip("this version of transformers has no hrm_text")
        config = shrink(AutoConfig.for_model("hrm_text"))
        targets = ["q_proj", "up_proj"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    if form == "another prefix":
        tensors = _tensors(tmp_path / "base")
        renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(renamed, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    merge(str(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    before = _tensors(tmp_path / "base")
    after = _tensors(tmp_path / "merged")
    assert before.keys() == after.keys()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    theirs.merge_and_unload().save_pretrained(tmp_path / "theirs")
    prefix = "model." * (form == "another prefix")
    for name, tensor in _tensors(tmp_path / "theirs").items():
        torch.testing.assert_close(after[name.removeprefix(prefix)], tensor, rtol=1e-6, atol=1e-7)
    assert _differing(before, after)

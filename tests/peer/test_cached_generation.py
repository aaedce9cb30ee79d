"""Oracle: ``transformers`` without any cache: the likeliest token after the whole text, a token at
a time, of each prompt by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blockwalk
from blockwalk.cutting.verify import certified_anatomy
from tests.models import tiny_model

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Bamba counts positions from 0 in every call that names none; MiniMax has a cache of its own, and
# Mamba takes its under another name.
FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {
        "num_hidden_layers": 6,
        "attn_layer_indices": [4],  # the first layers of a small instance have none
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
    },
    "minimax": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "block_size": 8,
    },
    "mamba": {"state_size": 8},
}


def _model(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.12)
    return model


@torch.no_grad()
def _greedy(model: Any, prompt_S: Tensor, count: int) -> list[int]:
    text_BS = prompt_S[None]
    for _ in range(count):
        logits_BSV = model(input_ids=text_BS, use_cache=False).logits
        text_BS = torch.cat([text_BS, logits_BSV[:, -1:].argmax(-1)], 1)
    return text_BS[0, len(prompt_S) :].tolist()


def _generated(model: Any, folder: Path, prompts: list[Tensor], count: int) -> list[list[int]]:
    model.save_pretrained(folder)
    length = max(map(len, prompts))
    ids_BS = torch.stack([torch.nn.functional.pad(p, (length - len(p), 0)) for p in prompts])
    mask_BS = torch.stack([(torch.arange(length) >= length - len(p)).long() for p in prompts])
    plan = blockwalk.method("mebp", frozen="disk × raw", compute_dtype="float32")
    with blockwalk.Walker(str(folder), plan, lora=_lora(model), training=False) as walker:
        text_BS = walker.generate(ids_BS, count, attention_mask=mask_BS)
    return text_BS[:, length:].tolist()


def _lora(model: Any) -> blockwalk.LoraSettings:
    target = "x_proj" if model.config.model_type == "mamba" else "q_proj"
    return blockwalk.LoraSettings(rank=2, target_modules=[target])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(9,), (9, 5)], ids=["alone", "padded"])
def test_generation_with_a_cache_is_generation_without(
    family: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    model = _model(family)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 90, (length,), generator=generator) for length in lengths]
    expected = [_greedy(model, prompt, 8) for prompt in prompts]
    assert _generated(model, tmp_path / "m", prompts, 8) == expected
    assert certified_anatomy(model).against_cache == ""


def test_a_model_whose_cache_fails_is_walked_over_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.cache_utils import DynamicLayer

    from blockwalk.cutting import verify

    update = DynamicLayer.update
    monkeypatch.setattr(verify, "_verdicts", {})
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    model = tiny_model("llama", seed=3).eval()
    prompts = [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([20, 21])]
    expected = [_greedy(model, prompt, 6) for prompt in prompts]

    def shifted(self: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Any:
        all_keys, all_values = update(self, keys, values)
        return all_keys.roll(1, -2), all_values

    monkeypatch.setattr(DynamicLayer, "update", shifted)
    assert _generated(model, tmp_path / "m", prompts, 6) == expected
    assert "cache" in caplog.text

"""Saved models with persistent buffers that are not what their class makes, and their own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import random_batch

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 4,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 101,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": {**EXPERTS, "head_dim": 8},
}


def changed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give every persistent buffer values that no constructor gives it; answers them by name."""
    generator = torch.Generator().manual_seed(1)
    stored = model.state_dict()
    buffers = {}
    for name, buffer in model.named_buffers():
        if name in stored:
            drawn = torch.rand(buffer.shape, generator=generator) + 0.25
            buffer.copy_(drawn * 4 if not buffer.is_floating_point() else drawn)
            buffers[name] = buffer.detach().clone()
    assert buffers
    return buffers


def make(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    buffers = changed(model)
    model.save_pretrained(folder)
    return buffers


def own_loss(folder: Path, **settings: Any) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    with torch.no_grad():
        return float(model(**random_batch(seed=1)).loss)

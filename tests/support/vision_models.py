"""Tiny models with a vision tower, and a batch of text for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.models import random_batch

TEXT = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "max_position_embeddings": 64,
}


VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


_ROPE = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e4}


KINDS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 100,
        "boi_token_index": 98,
        "eoi_token_index": 99,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "image_token_index": 100,
        "vision_config": {"model_type": "pixtral", "head_dim": 8, **VISION},
    },
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": _ROPE},
        "image_token_id": 100,
        "video_token_id": 99,
        "vision_start_token_id": 98,
        "vision_end_token_id": 97,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
    },
    "llama4": {
        "text_config": {
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
        },
        "vision_config": {
            **VISION,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "phi4_multimodal": {
        "vision_config": {**VISION, "crop_size": 32},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "nemo_conv_channels": 8,
            "ext_pw_out_channel": 32,
        },
    },
}
"""The parts of a configuration in which kinds of models differ; their text is TEXT."""


def make(kind: str = "gemma3") -> Any:
    torch.manual_seed(0)
    text = {
        **TEXT,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **KINDS[kind].get("text_config", {}),
    }
    if (
        kind == "phi4_multimodal"
    ):  # its text stands in no part by itself, and its towers inside one that every text passes
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **text, **KINDS[kind])
        ).float()
    config = AutoConfig.for_model(kind, **{**KINDS[kind], "text_config": text})
    return AutoModelForImageTextToText.from_config(config).float()


def batch_of_text() -> dict[str, torch.Tensor]:
    batch = random_batch()
    return {**batch, "input_ids": batch["input_ids"] % 97, "labels": batch["labels"].clamp(max=96)}

"""Random models and batches, small enough for any test. Not a test: no oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def tiny_model(kind: str, *, tied: bool = False, seed: int = 0, **changes: Any) -> nn.Module:
    """A random ``transformers`` model of a few thousand parameters in evaluation-stable float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common: dict[str, Any] = {
        "vocab_size": 101,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    sizes: dict[str, dict[str, Any]] = {
        "llama": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        },
        "opt": {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
        },
        "mixtral": {
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
        },
        "phi": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
        "gemma2": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 4,
        },
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind, **{**common, **sizes.get(kind, {}), "max_position_embeddings": 64, **changes}
    )
    return AutoModelForCausalLM.from_config(config).float()


def random_batch(batch: int = 4, sequence: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 101, (batch, sequence), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    labels[0, 7:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

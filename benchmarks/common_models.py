"""Published dimensions of models, by name; no torch."""

from __future__ import annotations

from typing import Any

QWEN2 = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}
GEMMA3 = {"bos_token_id": 2, "eos_token_id": 1, "vocab_size": 262144, "max_position_embeddings": 32768}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, **QWEN2},
    "Qwen2.5-1.5B": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True, **QWEN2},
    "Qwen2.5-3B": {"model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                   "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True, **QWEN2},
    "Qwen2.5-7B": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
                   **QWEN2, "vocab_size": 152064},
    "Qwen2-tiny": {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
                   **QWEN2, "vocab_size": 512},
    "Gemma3-1B": {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
                  "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, **GEMMA3},
    "Gemma3-4B": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, **GEMMA3},
}  # fmt: skip
"""Published dimensions, by name."""
for _name, _layers, _heads, _dim in (
    ("OPT-tiny", 2, 4, 64),
    ("OPT-125M", 12, 12, 768), ("OPT-350M", 24, 16, 1024), ("OPT-1.3B", 24, 32, 2048), ("OPT-2.7B", 32, 32, 2560),
    ("OPT-6.7B", 32, 32, 4096), ("OPT-13B", 40, 40, 5120), ("OPT-30B", 48, 56, 7168),
):  # fmt: skip
    MODELS[_name] = {
        "model_type": "opt", "num_hidden_layers": _layers, "num_attention_heads": _heads, "hidden_size": _dim,
        "ffn_dim": 4 * _dim, "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": _dim,
        "dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 2,
    }  # fmt: skip

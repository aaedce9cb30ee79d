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
GEMMA3 = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
                     "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                     "tie_word_embeddings": True, **QWEN2},
    "Qwen2.5-1.5B": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
                     "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
                     "tie_word_embeddings": True, **QWEN2},
    "Qwen2.5-3B": {"model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008,
                   "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
                   "tie_word_embeddings": True, **QWEN2},
    "Qwen2.5-7B": {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
                   "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                   "tie_word_embeddings": False, **QWEN2, "vocab_size": 152064},
    "Qwen2-tiny": {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
                   "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                   "tie_word_embeddings": True, **QWEN2, "vocab_size": 512},
    "Qwen2.5-32B": {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
                    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
                    "tie_word_embeddings": False, **QWEN2, "vocab_size": 152064},
    "Llama-3-70B": {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
                    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                    "vocab_size": 128256, "rope_theta": 5e5, "max_position_embeddings": 8192,
                    "bos_token_id": 1, "eos_token_id": 2},
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                      "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                      "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 768, "norm_topk_prob": True,
                      "tie_word_embeddings": False, **QWEN2},
    "Mixtral-8x7B": {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
                     "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                     "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
                     "rope_theta": 1e6, "max_position_embeddings": 32768, "bos_token_id": 1,
                     "eos_token_id": 2},
    "Gemma3-1B": {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
                  "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
                  "head_dim": 256, "sliding_window": 512, **GEMMA3},
    "Gemma3-4B": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                  "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "head_dim": 256, "sliding_window": 1024, **GEMMA3},
}  # fmt: skip
"""Published dimensions, by name; OPT-350M with embeddings as wide as its blocks and norms before
layers, 356M parameters where the published one, with embeddings of 512 and norms after, has
331M."""
for _name, _layers, _heads, _dim in (
    ("OPT-tiny", 2, 4, 64),
    ("OPT-125M", 12, 12, 768), ("OPT-350M", 24, 16, 1024), ("OPT-1.3B", 24, 32, 2048),
    ("OPT-2.7B", 32, 32, 2560),
    ("OPT-6.7B", 32, 32, 4096), ("OPT-13B", 40, 40, 5120), ("OPT-30B", 48, 56, 7168),
):  # fmt: skip
    MODELS[_name] = {
        "model_type": "opt", "num_hidden_layers": _layers, "num_attention_heads": _heads,
        "hidden_size": _dim, "ffn_dim": 4 * _dim, "vocab_size": 50272,
        "max_position_embeddings": 2048, "word_embed_proj_dim": _dim, "dropout": 0.0,
        "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 2,
    }  # fmt: skip

"""A small instance of a model's configuration: few layers, narrow matrices, the same code paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SIZES = {
    64: """
        hidden_size d_model n_embd embedding_dim emb_dim attention_hidden_size lru_width
        word_embed_proj_dim embedding_size input_embedding_size output_embedding_size
        max_position_embeddings n_positions n_ctx max_seq_len context_length
        max_target_positions model_max_length block_multiple_of
    """,
    96: """
        intermediate_size ffn_dim n_inner dff dim_ff ffn_hidden_size dense_intermediate_size
        decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp feed_forward_size d_inner
    """,
    32: """
        moe_intermediate_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size shared_intermediate_size
        shared_experts_intermediate_size expert_ffn_hidden_size hidden_size_per_layer_input
        dim_model_base router_hidden_size rel_extent attention_head_dim qk_head_dim
        ple_embed_dim
    """,
    24: "q_lora_rank o_lora_rank",
    16: """
        head_dim dim_head d_head attention_head_size kv_channels qk_nope_head_dim
        qk_rope_head_dim v_head_dim kv_lora_rank swa_head_dim linear_head_dim
        linear_key_head_dim linear_value_head_dim mamba_d_head mamba_headdim mamba_head_dim
        mamba_d_state ssm_state_size state_size laurel_rank index_head_dim adapter_rank
        rotary_dim d_rel hc_lowrank
    """,
    8: """
        mamba_n_heads mamba_num_heads n_mamba_heads mamba_dt_rank time_step_rank chunk_size
        mamba_chunk_size block_size index_topk gated_norm_rank
    """,
    4: """
        sliding_window window_size local_attention sliding_window_size attention_window_size
        attention_chunk_size linear_num_heads index_n_heads num_experts n_routed_experts
        num_local_experts moe_num_experts zero_expert_num keep_window_size num_heads
    """,
    2: """
        num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts
        n_group n_groups mamba_n_groups mamba_ngroups num_expert_group
        sliding_window_pattern _sliding_window_pattern no_rope_layer_interval o_groups
        global_attn_every_n_layers attn_layer_period layer_group_size linear_num_key_heads
        heads_per_ngram max_window_layers
    """,
    1: """
        topk_group first_k_dense_replace num_dense_layers attn_layer_offset
        moe_layer_start_index num_nextn_predict_layers
    """,
    160: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    1024: "ngram_vocab_size_base split_ngram_parts",
}
"""The most that a dimension may have, by its name in ``transformers`` configurations; heads and
layers have rules."""
_LARGEST = {name: size for size, names in _SIZES.items() for name in names.split()}

_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups")
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_blocks",
)
_HEADS_OF_STATES = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("num_heads", "head_dim"),
)
_OF_LAYERS = (
    "full_attn_idxs",
    "mlp_only_layers",
    "moe_layers",
    "hybrid_layer_ids",
    "cross_attention_layers",
    "attn_layer_indices",
)
"""Lists of layer numbers: they tell the layers that they name from others."""


def shrink(config: Any) -> Any:
    """Return a copy of the configuration with small dimensions (hidden size 64, 4 heads), with a
    layer of every kind.

    Numbers that shape no tensor (caps, scales, dropout, rotary bases, ...) stay as they are. Lists
    with an entry for each layer lose the entries of layers that are like one kept."""
    values = config.to_dict()
    values.pop("dtype", None)
    small = type(config).from_dict(_shrink_values(values))
    small._attn_implementation = config._attn_implementation
    return small


def shallow(config: Any) -> Any:
    """Return a copy of the configuration with few layers, of every kind that its lists tell apart;
    all else is as it was."""
    values = {
        name: _keep_layers(value) if _is_configuration(name, value) else value
        for name, value in config.to_dict().items()
    }
    few = type(config).from_dict(_keep_layers(values))
    few._attn_implementation = config._attn_implementation
    return few


def _is_configuration(name: str, value: Any) -> bool:
    """Return whether a setting is the configuration of a part of the model."""
    return isinstance(value, dict) and ("model_type" in value or name.endswith("_config"))


def _shrink_values(values: dict[str, Any]) -> dict[str, Any]:
    small = {name: _shrunk(name, value, values) for name, value in values.items()}
    inner = small.get("hidden_size", 0) * small.get("mamba_expand", small.get("expand", 0))
    for count, width in _HEADS_OF_STATES:
        if inner and isinstance(small.get(count), int) and isinstance(small.get(width), int):
            small[count] = inner // small[width]
    if small.get("mamba_d_ssm"):
        small["mamba_d_ssm"] = inner
    if isinstance(small.get("eos_token_id"), list):
        small["eos_token_id"] = [2]
    rope = small.get("rope_parameters")
    if isinstance(rope, dict):
        small["rope_parameters"] = _shrink_rope(rope)
    return _keep_layers(small)


def _shrunk(name: str, value: Any, values: dict[str, Any]) -> Any:
    """Return the small value of one setting among ``values``."""
    if _is_configuration(name, value):
        return _shrink_values(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith("_token_id"):
        return min(value, 2)
    if name in _HEADS:
        return 4
    if name in _KV_HEADS:
        heads = next((values[key] for key in _HEADS if isinstance(values.get(key), int)), 0)
        if value >= heads > 1:
            return 4
        return 1 if value == 1 else 2
    if name == "linear_num_value_heads":
        return 4 if value > values.get("linear_num_key_heads", 0) else 2
    return min(value, _LARGEST[name]) if name in _LARGEST else value


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rotary settings whose per-frequency lists fit a head dimension of 16."""
    shrunk = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            shrunk[name] = _shrink_rope(value)
        elif name in ("long_factor", "short_factor"):
            shrunk[name] = value[: int(8 * rope.get("partial_rotary_factor", 1.0))]
        else:
            shrunk[name] = value
    return shrunk


def _keep_layers(values: dict[str, Any]) -> dict[str, Any]:
    """Keep the first layer of each kind that the per-layer lists tell apart, and at least three (or
    all)."""
    count = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), None)
    if count is None:
        return values
    lists = {name: value for name, value in values.items() if isinstance(value, list | tuple)}
    per_layer = {
        name: entries
        for name, entries in lists.items()
        if len(entries) == count > 1 and name not in _OF_LAYERS
    }
    settings = {
        int(layer): setting for layer, setting in (values.get("per_layer_config") or {}).items()
    }
    numbered = {name: set(entries) for name, entries in lists.items() if name in _OF_LAYERS}
    layers = _kinds(count, {**per_layer, **_membership(count, numbered)}, settings)
    small = dict(values)
    if values.get("num_kv_shared_layers"):
        # Layers that reuse keys and values stand at the end: a twin of every kind for them to
        # reuse.
        small["num_kv_shared_layers"] = len(layers)
        layers = layers + layers
    else:
        more = [layer for layer in range(count) if layer not in layers]
        layers = sorted([*layers, *more[: max(0, 3 - len(layers))]])
    if settings:
        small["per_layer_config"] = {
            place: _shrink_values(dict(settings[layer]))
            for place, layer in enumerate(layers)
            if layer in settings
        }
    small |= {name: [entries[i] for i in layers] for name, entries in per_layer.items()}
    for name in _LAYERS:
        if isinstance(values.get(name), int):
            small[name] = len(layers)
    for name, numbers in numbered.items():
        small[name] = [place for place, layer in enumerate(layers) if layer in numbers]
    return small


def _membership(count: int, numbered: Mapping[str, set[int]]) -> dict[str, list[bool]]:
    """Return for each list of layer numbers whether it has each layer."""
    return {
        name: [layer in numbers for layer in range(count)] for name, numbers in numbered.items()
    }


def _kinds(
    count: int, per_layer: Mapping[str, Sequence[Any]], settings: Mapping[int, Any]
) -> list[int]:
    """Return the first layer of each kind, in order: layers are alike whose entries and settings
    are."""
    kinds: dict[str, int] = {}
    for layer in range(count):
        entries = [entries[layer] for entries in per_layer.values()]
        kinds.setdefault(repr((entries, settings.get(layer))), layer)
    return sorted(kinds.values())

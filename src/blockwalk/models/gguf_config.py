"""The transformers configuration of a GGUF file, made of its metadata: a rule for each key.

A key under the architecture's name is either a setting of the model, or it is known to change
nothing here, or the file is refused by that key's name: a model with a forgotten scale or window is
another model. The meaning of a key is what llama.cpp computes with it
(``tests/peer/test_gguf_config.py`` compares losses). No torch, no transformers.

Source of the keys: ``gguf-py/gguf/constants.py`` of llama.cpp; of their defaults,
``src/llama-model.cpp`` and ``src/models``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockwalk.models.gguf_architectures import Architecture, Keys, row
from blockwalk.models.gguf_rotary import rotary_settings

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
"""Keys that every architecture must have, and their settings."""

_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""The number of blocks by which llama.cpp knows a Gemma whose queries are scaled by the hidden size
over the heads."""

_WIDEST_HEAD = 1 << 16
"""Dimensions; more are a damaged file's."""
_HARMLESS = """
    vocab_size tensor_data_layout pooling_type rope.scaling.finetuned expert_feed_forward_length
    expert_shared_feed_forward_length
"""
"""Keys that change no logit: the tensors' shapes say how many rows and how wide experts are."""
_OFF = {
    (0,): """
        use_parallel_residual expert_count expert_used_count attention.scale attention.clamp_kqv
        attention.max_alibi_bias swin_norm expert_shared_count leading_dense_block_count
        nextn_predict_layers attn_logit_softcapping final_logit_softcapping router_logit_softcapping
        attention.shared_kv_layers n_deepstack_layers rope.scaling.alpha
        rope.scaling.yarn_log_multiplier attention.temperature_length attention.temperature_scale
    """,
    (1,): """
        attention.causal rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor
        rope.scaling.yarn_beta_slow
    """,
    (0, 1): """
        logit_scale residual_scale embedding_scale attention.output_scale expert_group_count
        expert_group_used_count expert_weights_scale expert_gating_func moe_every_n_layers
        interleave_moe_layer_step attention.sliding_window_pattern
    """,
    (32,): "rope.scaling.yarn_beta_fast",
}
"""The values that leave a model as it is (False is 0), and the keys of other architectures that may
have them."""
_NEUTRAL = {key: values for values, keys in _OFF.items() for key in keys.split()}


def settings_of(
    where: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return the model's settings, ``model_type`` among them.

    Args:
        where: the file, for messages.
        metadata: the header's; arrays of numbers are tuples.
        shapes: the tensors' shapes by their names in the file.
        factors: the values of the row's tensors with frequency factors that are there.

    Raises:
        ValueError: a key is missing; or one is there that is not known to change nothing: its name
            and value.
    """
    architecture = row(metadata)
    keys = Keys(where, str(metadata["general.architecture"]), metadata)
    settings: dict[str, Any] = {"model_type": architecture.model_type, **architecture.fixed}
    for key, setting in {**_SIZES, **architecture.settings}.items():
        settings[setting] = keys.need(key)
    for key, setting in architecture.optional.items():
        if key in keys.values:
            settings[setting] = keys.need(key)
    settings["num_key_value_heads"] = keys.get(
        "attention.head_count_kv", settings["num_attention_heads"]
    )
    settings |= _head_width(keys, architecture, settings)
    settings |= _widths_of_experts(architecture, shapes)
    settings |= {
        setting: True
        for part, setting in architecture.biases.items()
        if any(part in name for name in shapes)
    }
    for name in ("bos", "eos", "pad"):
        spelt = "padding" if name == "pad" else name
        settings[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{spelt}_token_id")
    rows = shapes.get("token_embd.weight", (0,))[0]
    settings["vocab_size"] = rows
    if settings["pad_token_id"] is not None and not settings["pad_token_id"] < rows:
        settings["pad_token_id"] = None
    settings["tie_word_embeddings"] = "output.weight" not in shapes
    if keys.architecture in _GEMMA_27B:
        settings |= _gemma(keys, settings)
    _windows(keys, settings)
    settings |= rotary_settings(keys, architecture, settings, factors)
    _refuse_others(keys, architecture)
    return settings


def _head_width(
    keys: Keys, architecture: Architecture, settings: Mapping[str, Any]
) -> dict[str, Any]:
    hidden = settings["hidden_size"]
    heads = settings["num_attention_heads"]
    even = hidden // heads
    width = keys.get("attention.key_length", even)
    if not isinstance(width, int) or not 0 < width <= _WIDEST_HEAD:
        raise ValueError(
            f"{keys.where} has heads of {width} dimensions, which is no width from 1 to"
            f" {_WIDEST_HEAD}"
        )
    if not architecture.free_head_width:
        keys.must(
            "attention.key_length",
            even,
            why=f"and its architecture has heads of {hidden} / {heads}",
        )
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        keys.must(key, width, why=f"and every head is {width} wide, as its queries are")
    keys.must("embedding_length_out", hidden, why=f"and the model is {hidden} wide")
    return {"head_dim": width} if architecture.free_head_width else {}


def _widths_of_experts(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the widths of experts, which are those of the tensors."""
    widths = {
        name.partition("ffn_")[2]: shape[-2] for name, shape in shapes.items() if len(shape) > 1
    }
    names = {
        "moe_intermediate_size": "gate_exps.weight",
        "shared_expert_intermediate_size": "gate_shexp.weight",
    }
    mixture = architecture.model_type in ("qwen2_moe", "qwen3_moe")
    return {
        setting: widths[tensor] for setting, tensor in names.items() if mixture and tensor in widths
    }


def _gemma(keys: Keys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return windows and the scale of queries, which llama.cpp derives from the number of
    blocks."""
    blocks = settings["num_hidden_layers"]
    large = blocks == _GEMMA_27B[keys.architecture]
    even = settings["hidden_size"] // settings["num_attention_heads"]
    scales: dict[str, Any] = {"query_pre_attn_scalar": even if large else settings["head_dim"]}
    if keys.architecture == "gemma2":
        scales["layer_types"] = _layer_types(blocks, 2)
        return scales
    window = keys.get("attention.sliding_window", 0)
    pattern = keys.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, tuple):
        types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        if len(types) != blocks:
            raise keys.error("attention.sliding_window_pattern", f"and {blocks} blocks")
    else:
        types = _layer_types(blocks, pattern)
    scales["layer_types"] = types if window else ["full_attention"] * blocks
    scales["sliding_window"] = window or settings["max_position_embeddings"]
    return scales


def _layer_types(blocks: int, period: int) -> list[str]:
    """Return kinds of attention where every ``period``-th block sees all; 0: every block has a
    window, as llama.cpp reads it."""
    slides = [period == 0 or block % period < period - 1 for block in range(blocks)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _windows(keys: Keys, settings: Mapping[str, Any]) -> None:
    """Refuse a window that llama.cpp does not open in this architecture, where a text could be
    longer."""
    key = "attention.sliding_window"
    if key in keys.used or key not in keys.values or keys.architecture in ("phi3", "gemma2"):
        keys.used.add(key)
        return
    if not (keys.get(key) == 0 or keys.get(key) >= settings["max_position_embeddings"]):
        raise keys.error(
            key,
            f"and llama.cpp has no windows in {keys.architecture}: it is unclear which model is"
            " meant",
        )


def _refuse_others(keys: Keys, architecture: Architecture) -> None:
    """Raise ValueError for a key that is not known to leave the model as it is."""
    keys.used.update(_HARMLESS.split())
    for key, allowed in {**_NEUTRAL, **architecture.neutral}.items():
        if key not in keys.used:
            why = "which is not read here, and changes what the model computes"
            keys.must(key, *allowed, why=why)
    unused = sorted(keys.values.keys() - keys.used)
    if unused:
        raise keys.error(
            unused[0], "which is not read here, and may change what the model computes"
        )

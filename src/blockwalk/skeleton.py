"""A model with no weights: every parameter on the meta device, every buffer real and right.

And the same configuration with small dimensions, on which the cutting of a model is checked.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from blockwalk.model_folder import require_config

_LARGE = 1 << 16
"""Elements: more than a buffer that a constructor leaves empty to fill it."""


class Skeleton(NamedTuple):
    """What :func:`build_skeleton` answers."""

    model: nn.Module
    """The ``transformers`` causal language model; its parameters are on the meta device."""
    persistent_buffers: tuple[str, ...]
    """Buffers that a checkpoint stores (``state_dict`` names): they hold initial values until a source fills them."""


def load_config(path_or_config: Any) -> Any:
    """The ``transformers`` configuration of a checkpoint folder (or the configuration itself, copied).

    Raises ValueError for what is no folder with a ``config.json`` and for one whose model needs code of its own.
    """
    if not isinstance(path_or_config, str | Path):
        return copy.deepcopy(path_or_config)
    from transformers import AutoConfig

    folder = require_config(path_or_config)
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def model_class(config: Any) -> type[nn.Module]:
    """The causal language model class of a configuration; no other modelling module is imported.

    Raises ValueError where ``transformers`` has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers has no causal language model for model_type {config.model_type!r}; "
            "Blockwalk trains decoders that AutoModelForCausalLM knows"
        )
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    first: type[nn.Module] = found[0] if isinstance(found, list | tuple) else found
    return first


def model_config(config: Any, cls: type[nn.Module]) -> Any:
    """The part of a configuration that a class is built from: its text configuration where the class wants only that."""
    text = config.sub_configs.get("text_config")
    return config.get_text_config() if text is not None and getattr(cls, "config_class", None) is text else config


class _LargeEmptyOnMeta(TorchFunctionMode):
    """``torch.empty`` of a weight's size answers on the meta device unless a device is asked for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            return made if made.numel() >= _LARGE else func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Send each parameter to the meta device as soon as a module registers it.

    Buffers stay where they are made, so those that a constructor computes (rotary frequencies) are right. Initialisers run
    after registration, on meta. A large ``torch.empty`` is on meta from the start: even untouched, weights that come and
    go would leave the allocator an address range of the model's size to scatter later temporaries over (measured on
    Qwen2.5-0.5B: +50 MB of touched pages in a training step).
    """
    original: Callable[..., None] = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with _LargeEmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def persistent_buffers(model: nn.Module) -> tuple[str, ...]:
    """Names of the buffers that ``state_dict`` stores."""
    return tuple(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )


def stays_float32(model: Any, dtype: torch.dtype, name: str) -> bool:
    """Whether ``from_pretrained(dtype=dtype)`` loads a parameter or buffer in float32 (``_keep_in_fp32_modules``)."""
    return any(re.search(glob.replace("*", ".*"), name) for glob in model._get_dtype_plan(dtype))


def build_skeleton(path_or_config: Any, dtype: torch.dtype | None = None, cls: type[nn.Module] | None = None) -> Skeleton:
    """Build the causal language model of a checkpoint folder or configuration without its weights.

    ``dtype`` is that of the parameters (None: the configuration's own), ``cls`` the model's class where it is not the one
    that ``transformers`` has for the configuration. The model is in training mode, as a constructor
    leaves it. Raises ValueError for a model that is no causal language model of ``transformers``.
    """
    config = load_config(path_or_config)
    if cls is None:
        cls = model_class(config)
        config = model_config(config, cls)
    dtype = dtype or config.dtype or torch.float32
    with _parameters_on_meta():
        model: nn.Module = cls._from_config(config, dtype=dtype)  # type: ignore[attr-defined]
    for name, param in model.named_parameters():
        if stays_float32(model, dtype, name):
            param.data = param.data.to(torch.float32)
    strays = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if strays:
        raise ValueError(
            f"{cls.__name__} leaves its buffers {strays[:3]} unset; Blockwalk cannot build it without weights"
        )
    return Skeleton(model, persistent_buffers(model))


_SIZES = {
    64: """hidden_size d_model n_embd embedding_dim emb_dim attention_hidden_size lru_width word_embed_proj_dim
        embedding_size input_embedding_size output_embedding_size max_position_embeddings n_positions n_ctx max_seq_len
        context_length max_target_positions model_max_length block_multiple_of""",
    96: """intermediate_size ffn_dim n_inner dff dim_ff ffn_hidden_size dense_intermediate_size decoder_ffn_dim
        encoder_ffn_dim intermediate_size_mlp feed_forward_size d_inner""",
    32: """moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        shared_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size hidden_size_per_layer_input
        dim_model_base router_hidden_size rel_extent attention_head_dim qk_head_dim ple_embed_dim""",
    24: "q_lora_rank o_lora_rank",
    16: """head_dim dim_head d_head attention_head_size kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim
        kv_lora_rank swa_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_headdim
        mamba_head_dim mamba_d_state ssm_state_size state_size laurel_rank index_head_dim adapter_rank rotary_dim d_rel
        hc_lowrank""",
    8: """mamba_n_heads mamba_num_heads n_mamba_heads mamba_dt_rank time_step_rank chunk_size mamba_chunk_size block_size
        index_topk gated_norm_rank""",
    4: """sliding_window window_size local_attention sliding_window_size attention_window_size attention_chunk_size
        linear_num_heads index_n_heads num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num
        keep_window_size num_heads""",
    2: """num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts n_group n_groups mamba_n_groups
        mamba_ngroups num_expert_group sliding_window_pattern _sliding_window_pattern no_rope_layer_interval o_groups
        global_attn_every_n_layers attn_layer_period layer_group_size linear_num_key_heads heads_per_ngram
        max_window_layers""",
    1: """topk_group first_k_dense_replace num_dense_layers attn_layer_offset moe_layer_start_index
        num_nextn_predict_layers""",
    160: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    1024: "ngram_vocab_size_base split_ngram_parts",
}
"""The most that a dimension may have, by its name in ``transformers`` configurations; heads and layers have rules."""
_LARGEST = {name: size for size, names in _SIZES.items() for name in names.split()}

_HEADS = ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks")
_OF_LAYERS = ("full_attn_idxs", "mlp_only_layers", "moe_layers", "hybrid_layer_ids", "cross_attention_layers")
"""Lists of layer numbers."""


def shrink(config: Any) -> Any:
    """The same configuration with small dimensions (hidden size 64, 4 heads), with a layer of every kind.

    Numbers that shape no tensor (caps, scales, dropout, rotary bases, ...) stay as they are. Lists with an entry for each
    layer lose the entries of layers that are like one kept.
    """
    values = config.to_dict()
    values.pop("dtype", None)
    small = type(config).from_dict(_shrink_values(values))
    small._attn_implementation = config._attn_implementation
    return small


def _shrink_values(values: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    heads = next((values[name] for name in _HEADS if isinstance(values.get(name), int)), 0)
    for name, value in values.items():
        if isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
            small[name] = _shrink_values(value)
        elif isinstance(value, bool):
            small[name] = value
        elif isinstance(value, int) and name.endswith("_token_id"):
            small[name] = min(value, 2)
        elif isinstance(value, int) and name in _HEADS:
            small[name] = 4
        elif isinstance(value, int) and name in _KV_HEADS:
            small[name] = 4 if value >= heads > 1 else 1 if value == 1 else 2
        elif isinstance(value, int) and name == "linear_num_value_heads":
            small[name] = 4 if value > values.get("linear_num_key_heads", 0) else 2
        elif isinstance(value, int) and name in _LARGEST:
            small[name] = min(value, _LARGEST[name])
        else:
            small[name] = value
    inner = small.get("hidden_size", 0) * small.get("mamba_expand", small.get("expand", 0))
    for count, width in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("num_heads", "head_dim"),
    ):
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


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings whose per-frequency lists fit a head dimension of 16."""
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
    """Keep the first layer of each kind that the per-layer lists tell apart, and at least three (or all)."""
    count_name = next((name for name in _LAYERS if isinstance(values.get(name), int)), None)
    if count_name is None:
        return values
    count = values[count_name]
    per_layer = {
        name: value
        for name, value in values.items()
        if isinstance(value, list | tuple) and len(value) == count and count > 1 and name not in _OF_LAYERS
    }
    own = {int(index): settings for index, settings in (values.get("per_layer_config") or {}).items()}
    kinds = [(*kind, repr(own.get(i))) for i, kind in enumerate(zip(range(count), *per_layer.values(), strict=True))]
    kept = sorted({kind[1:]: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    shared = values.get("num_kv_shared_layers") or 0
    if shared:
        # Layers that reuse keys and values stand at the end: a twin of every kind for them to reuse.
        kept = kept + kept
        values = {**values, "num_kv_shared_layers": len(kept) // 2}
    else:
        kept = sorted([*kept, *[i for i in range(count) if i not in kept][: max(0, 3 - len(kept))]])
    if own:
        settings_of = {new: own[old] for new, old in enumerate(kept) if old in own}
        values = {**values, "per_layer_config": {i: _shrink_values(dict(item)) for i, item in settings_of.items()}}
    small = {name: [value[i] for i in kept] if name in per_layer else value for name, value in values.items()}
    for name in _LAYERS:
        if isinstance(values.get(name), int):
            small[name] = len(kept)
    for name in _OF_LAYERS:
        if isinstance(values.get(name), list):
            small[name] = [i for i in values[name] if i < len(kept)]
    return small

"""The settings of the tools that quantise: known to change nothing that is read, read elsewhere, or
refused by name.

A tool may rotate what a layer is given, or drop weights of it, while the model computes. Its codes
are then those of other weights than the model's. A setting that is not listed here might say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blockwalk.plan.placement import Codec


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MODULES = _names(
    "quant_method modules_to_not_convert modules_to_convert ignored_layers dequantize backend"
)
"""Settings on which modules are in codes, as their tensors tell."""
_OF_GPTQ = _MODULES | _names(
    """
    bits group_size checkpoint_format format version desc_act act_group_aware sym zero_point
    static_groups true_sequential damp_percent damp_auto_increment lm_head is_marlin_format
    model_name_or_path model_file_base_name tokenizer dataset nsamples iters lr minmax_lr seqlen
    model_seqlen max_input_length batch_size train_bs gradient_accumulate_steps pad_token_id
    block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize
    to_quant_block_names cache_block_outputs use_cuda_fp16 use_exllama disable_exllama
    exllama_config do_fuse fuse_max_seq_len modules_to_fuse modules_to_fuse_config w_bit
    q_group_size pack_dtype pack_impl autoround_version data_type scale_dtype super_bits
    super_group_size packing_format low_gpu_mem_usage low_cpu_mem_usage enable_quanted_input
    enable_minmax_tuning enable_norm_bias_tuning not_use_best_mse dynamic_max_gap
    lr_scheduler amp supported_types quant_lm_head export_to_xpu bnb_quant_type use_mse
    offload_to_disk offload_to_disk_path failsafe gptaq fallback
    """
)
"""Settings of GPTQ, AWQ and AutoRound: what is set while a model is quantised is in its codes."""
_KNOWN: Mapping[Codec, frozenset[str]] = {
    Codec.FP8_BLOCKS: _MODULES
    | _names("activation_scheme weight_block_size fmt scale_fmt kv_cache_scheme static"),
    Codec.BITSANDBYTES: _MODULES
    | _names(
        """
        load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type
        bnb_4bit_use_double_quant bnb_4bit_compute_dtype bnb_4bit_quant_storage
        llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload
        llm_int8_has_fp16_weight
        """
    ),
    Codec.GPTQ: _OF_GPTQ,
    Codec.AWQ: _OF_GPTQ,
    Codec("compressed-tensors"): _MODULES
    | _names(
        "format config_groups ignore global_compression_ratio quantization_status kv_cache_scheme"
        " version run_compressed"
    ),
    Codec.MXFP4: _MODULES,
}
"""Settings by format that change no weight, or that the format's reader looks at."""
_OF_A_GROUP = _names("targets weights input_activations output_activations format")
_OF_WEIGHTS = _names(
    """
    num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype
    zp_dtype observer observer_kwargs
    """
)
_AS_USUAL = {"expert_dtype": "fp8"}
"""Values that say nothing of settings whose other values do."""
_CHANGE_THE_COMPUTATION = ("rotat", "hadamard", "transform", "spin", "sparsity", "smooth")
"""Parts of names, in notes that a tool keeps of itself, of what changes the computation."""
_NOTES = _names("meta quantization_info extra_config")
"""Settings that hold such notes."""


def refuse_unknown(codec: Codec, settings: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError for a setting of a quantised folder that may change what is computed, with
    its name and value.

    Args:
        codec: the format.
        settings: what the tool says of it in ``config.json``.
        folder: the model's.
    """
    for name, value in _unknown(codec, settings):
        text = " ".join(str(value).split())
        text = text if len(text) <= 80 else f"{text[:80]} ..."
        raise ValueError(
            f"{folder}/config.json: the weights are quantised by {codec} with {name} = {text},"
            " which may change what is computed and is not followed here: take the model that it"
            " was made from, or one that is quantised without it"
        )


def _unknown(codec: Codec, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of settings that are not known; those without a value say nothing."""
    for name, value in settings.items():
        known = name in _KNOWN[codec] and name != "config_groups"
        if _says_nothing(value) or known or _AS_USUAL.get(name) == value:
            continue
        if name == "dynamic" and all(str(key).startswith("-:") for key in value):
            continue  # modules that are left as they were
        if name in _NOTES:
            yield from _marks(name, value)
        elif name == "config_groups" and name in _KNOWN[codec]:
            for group in value.values():
                yield from _unknown_among(f"{name}.", group, _OF_A_GROUP)
                yield from _unknown_among(
                    f"{name}.weights.", group.get("weights") or {}, _OF_WEIGHTS
                )
        elif name != "sparsity_config" or value.get("format", "dense") != "dense":
            yield name, value


def _unknown_among(
    path: str, settings: Mapping[str, Any], known: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if name not in known and not _says_nothing(value):
            yield path + name, value


def _marks(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what notes say of the computation, however deep it lies."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            named = any(part in str(name).lower() for part in _CHANGE_THE_COMPUTATION)
            if named and not _says_nothing(inner):
                yield f"{path}.{name}", inner
            else:
                yield from _marks(f"{path}.{name}", inner)


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [], "")

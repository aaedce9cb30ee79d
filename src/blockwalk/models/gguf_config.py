"""The transformers configuration of a GGUF file, made of its metadata: a row for each architecture,
and a rule for each key.

A key under the architecture's name is either a setting of the model, or it is known to change
nothing here, or the file is refused by that key's name: a model with a forgotten scale or window is
another model. The meaning of a key is what llama.cpp computes with it
(``tests/peer/test_gguf_config.py`` compares losses). No torch, no transformers.

Source of the keys: ``gguf-py/gguf/constants.py`` of llama.cpp; of their defaults,
``src/llama-model.cpp`` and ``src/models``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
FACTORS = ("rope_freqs.weight", *LONG_FACTORS)
"""The tensors that hold factors of rotary frequencies, and no weights."""
_SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}  # fmt: skip
"""Keys that every architecture must have, and their settings."""
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_DENSE = {"feed_forward_length": "intermediate_size"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row: one of llama.cpp's architectures, and the model of transformers that computes the
    same."""

    model_type: str
    settings: Mapping[str, str]
    """The keys beyond sizes that must be there, and their settings."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """Keys that may be missing, with their settings; transformers' defaults are llama.cpp's."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that llama.cpp has no key for, as it computes them."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys with the values that say what is computed anyway; any other value is refused."""
    form: str = ""
    """The change that llama.cpp's converter made to tensors: queries' and keys' rows *permuted*, or
    norms *shifted* by one."""
    free_head_width: bool = False
    """Whether a head's width is a setting, or the hidden size over the number of heads."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensors' names, and the setting that such a tensor switches on."""
    rotary_types: tuple[str, ...] = ("default", "linear", "yarn", "llama3", "longrope")
    """The kinds of rotary scaling that the model's class takes."""
    partial_rotary: bool = False
    """Whether fewer dimensions than a head has may be turned."""
    factors: tuple[str, ...] = ()
    """Names of tensors with frequency factors that llama.cpp reads."""


_LLAMA_BIASES = {"attn_output.bias": "attention_bias", "ffn_down.bias": "mlp_bias"}
_LLAMA = Architecture(
    "llama",
    {**_RMS, **_DENSE},
    form="permuted",
    free_head_width=True,
    biases=_LLAMA_BIASES,
    fixed={"hidden_act": "silu"},
    factors=FACTORS[:1],
)
ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture(
        "qwen2", {**_RMS, **_DENSE}, fixed={"hidden_act": "silu", "use_sliding_window": False}
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {**_RMS, **_EXPERTS},
        optional=_DENSE,
        fixed={
            "hidden_act": "silu",
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
        },
        neutral={"expert_weights_norm": (False,), "expert_shared_count": (1,)},
    ),
    "qwen3": Architecture(
        "qwen3",
        {**_RMS, **_DENSE},
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        free_head_width=True,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_RMS, **_EXPERTS},
        optional=_DENSE,
        fixed={
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
        },
        neutral={"expert_weights_norm": (True,)},
        free_head_width=True,
    ),
    "phi3": Architecture(
        "phi3",
        {**_RMS, **_DENSE},
        fixed={"hidden_act": "silu", "sliding_window": None},
        rotary_types=("default", "longrope"),
        partial_rotary=True,
        factors=LONG_FACTORS,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {"attention.layer_norm_epsilon": "norm_epsilon", **_DENSE},
        fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
    ),
    "gemma2": Architecture(
        "gemma2",
        {**_RMS, **_DENSE},
        optional={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        fixed=_GEMMA,
        neutral={"attention.sliding_window_pattern": (2,)},
        form="shifted",
        free_head_width=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**_RMS, **_DENSE},
        optional={"final_logit_softcapping": "final_logit_softcapping"},
        fixed=_GEMMA,
        form="shifted",
        free_head_width=True,
    ),
}
"""The architectures that are read, by ``general.architecture``."""
_MIXTRAL = Architecture(
    "mixtral",
    {
        **_RMS,
        **_DENSE,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    form="permuted",
    fixed={"hidden_act": "silu", "sliding_window": None},
    neutral={"expert_weights_norm": (True,)},
    free_head_width=True,
    factors=FACTORS[:1],
)
"""A llama with experts."""
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""The number of blocks by which llama.cpp knows a Gemma whose queries are scaled by the hidden size
over the heads."""

_WIDEST_HEAD = 1 << 16
"""Dimensions; more are a damaged file's."""
_HARMLESS = (
    "vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned", "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)  # fmt: skip
"""Keys that change no logit: the tensors' shapes say how many rows and how wide experts are."""
_OFF = {
    "use_parallel_residual": (False,), "attention.causal": (True,), "expert_count": (0,), "expert_used_count": (0,),
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "attention.scale": (0,),
    "attention.output_scale": (0, 1), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "swin_norm": (False,),
    "expert_shared_count": (0,), "expert_group_count": (0, 1), "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1), "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1), "interleave_moe_layer_step": (0, 1), "nextn_predict_layers": (0,),
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "router_logit_softcapping": (0,),
    "attention.shared_kv_layers": (0,), "attention.sliding_window_pattern": (0, 1), "n_deepstack_layers": (0,),
    "rope.scaling.alpha": (0,), "rope.scaling.yarn_ext_factor": (1,), "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,), "rope.scaling.yarn_beta_slow": (1,), "rope.scaling.yarn_log_multiplier": (0,),
    "attention.temperature_length": (0,), "attention.temperature_scale": (0,),
}  # fmt: skip
"""Keys that belong to other architectures, with the values that leave a model as it is."""


class _Keys:
    """The metadata under an architecture's name, and the keys of it that were asked for.

    Args:
        where: the file, for messages.
    """

    def __init__(self, where: str, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.where = where
        self.architecture = architecture
        prefix = f"{architecture}."
        self.values = {
            key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)
        }
        self.used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value; of an array of equal numbers the number."""
        self.used.add(key)
        value = self.values.get(key, default)
        if isinstance(value, tuple) and key != "attention.sliding_window_pattern":
            if len(set(value)) != 1:
                raise self.error(
                    key,
                    "and every block must have the same: models whose blocks differ are not read",
                )
            return value[0]
        return value

    def need(self, key: str) -> Any:
        if key not in self.values:
            raise ValueError(
                f"{self.where} lacks {self.architecture}.{key}, without which its model is unknown"
            )
        value = self.get(key)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "which is no positive number")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a key's finite number, or the default of a missing one."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "which is no number")
        return float(value)

    def must(self, key: str, *allowed: Any, why: str) -> None:
        """Refuse a key that is there with another value than one of ``allowed``."""
        if key in self.values and self.get(key) not in allowed:
            raise self.error(key, why)

    def error(self, key: str, why: str) -> ValueError:
        value = self.values[key]
        text = (
            f"[{', '.join(map(str, value[:8]))}{', …' if len(value) > 8 else ''}]"
            if isinstance(value, tuple)
            else value
        )
        return ValueError(f"{self.where} has {self.architecture}.{key} = {text}, {why}")


def row(metadata: Mapping[str, Any]) -> Architecture:
    """Return the row of a file: experts in a llama make it a Mixtral."""
    architecture = str(metadata["general.architecture"])
    return (
        _MIXTRAL
        if architecture == "llama" and metadata.get("llama.expert_count")
        else ARCHITECTURES[architecture]
    )


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
    architecture = str(metadata["general.architecture"])
    known = row(metadata)
    keys = _Keys(where, architecture, metadata)
    settings: dict[str, Any] = {"model_type": known.model_type, **known.fixed}
    for key, setting in {**_SIZES, **known.settings}.items():
        settings[setting] = keys.need(key)
    for key, setting in known.optional.items():
        if key in keys.values:
            settings[setting] = keys.need(key)
    settings["num_key_value_heads"] = keys.get(
        "attention.head_count_kv", settings["num_attention_heads"]
    )
    settings |= _head_width(keys, known, settings)
    settings |= _widths_of_experts(known, shapes)
    settings |= {
        setting: True
        for part, setting in known.biases.items()
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
    if architecture in _GEMMA_27B:
        settings |= _gemma(keys, settings)
    _windows(keys, settings)
    settings |= _rotary(keys, known, settings, factors)
    _refuse_others(keys, known)
    return settings


def _head_width(keys: _Keys, known: Architecture, settings: Mapping[str, Any]) -> dict[str, Any]:
    hidden = settings["hidden_size"]
    heads = settings["num_attention_heads"]
    even = hidden // heads
    width = keys.get("attention.key_length", even)
    if not isinstance(width, int) or not 0 < width <= _WIDEST_HEAD:
        raise ValueError(
            f"{keys.where} has heads of {width} dimensions, which is no width from 1 to"
            f" {_WIDEST_HEAD}"
        )
    if not known.free_head_width:
        keys.must(
            "attention.key_length",
            even,
            why=f"and its architecture has heads of {hidden} / {heads}",
        )
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        keys.must(key, width, why=f"and every head is {width} wide, as its queries are")
    keys.must("embedding_length_out", hidden, why=f"and the model is {hidden} wide")
    return {"head_dim": width} if known.free_head_width else {}


def _widths_of_experts(
    known: Architecture, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the widths of experts, which are those of the tensors."""
    widths = {
        name.partition("ffn_")[2]: shape[-2] for name, shape in shapes.items() if len(shape) > 1
    }
    names = {
        "moe_intermediate_size": "gate_exps.weight",
        "shared_expert_intermediate_size": "gate_shexp.weight",
    }
    mixture = known.model_type in ("qwen2_moe", "qwen3_moe")
    return {
        setting: widths[tensor] for setting, tensor in names.items() if mixture and tensor in widths
    }


def _gemma(keys: _Keys, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return windows and the scale of queries, which llama.cpp derives from the number of
    blocks."""
    blocks = settings["num_hidden_layers"]
    large = blocks == _GEMMA_27B[keys.architecture]
    even = settings["hidden_size"] // settings["num_attention_heads"]
    made: dict[str, Any] = {"query_pre_attn_scalar": even if large else settings["head_dim"]}
    if keys.architecture == "gemma2":
        made["layer_types"] = _layer_types(blocks, 2)
        return made
    window = keys.get("attention.sliding_window", 0)
    pattern = keys.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, tuple):
        types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        if len(types) != blocks:
            raise keys.error("attention.sliding_window_pattern", f"and {blocks} blocks")
    else:
        types = _layer_types(blocks, pattern)
    made["layer_types"] = types if window else ["full_attention"] * blocks
    made["sliding_window"] = window or settings["max_position_embeddings"]
    return made


def _layer_types(blocks: int, period: int) -> list[str]:
    """Return kinds of attention where every ``period``-th block sees all; 0: every block has a
    window, as llama.cpp reads it."""
    slides = [period == 0 or block % period < period - 1 for block in range(blocks)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _windows(keys: _Keys, settings: Mapping[str, Any]) -> None:
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


def _refuse_others(keys: _Keys, known: Architecture) -> None:
    keys.used.update(_HARMLESS)
    for key, allowed in {**_OFF, **known.neutral}.items():
        if key not in keys.used:
            keys.must(
                key, *allowed, why="which is not read here, and changes what the model computes"
            )
    others = sorted(keys.values.keys() - keys.used)
    if others:
        raise keys.error(
            others[0], "which is not read here, and may change what the model computes"
        )


def _rotary(
    keys: _Keys,
    known: Architecture,
    settings: Mapping[str, Any],
    factors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return rotary positions: base, scaling, frequency factors and the part of a head that is
    turned."""
    width = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    turned = keys.get("rope.dimension_count", width)
    keys.must(
        "rope.dimension_count_swa", turned, why=f"and {turned} dimensions are turned in all blocks"
    )
    if turned != width and (not known.partial_rotary or not 0 < turned < width or turned % 2):
        raise keys.error(
            "rope.dimension_count",
            f"and a head of {width} dimensions is turned whole in this architecture",
        )
    base = keys.need("rope.freq_base") if "rope.freq_base" in keys.values else 10000.0
    scaling = _scaling(keys, known, settings["max_position_embeddings"], factors, turned)
    full = scaling.parameters(base)
    sliding_base = keys.get("rope.freq_base_swa", 10000.0)
    if keys.architecture == "gemma3":
        sliding = scaling.unscaled().parameters(
            sliding_base if settings["sliding_window"] else base
        )
        return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    keys.must("rope.freq_base_swa", base, why=f"and the model has one base, {base:g}")
    if known.partial_rotary:
        full["partial_rotary_factor"] = turned / width
        return {
            "rope_parameters": full,
            "original_max_position_embeddings": scaling.original_length,
        }
    return {"rope_parameters": full}


@dataclass(frozen=True, slots=True)
class _Scaling:
    """The scaling of rotary frequencies, as llama.cpp applies it: a frequency is divided by
    ``factor`` and by its dimension's factor, and cosines and sines are multiplied by
    ``attention``."""

    kind: str
    factor: float
    attention: float
    original_length: int
    """Tokens: the text beyond which the long factors are taken, and from which YaRN reckons."""
    short: tuple[float, ...]
    """Factors by dimension, or as many ones."""
    long: tuple[float, ...]
    types: tuple[str, ...]
    """The kinds that the model's class takes."""

    def parameters(self, base: float) -> dict[str, Any]:
        """Return the scaling as transformers' ``rope_parameters``."""
        plain = set(self.short) == {1.0} == set(self.long)
        if plain and self.attention == 1 and self.factor == 1:
            return {"rope_type": "default", "rope_theta": base}
        scaled = {"rope_theta": base, "factor": self.factor}
        if self.kind == "yarn" and self.factor != 1:
            attention = self.attention * (1 + 0.1 * math.log(self.factor) if self.factor > 1 else 1)
            length = {"original_max_position_embeddings": self.original_length}
            return {"rope_type": "yarn", **scaled, "attention_factor": attention, **length}
        if plain and self.attention == 1 and "linear" in self.types:
            return {"rope_type": "linear", **scaled}
        one_set = self.short == self.long and self.attention == 1 == self.factor
        published = (
            _llama3(self.short, base, self.original_length)
            if one_set and "llama3" in self.types
            else None
        )
        if published is not None:
            return {"rope_theta": base, **published}
        return {
            "rope_type": "longrope",
            "rope_theta": base,
            "short_factor": [part * self.factor for part in self.short],
            "long_factor": [part * self.factor for part in self.long],
            "attention_factor": self.attention,
            "original_max_position_embeddings": self.original_length,
        }

    def unscaled(self) -> _Scaling:
        """Return the scaling of blocks with a window: cosines and sines alone."""
        return replace(self, kind="linear", factor=1.0)


def _scaling(
    keys: _Keys,
    known: Architecture,
    length: int,
    factors: Mapping[str, Sequence[float]],
    turned: int,
) -> _Scaling:
    """Return the scaling that a file says. ``length``: tokens of the model's context; ``turned``:
    rotary dimensions of a head."""
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.error("rope.scaling.type", "and read are none, linear, yarn and longrope")
    written = keys.number("rope.scale_linear", 0)  # the older name
    factor = keys.number("rope.scaling.factor", written) or 1.0
    if kind == "none" and factor != 1:
        if keys.architecture == "gemma2":
            raise keys.error(
                "rope.scaling.type",
                f"and a factor of {factor:g}, which llama.cpp applies in some blocks then",
            )
        factor = 1.0
    attention = keys.number("rope.scaling.attn_factor", 1)
    length = int(keys.number("rope.scaling.original_context_length", length))
    if not (0 < factor < math.inf and 0 < attention < math.inf and length > 1):
        numbers = f"factor {factor:g}, attn_factor {attention:g}, original_context_length {length}"
        raise ValueError(
            f"{keys.where} has {keys.architecture}.rope.scaling.* that are no positive numbers:"
            f" {numbers}"
        )
    names = LONG_FACTORS if kind == "longrope" and known.factors else known.factors
    if factors and set(factors) != set(names):
        raise ValueError(
            f"{keys.where} has {' and '.join(sorted(factors))}, and with scaling of type {kind}"
            " its architecture reads"
            f" {' with '.join(names) or 'no such tensor'}"
        )
    for name, values in factors.items():
        if len(values) != turned // 2 or not all(0 < value < math.inf for value in values):
            raise ValueError(
                f"{keys.where}: {name} must have {turned // 2} positive numbers, half of a head's"
                f" {turned}"
            )
    ones = (1.0,) * (turned // 2)
    short, long = (tuple(factors.get(name, ones)) for name in (names[:1] + names[-1:] or ("", "")))
    if kind == "yarn" and factor != 1 and (factors or "yarn" not in known.rotary_types):
        raise keys.error(
            "rope.scaling.type", "which is read neither in phi3 nor together with frequency factors"
        )
    return _Scaling(kind, factor, attention, length, short, long, known.rotary_types)


def _llama3(factors: Sequence[float], base: float, length: int) -> dict[str, Any] | None:
    """Return the scaling of Llama 3.1 to 3.3 by whose published constants the factors were
    computed; None where they were not."""
    factor = max(factors)
    low = 1.0
    high = 4.0
    for original in dict.fromkeys((8192, length, max(1, round(length / factor)))):
        expected = []
        for pair in range(len(factors)):
            turns = original * base ** (-pair / len(factors)) / (2 * math.pi)
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            expected.append(1 / ((1 - smooth) / factor + smooth))
        if all(
            math.isclose(one, two, rel_tol=1e-5) for one, two in zip(expected, factors, strict=True)
        ):
            kind = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
            }
            return {**kind, "original_max_position_embeddings": original}
    return None

"""The architectures of GGUF files: a row for each, with the model of transformers that computes the
same; and the metadata under an architecture's name. No torch, no transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
FACTORS = ("rope_freqs.weight", *LONG_FACTORS)
"""The tensors that hold factors of rotary frequencies, and no weights."""
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


def row(metadata: Mapping[str, Any]) -> Architecture:
    """Return the row of a file: experts in a llama make it a Mixtral."""
    architecture = str(metadata["general.architecture"])
    if architecture == "llama" and metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[architecture]


class Keys:
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
                why = "and every block must have the same: models whose blocks differ are not read"
                raise self.error(key, why)
            return value[0]
        return value

    def need(self, key: str) -> Any:
        """Return the positive number of a key that must be there."""
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
        """Return the error that refuses a key's value, with the reason."""
        value = self.values[key]
        text = str(value)
        if isinstance(value, tuple):
            text = f"[{', '.join(map(str, value[:8]))}{', …' if len(value) > 8 else ''}]"
        return ValueError(f"{self.where} has {self.architecture}.{key} = {text}, {why}")

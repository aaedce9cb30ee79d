"""Rotary positions of a GGUF file, as settings of transformers that compute what llama.cpp does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockwalk.models.gguf_architectures import LONG_FACTORS, Architecture, Keys

_LOW_TURNS = 1.0
_HIGH_TURNS = 4.0
"""Turns of a rotary pair within the original length, between which Llama 3.1 goes from scaled to
plain frequencies."""


def rotary_settings(
    keys: Keys,
    architecture: Architecture,
    settings: Mapping[str, Any],
    factors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return rotary positions: base, scaling, frequency factors and the part of a head that is
    turned."""
    width = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    rotary = keys.get("rope.dimension_count", width)
    keys.must(
        "rope.dimension_count_swa", rotary, why=f"and {rotary} dimensions are turned in all blocks"
    )
    if rotary != width and (
        not architecture.partial_rotary or not 0 < rotary < width or rotary % 2
    ):
        raise keys.error(
            "rope.dimension_count",
            f"and a head of {width} dimensions is turned whole in this architecture",
        )
    base = keys.need("rope.freq_base") if "rope.freq_base" in keys.values else 10000.0
    scaling = _scaling(keys, architecture, settings["max_position_embeddings"], factors, rotary)
    full = scaling.parameters(base)
    sliding_base = keys.get("rope.freq_base_swa", 10000.0)
    if keys.architecture == "gemma3":
        sliding = scaling.unscaled().parameters(
            sliding_base if settings["sliding_window"] else base
        )
        return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    keys.must("rope.freq_base_swa", base, why=f"and the model has one base, {base:g}")
    if architecture.partial_rotary:
        full["partial_rotary_factor"] = rotary / width
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
    short_factors: tuple[float, ...]
    """Factors by dimension, or as many ones."""
    long_factors: tuple[float, ...]
    types: tuple[str, ...]
    """The kinds that the model's class takes."""

    def parameters(self, base: float) -> dict[str, Any]:
        """Return the scaling as transformers' ``rope_parameters``."""
        plain = set(self.short_factors) == {1.0} == set(self.long_factors)
        if plain and self.attention == 1 and self.factor == 1:
            return {"rope_type": "default", "rope_theta": base}
        scaled = {"rope_theta": base, "factor": self.factor}
        if self.kind == "yarn" and self.factor != 1:
            attention = self.attention * (1 + 0.1 * math.log(self.factor) if self.factor > 1 else 1)
            length = {"original_max_position_embeddings": self.original_length}
            return {"rope_type": "yarn", **scaled, "attention_factor": attention, **length}
        if plain and self.attention == 1 and "linear" in self.types:
            return {"rope_type": "linear", **scaled}
        one_set = self.short_factors == self.long_factors and self.attention == 1 == self.factor
        if one_set and "llama3" in self.types:
            published = _llama3(self.short_factors, base, self.original_length)
            if published is not None:
                return {"rope_theta": base, **published}
        return {
            "rope_type": "longrope",
            "rope_theta": base,
            "short_factor": [part * self.factor for part in self.short_factors],
            "long_factor": [part * self.factor for part in self.long_factors],
            "attention_factor": self.attention,
            "original_max_position_embeddings": self.original_length,
        }

    def unscaled(self) -> _Scaling:
        """Return the scaling of blocks with a window: cosines and sines alone."""
        return replace(self, kind="linear", factor=1.0)


def _scaling(
    keys: Keys,
    architecture: Architecture,
    length: int,
    factors: Mapping[str, Sequence[float]],
    rotary: int,
) -> _Scaling:
    """Return the scaling that a file says. ``length``: tokens of the model's context; ``rotary``:
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
    names = LONG_FACTORS if kind == "longrope" and architecture.factors else architecture.factors
    _require_factors(keys, kind, names, factors, rotary // 2)
    if kind == "yarn" and factor != 1 and (factors or "yarn" not in architecture.rotary_types):
        raise keys.error(
            "rope.scaling.type", "which is read neither in phi3 nor together with frequency factors"
        )
    ones = (1.0,) * (rotary // 2)
    return _Scaling(
        kind,
        factor,
        attention,
        length,
        short_factors=tuple(factors.get(names[0], ones)) if names else ones,
        long_factors=tuple(factors.get(names[-1], ones)) if names else ones,
        types=architecture.rotary_types,
    )


def _require_factors(
    keys: Keys,
    kind: str,
    names: Sequence[str],
    factors: Mapping[str, Sequence[float]],
    count: int,
) -> None:
    """Raise ValueError where a file has other tensors of frequency factors than ``names``, or not
    ``count`` positive numbers in each."""
    if factors and set(factors) != set(names):
        raise ValueError(
            f"{keys.where} has {' and '.join(sorted(factors))}, and with scaling of type {kind} its"
            f" architecture reads {' with '.join(names) or 'no such tensor'}"
        )
    for name, values in factors.items():
        if len(values) != count or not all(0 < value < math.inf for value in values):
            raise ValueError(
                f"{keys.where}: {name} must have {count} positive numbers, half of a head's"
                f" {2 * count}"
            )


def _llama3(factors: Sequence[float], base: float, length: int) -> dict[str, Any] | None:
    """Return the scaling of Llama 3.1 to 3.3 by whose published constants the factors were
    computed; None where they were not."""
    factor = max(factors)
    for original in dict.fromkeys((8192, length, max(1, round(length / factor)))):
        expected = []
        for pair in range(len(factors)):
            turns = original * base ** (-pair / len(factors)) / (2 * math.pi)
            smooth = min(max((turns - _LOW_TURNS) / (_HIGH_TURNS - _LOW_TURNS), 0.0), 1.0)
            expected.append(1 / ((1 - smooth) / factor + smooth))
        pairs = zip(expected, factors, strict=True)
        if all(math.isclose(one, other, rel_tol=1e-5) for one, other in pairs):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW_TURNS,
                "high_freq_factor": _HIGH_TURNS,
                "original_max_position_embeddings": original,
            }
    return None

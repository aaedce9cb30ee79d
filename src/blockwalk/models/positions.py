"""The positions that a model was made for, by its configuration."""

from __future__ import annotations

from typing import Any

from blockwalk.models.model_source import model_source
from blockwalk.system.paths import StrPath


def text_config(model: StrPath) -> dict[str, Any]:
    """Return the configuration of a model's text decoder, as its file has it."""
    values = model_source(model).config_values
    text: dict[str, Any] = values.get("text_config", values)
    return text


def positions_of(model: StrPath) -> int:
    """Return tokens of the longest sequence that a model was made for; 0 where its configuration
    does not say."""
    config = text_config(model)
    positions = int(config.get("max_position_embeddings") or config.get("n_positions") or 0)
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type"))
    if kind not in ("linear", "dynamic", "yarn"):  # other kinds name all of them
        return positions
    unscaled = rotary.get("original_max_position_embeddings") or positions
    return max(positions, int(unscaled * rotary.get("factor", 1)))

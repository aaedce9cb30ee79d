"""The tool that quantised a checkpoint's weights, as its configuration tells. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockwalk.plan.placement import Codec
from blockwalk.system.atomic_files import reading

METHODS = {
    "fp8": Codec.FP8_BLOCKS,
    "bitsandbytes": Codec.BITSANDBYTES,
    "gptq": Codec.GPTQ,
    "awq": Codec.AWQ,
    "compressed-tensors": Codec("compressed-tensors"),
    "mxfp4": Codec.MXFP4,
}
"""The values of ``quant_method`` that are read, and the codec that each is here."""
KEYS = ("quantization_config", "compression_config")
"""The keys of a configuration that tell it."""


def quantisation(values: Mapping[str, Any], config: Path) -> tuple[Codec, dict[str, Any]] | None:
    """Return the codec of a model's quantised matrices, and what its tool says of them; None where
    nothing is quantised.

    A composite model's configuration tells it outside, or in the part of the text model.

    Args:
        values: the content of ``config``, the model's ``config.json``.

    Raises:
        ValueError: by a tool whose files are not read.
    """
    with reading(config):
        parts = [values, *(part for part in values.values() if isinstance(part, Mapping))]
        settings = next((part[key] for part in parts for key in KEYS if part.get(key)), None)
        if settings is None:
            return None
        method = settings.get("quant_method", "no name")
        if method == "no name" and "bnb_4bit_quant_type" in settings:
            method = "bitsandbytes"
        codec = METHODS.get(method)
    if codec is None:
        raise ValueError(
            f"{config}: the weights are quantised already (quant_method {method}), which is not"
            f" read; read are {', '.join(METHODS)}, and GGUF files: take the model that it was made"
            " from, or one of those"
        )
    return codec, settings

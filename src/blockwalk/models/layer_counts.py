"""The numbers of layers and experts in a configuration, compared with the tensors of its checkpoint
before a module is made of any."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_LAYERS = re.compile(r"n_layers?|depth|(\w+_)?layers|num_\w*layers?")
_EXPERTS = re.compile(r"(\w+_)?experts")
"""Names of settings that count modules."""
LAYERS = 512
EXPERTS = 4096
"""Layers and experts that a configuration may have whatever the number of tensors."""
ALONE = 4096
"""Layers of a configuration without a checkpoint, at most."""


def refuse_counts(config: Mapping[str, Any], file: Path, tensors: int | None) -> None:
    """Check that a configuration counts no more layers than its checkpoint has tensors.

    Args:
        config: as its file has it.
        file: in messages.
        tensors: of the checkpoint; None: there is none, or it does not tell.

    Raises:
        ValueError: a setting counts more; its name and value.
    """
    for name, value in _numbers(config):
        bound = ALONE if tensors is None else max(tensors, LAYERS)
        if _EXPERTS.fullmatch(name):
            bound = max(tensors or 0, EXPERTS)
        elif not _LAYERS.fullmatch(name):
            continue
        if value > bound:
            weights = "" if tensors is None else f", and its checkpoint has {tensors:,} tensors"
            raise ValueError(
                f"model: {file}: {name} is {value:,}{weights}: at most {bound:,} are read"
            )


def tensors_of(file: Path) -> int | None:
    """Return the number of tensors of a safetensors file; None of what is none."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > file.stat().st_size:
                return None
            return len(json.loads(opened.read(length)).keys() - {"__metadata__"})
    except (struct.error, ValueError, AttributeError, RecursionError):
        return None


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a configuration and of those inside it, by name."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield name, value

"""An accelerator as plain values: what its driver says of it, and what ``benchmarks/gpu.sh`` has
measured on it.

The figures lie in a file ``gpu-facts-<card>.json``, in the folder of ``hardware.yaml``. Whoever
plans reads them in place of the constants that ship. Nothing here imports torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from blockwalk.system.atomic_files import read_json, reading

PATTERN = "gpu-facts-*.json"
"""The names of the files of figures."""


@dataclass(frozen=True, slots=True)
class Card:
    """The facts that a driver tells of one accelerator."""

    name: str = ""
    """The maker's name of it; empty where torch does not tell it."""
    memory_bytes: int = 0
    """Bytes of all of its memory; 0: not known."""
    free_bytes: int = 0
    """Bytes of it that a step's tensors may take now; 0: not known."""
    bfloat16: bool = True
    """False where the card computes in bfloat16 by way of float32 alone: NVIDIA's before compute
    capability 8.0."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The figures that ``benchmarks/gpu.sh`` measures on a card. A figure that is 0, or a mapping
    without a codec, was not measured."""

    name: str
    """The card as torch calls it."""
    memory_bytes: int = 0
    capability: str = ""
    copy_up: float = 0.0
    """Bytes/s from registered host memory to the device."""
    copy_down: float = 0.0
    """Bytes/s from the device to registered host memory."""
    copy_both: float = 0.0
    """Bytes/s of both directions at once, together."""
    launch_us: float = 0.0
    """Microseconds to launch a kernel."""
    operator_us: float = 0.0
    """Microseconds to start one of torch's operators."""
    host_start_us: float = 0.0
    """Microseconds of the host for an operation that it starts in a walk, the Python around it
    included."""
    host_turn_us: float = 0.0
    """Microseconds of the host for a turn of a unit, beside its operations."""
    noise_per_s: float = 0.0
    """Elements of noise a second, drawn and added."""
    decode_rate: Mapping[str, float] = field(default_factory=dict)
    """Elements decoded a second, by codec."""
    fused_crossing_rows: Mapping[str, float] = field(default_factory=dict)
    """The most rows of a product in which decoding inside it is no slower than before it, by codec;
    0: none."""
    norm_bytes_per_s: float = 0.0
    """Bytes of float32 gradients a second that their norm reads."""
    loss_s: float = 0.0
    """Seconds of the loss that the script tries."""


def read(path: Path) -> Facts:
    """Return the figures in a file.

    Raises:
        ValueError: the file holds no JSON, names no card, or has a figure that is negative, not
            finite or no number.
    """
    with reading(path):
        raw = read_json(path)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str) or not raw["name"]:
        raise ValueError(f"{path}: it names no card; benchmarks/gpu.sh writes such a file")
    hints = get_type_hints(Facts)
    values: dict[str, Any] = {}
    for declared in fields(Facts):
        name = declared.name
        value = raw.get(name)
        if value is None:  # not measured, or left out when memory ran out
            continue
        kind = hints[name]
        if kind is str:
            values[name] = ".".join(map(str, value)) if isinstance(value, list) else str(value)
        elif kind in (int, float):
            values[name] = kind(_figure(path, name, value))
        elif not isinstance(value, Mapping):
            raise ValueError(f"{path}: {name} is {value!r}; it must be a mapping by codec")
        else:
            values[name] = {
                str(codec): _figure(path, f"{name}.{codec}", figure)
                for codec, figure in value.items()
                if figure is not None
            }
    return Facts(**values)


def _figure(path: Path, name: str, value: Any) -> float:
    """Return a figure that is a finite number of at least 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ValueError(f"{path}: {name} is {value!r}; it must be a finite number of at least 0")
    return float(value)


def facts_of(name: str, folder: Path = Path()) -> Facts | None:
    """Return the figures of the card of a name, from the files in a folder; None where none has
    been measured.

    Raises:
        ValueError: a file of figures cannot be read.
    """
    if not name:
        return None
    measured = map(read, sorted(folder.glob(PATTERN)))
    return next((facts for facts in measured if facts.name == name), None)


def is_called(name: str, words: str) -> bool:
    """Return whether a card's name has these words in it, whole and one after the other.

    >>> is_called("NVIDIA H200", "H20"), is_called("NVIDIA GeForce RTX 4090", "RTX 4090")
    (False, True)
    """
    pattern = rf"(?<![\w]){re.escape(words)}(?![\w])"
    return bool(words) and re.search(pattern, name, re.IGNORECASE) is not None

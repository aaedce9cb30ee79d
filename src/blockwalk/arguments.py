"""The recorded arguments of a block's call, as values that can be replayed any number of times.

An argument is constant, or differentiable (it came out of the prologue's graph and then receives a gradient), or a
mutable container, of which every call gets its own view. Anything else is refused: it could carry state from one block
to the next.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range)
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_OPAQUE = ("BlockMask",)
"""Class names of immutable objects that attention implementations pass to layers."""


def is_cache(value: Any) -> bool:
    """Whether a value is a ``transformers`` key-value cache, or one layer of it."""
    return any(cls.__module__ == "transformers.cache_utils" for cls in type(value).__mro__)


def rebuild(
    value: Any, on_tensor: Callable[[torch.Tensor], torch.Tensor], where: str, *, share_caches: bool = False
) -> Any:
    """Copy ``value`` with each tensor replaced by ``on_tensor`` of it; containers and caches are built anew.

    The copy shares no mutable container with the original, so whatever a call writes into it is thrown away with it
    (a key-value cache stays the same object where ``share_caches``: generation writes into it on purpose).
    ``where`` names the argument in the ValueError that refuses an object of an unknown class.
    """
    if isinstance(value, torch.Tensor):
        return on_tensor(value)
    if isinstance(value, _CONSTANTS + _TORCH_CONSTANTS) or type(value).__name__ in _OPAQUE:
        return value
    if isinstance(value, tuple):
        items = [rebuild(item, on_tensor, where, share_caches=share_caches) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [rebuild(item, on_tensor, where, share_caches=share_caches) for item in value]
    if isinstance(value, set | frozenset):
        return type(value)(value)
    if isinstance(value, Mapping):
        twin = copy.copy(value)
        for key, item in value.items():
            twin[key] = rebuild(item, on_tensor, where, share_caches=share_caches)  # type: ignore[index]
        return twin
    if is_cache(value):
        if share_caches:
            return value
        twin = copy.copy(value)
        for key, item in vars(value).items():
            # Lists of layers and dicts of states are rebuilt; streams, classes and the like are shared as they are.
            if isinstance(item, torch.Tensor | list | dict | tuple) or is_cache(item):
                setattr(twin, key, rebuild(item, on_tensor, where, share_caches=share_caches))
        return twin
    if isinstance(value, type) or callable(value):
        return value
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which could carry state from one block to "
        "the next; Blockwalk trains models whose layers take tensors, numbers and containers of these"
    )


def tensors_of(value: Any, *, caches: bool = True) -> list[torch.Tensor]:
    """All tensors in a value (those of key-value caches only where ``caches``), in a fixed order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    rebuild(value, note, "argument", share_caches=not caches)
    return found


def containers_of(value: Any) -> list[tuple[str, int]]:
    """(path, length) of every dict and list that is not part of a cache: what a call must leave as it was."""
    if isinstance(value, Mapping):
        inner = [(f"[{key!r}]{path}", size) for key, item in value.items() for path, size in containers_of(item)]
        return [("", len(value)), *inner]
    if isinstance(value, list | tuple):
        inner = [(f"[{i}]{path}", size) for i, item in enumerate(value) for path, size in containers_of(item)]
        return [("", len(value)), *inner] if isinstance(value, list) else inner
    return []

"""Scratch buffers that are kept from call to call and grow to the largest size that was asked
for."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor

from blockwalk.numerics.device import is_cpu

VIEWS = 256
"""Views of an arena's buffers that are remembered: batches of ever new lengths ask for ever new
ones."""


class ScratchArena:
    """Buffers by name and device, kept from call to call, each grown to the largest that was asked
    of it.

    One thread (on CUDA, one stream) at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self._views: dict[tuple[Any, ...], Tensor] = {}
        """Tensors that were answered, by everything that was asked of them: a walk asks for the
        same few again and again."""

    def take(self, name: str, *shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor [*shape] on ``like``'s device: valid until
        ``name`` is taken again."""
        asked = (name, shape, dtype, like.device)
        view = self._views.get(asked)
        if view is not None and not view.requires_grad:  # a copy of a graph's tensor makes it one's
            return view
        nbytes = math.prod(shape) * dtype.itemsize
        key = (name, like.device)
        buffer_P = self._buffers.get(key)
        if buffer_P is None or buffer_P.numel() < nbytes:
            # free before allocating: the old and the new one never stand side by side
            self._buffers.pop(key, None)
            self._views.clear()
            del buffer_P
            buffer_P = self._buffers[key] = torch.empty(
                nbytes, dtype=torch.uint8, device=like.device
            )
        if len(self._views) == VIEWS:
            self._views.clear()
        view = self._views[asked] = buffer_P[:nbytes].view(dtype).view(shape)
        return view

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return sum(buffer_P.nbytes for buffer_P in self._buffers.values())


class _Shared(threading.local):
    def __init__(self) -> None:
        self.arena = ScratchArena()


_SHARED = _Shared()


_OF_ACCELERATORS = ScratchArena()


def shared_arena(device: torch.device) -> ScratchArena:
    """Return the arena that weights decode into unless they are given another: on a CPU the calling
    thread's; on accelerators one for all threads, for autograd's decode on the streams of the
    forwards."""
    return _SHARED.arena if is_cpu(device) else _OF_ACCELERATORS

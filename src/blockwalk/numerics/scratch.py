"""Scratch buffers that are kept from call to call and grow to the largest size that was asked
for."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from blockwalk.numerics.device import is_cpu


class ScratchArena:
    """Buffers by name and device, kept from call to call, each grown to the largest that was asked
    of it.

    One thread (on CUDA, one stream) at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, *shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor [*shape] on ``like``'s device: valid until
        ``name`` is taken again."""
        nbytes = math.prod(shape) * dtype.itemsize
        key = (name, like.device)
        buffer_P = self._buffers.get(key)
        if buffer_P is None or buffer_P.numel() < nbytes:
            self._buffers.pop(
                key, None
            )  # free before allocating: the old and the new one never stand side by side
            del buffer_P
            buffer_P = self._buffers[key] = torch.empty(
                nbytes, dtype=torch.uint8, device=like.device
            )
        return buffer_P[:nbytes].view(dtype).view(shape)

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

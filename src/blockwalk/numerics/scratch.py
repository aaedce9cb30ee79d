"""Scratch buffers that are kept from call to call and grow to the largest size that was asked for."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class LossScratch:
    """Buffers that are kept from call to call, each grown to the largest that was asked of it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor [*shape] on ``like``'s device: valid until ``name`` is taken again."""
        numel = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != dtype or buffer.device != like.device:
            self._buffers.pop(name, None)  # free before allocating: the old and the new one never stand side by side
            buffer = self._buffers[name] = torch.empty(numel, dtype=dtype, device=like.device)
        return buffer[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Scratch:
    """One buffer that weights decode into, for all of them: each call takes it anew.

    It grows to the largest range asked for and is kept: give ``nbytes`` to have it so from the start. The memory that it hands
    out holds until the next call on any weight that shares it. One thread (on CUDA, one stream) at a time.
    """

    def __init__(self, nbytes: int = 0, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor [rows, columns]."""
        nbytes = rows * columns * dtype.itemsize
        if nbytes > self.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # first let go: the old and the new never stand together
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:nbytes].view(dtype).view(rows, columns)


_shared = threading.local()


def shared_scratch(device: torch.device) -> Scratch:
    """The calling thread's scratch on a device: what weights decode into unless they are given another."""
    scratches: dict[torch.device, Scratch] = _shared.__dict__.setdefault("scratches", {})
    if device not in scratches:
        scratches[device] = Scratch(device=device)
    return scratches[device]

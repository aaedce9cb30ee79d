"""A memory that state is kept in: what every tier answers, and the memories of devices and hosts.

A memory holds *groups* of bytes. A group is one unit's state of one kind, and comes and goes as a
whole: tensors that are worked on where they lie (:meth:`Memory.zeros`) and may be read, or a bucket
that is copied to a slot and back (:meth:`Memory.write`, :meth:`Memory.read`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from blockwalk.numerics.device import host_buffers
from blockwalk.plan.sizes import side_by_side

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""The shape and dtype of each tensor of a group, by name."""


class Memory(Protocol):
    """The memory of one tier. Every method may be called from any lane; one group is one lane's at
    a time.

    Behind an accelerator work is issued on the current stream: a copy may end after the call.
    """

    def zeros(self, shapes: Shapes, group: Hashable) -> dict[str, Tensor]:
        """Make a group, in the place of an earlier one of its name: a zeroed tensor for each name,
        which may be read and written in place at any time until the group is forgotten."""

    def write(self, group: Hashable, data_P: Tensor) -> None:
        """Copy ``data_P`` (uint8 [nbytes], contiguous, on any device) into a group, which is made
        where there is none. The buffer is the caller's again on return."""

    def read(self, group: Hashable, out_P: Tensor) -> None:
        """Copy a group's bytes to ``out_P`` (uint8 [nbytes], contiguous, on any device): those of a
        group that was written, and of one of tensors, one after the other."""

    def bytes(self, group: Hashable) -> Tensor | None:
        """Return a group's bytes (CPU uint8 [nbytes]) where they lie in memory as they are; None
        where reading makes a copy of them."""

    def will_need(self, group: Hashable) -> None:
        """Make a group ready to be worked on in place: its turn has come. It may not exist."""

    def dont_need(self, group: Hashable) -> None:
        """Note that a group's turn is over: its bytes may go to wherever they are cheapest to keep.
        It may not exist."""

    def forget(self, group: Hashable) -> None:
        """Free a group, whose values nobody reads again. It may not exist."""

    def close(self) -> None:
        """Free everything. Tensors that are still referred to stay readable."""


class BufferMemory:
    """Groups in plain buffers of a device, or of the host beside it (a :class:`Memory`).

    Args:
        allocate: makes a zeroed buffer, uint8 [nbytes].
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._groups: dict[Hashable, Tensor] = {}

    def zeros(self, shapes: Shapes, group: Hashable) -> dict[str, Tensor]:
        self._groups[group] = self._allocate(total_bytes(shapes))
        return tensors_in(self._groups[group], shapes)

    def write(self, group: Hashable, data_P: Tensor) -> None:
        if group not in self._groups:
            self._groups[group] = self._allocate(data_P.numel())
        self._groups[group].copy_(data_P, non_blocking=True)

    def read(self, group: Hashable, out_P: Tensor) -> None:
        out_P.copy_(self._groups[group], non_blocking=True)

    def bytes(self, group: Hashable) -> Tensor | None:
        return self._groups.get(group)

    def will_need(self, group: Hashable) -> None:
        """Do nothing: it is there."""

    def dont_need(self, group: Hashable) -> None:
        """Do nothing: it stays."""

    def forget(self, group: Hashable) -> None:
        self._groups.pop(group, None)

    def close(self) -> None:
        self._groups.clear()


def device_memory(device: torch.device) -> BufferMemory:
    """Return the memory that blocks compute in."""
    return BufferMemory(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device))


def host_memory(device: torch.device) -> BufferMemory:
    """Return the host's memory, pinned where an accelerator copies from it."""
    return BufferMemory(lambda nbytes: host_buffers([nbytes], device)[0])


def total_bytes(shapes: Shapes) -> int:
    """Return bytes of a group whose tensors lie side by side."""
    return side_by_side(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())[1]


def tensors_in(group_P: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Return the tensors of a group, by name, as views of its bytes (uint8 [total_bytes])."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
    starts, _ = side_by_side(sizes)
    return {
        name: group_P[start : start + nbytes].view(dtype).view(tuple(shape))
        for (name, (shape, dtype)), start, nbytes in zip(shapes.items(), starts, sizes, strict=True)
    }

"""Slots: fixed device buffers that the units' buckets visit, one at a time, and graphs that refer
to parameters in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from blockwalk.numerics.device import issued

PAGE = 4096
"""Bytes that every slot begins at a multiple of: what a disk copies to without the processor."""


class Slots:
    """Device buffers of ``sizes`` bytes, made once, and which of them each unit visits."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._buffers: list[Tensor] = []
        for nbytes in sizes:
            whole_P = torch.empty(nbytes + PAGE if nbytes else 0, dtype=torch.uint8, device=device)
            self._buffers.append(whole_P[-whole_P.data_ptr() % PAGE :][:nbytes])
        self._number = {
            b.untyped_storage().data_ptr(): slot
            for slot, b in enumerate(self._buffers)
            if b.numel()
        }
        self._slot_of: dict[int, int] = {}
        self._vacant: list[torch.Event | None] = [None] * len(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(buffer_P.numel() for buffer_P in self._buffers)

    def enter(self, unit: int, slot: int, nbytes: int) -> Tensor:
        """Return the place (uint8 [nbytes]) of a unit in a slot, which it visits from now on."""
        self._slot_of[unit] = slot
        return self._buffers[slot][:nbytes]

    def of(self, unit: int, nbytes: int) -> Tensor:
        """Return the place (uint8 [nbytes]) of a unit in the slot that it visits."""
        return self._buffers[self._slot_of[unit]][:nbytes]

    def place_of(self, tensor: Tensor) -> int | None:
        """Return the byte of a slot at which a tensor begins; None where it lies in none of
        these."""
        slot = self._number.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        return None if slot is None else tensor.data_ptr() - self._buffers[slot].data_ptr()

    def refilled(
        self, unit: int, start: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
    ) -> Tensor:
        """Return the tensor that begins at a byte of the slot that a unit visits now."""
        numbers = self._buffers[self._slot_of[unit]].view(dtype)
        return numbers.as_strided(shape, stride, numbers.storage_offset() + start // dtype.itemsize)

    def vacate(self, slot: int) -> None:
        """Mark, on an accelerator, the place in the current stream where a slot's last use ends."""
        self._vacant[slot] = issued(self._buffers[slot].device)

    def await_vacant(self, slot: int) -> None:
        """Let the current stream wait for that mark: within a program lanes order this, between two
        nothing else does."""
        event = self._vacant[slot]
        if event is not None:
            torch.accelerator.current_stream(self._buffers[slot].device).wait_event(event)


@contextmanager
def saved_by_place(homes: Sequence[Slots], unit: int) -> Iterator[None]:
    """Graphs of a unit made inside refer to parameters by their places in slots, which are filled
    again, perhaps another slot, before the graph is differentiated."""

    def pack(saved: Tensor) -> Any:
        for slots in homes:
            start = slots.place_of(saved)
            if start is not None:
                return slots, start, saved.dtype, saved.shape, saved.stride()
        return saved.detach()  # an operation that saved its own answer would hold itself

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        slots, *place = packed
        tensor: Tensor = slots.refilled(unit, *place)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

"""A step counts, or changes nothing: the values that updates at a block's turn change, until the
step's end says which."""

from __future__ import annotations

import torch
from torch import Tensor

from blockwalk.numerics.device import is_cpu
from blockwalk.plan.sizes import side_by_side
from blockwalk.tiers.reused_maps import ReusedMaps
from blockwalk.tiers.scratch_maps import ScratchMaps

_KEPT = 1 << 30
"""Bytes of copies whose maps are written over by the next step: those of adapters. More go with
their maps, so that Linux does not write them to the disk."""


class Undo:
    """Copies of what a step that may still be refused has changed: in file maps where a processor
    computes or the values lie in some, else beside them, on the accelerator or in host memory.

    Args:
        scratch: where maps are made.
        device: where blocks compute.
    """

    def __init__(self, scratch: ScratchMaps, device: torch.device) -> None:
        self._scratch = scratch
        self._device = device
        self._maps = ReusedMaps(scratch, piece=0)
        self._beside: dict[int, list[Tensor]] = {}
        """The copies of each unit that lie beside its values."""
        self._changed: list[tuple[list[Tensor], list[Tensor]]] = []
        """Tensors that the step has changed, and copies of them."""

    def remember(self, unit: int, tensors: list[Tensor]) -> None:
        """Copy what an update of a unit is about to change."""
        if not any(t.numel() for t in tensors):
            return
        copies = self._copies(unit, tensors)
        torch._foreach_copy_(copies, tensors)
        self._changed.append((tensors, copies))

    def _copies(self, unit: int, tensors: list[Tensor]) -> list[Tensor]:
        """Return room for copies of a unit's tensors."""
        if is_cpu(self._device) or self._scratch.holds(tensors[0]):
            starts, end = side_by_side(t.nbytes for t in tensors)
            place_P = self._maps.take(end)
            return [
                place_P[start : start + t.nbytes].view(t.dtype).view(t.shape)
                for start, t in zip(starts, tensors, strict=True)
            ]
        beside = self._beside.get(unit, [])
        holds_first_values = any(copies is beside for _, copies in self._changed)
        if holds_first_values or [t.shape for t in beside] != [t.shape for t in tensors]:
            beside = self._beside[unit] = [torch.empty_like(t) for t in tensors]
        return beside

    def commit(self) -> None:
        """Keep the changes of a step that counts."""
        self._changed.clear()
        if self._maps.nbytes > _KEPT:
            self._maps.close()
        else:
            self._maps.rewind()

    def put_back(self) -> bool:
        """Give everything the value that it had before the step; the answer is whether anything had
        changed."""
        changed = self._changed
        self._changed = []
        for tensors, copies in reversed(changed):  # what was changed twice, to its first values
            torch._foreach_copy_(tensors, copies)
        self._maps.rewind()
        return bool(changed)

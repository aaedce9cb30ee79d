"""A step counts, or changes nothing: the values that updates at a block's turn change, until the
step's end says which."""

from __future__ import annotations

import torch
from torch import Tensor

from blockwalk.numerics.device import is_cpu
from blockwalk.tiers.scratch_maps import ScratchMaps

BEFORE = "before"
"""The first part of the names of groups that copies lie in."""
_LARGE = 1 << 20
"""Bytes of a unit's copies from which their maps are made anew for each step: an adapter's few
pages stay."""


class Undo:
    """Copies of what a step that may still be refused has changed: in file maps where a processor
    computes or the values lie in some, else beside them, on the accelerator or in host memory.

    Args:
        scratch: where maps are made, in the group ``(BEFORE, unit)``.
        device: where blocks compute.
    """

    def __init__(self, scratch: ScratchMaps, device: torch.device) -> None:
        self._scratch = scratch
        self._device = device
        self._before: dict[int, list[Tensor]] = {}
        self._changed: dict[int, list[Tensor]] = {}

    def remember(self, unit: int, tensors: list[Tensor]) -> None:
        """Copy what an update of a unit is about to change."""
        if not tensors:
            return
        kept = self._before.get(unit, [])
        if [t.shape for t in kept] != [t.shape for t in tensors]:
            shapes = {str(k): (tuple(t.shape), t.dtype) for k, t in enumerate(tensors)}
            mapped = is_cpu(self._device) or self._scratch.holds(tensors[0])
            maps = mapped and self._scratch.zeros(shapes, group=(BEFORE, unit))
            kept = self._before[unit] = (
                [*maps.values()] if maps else [torch.empty_like(t) for t in tensors]
            )
        torch._foreach_copy_(kept, tensors)
        self._changed[unit] = tensors

    def commit(self) -> None:
        """Keep the changes of a step that counts. Large file maps of what was before go: those of
        the next step need not be read before they are overwritten."""
        self._changed.clear()
        large = [
            unit for unit, kept in self._before.items() if sum(t.nbytes for t in kept) >= _LARGE
        ]
        for unit in [unit for unit in large if self._scratch.holds(self._before[unit][0])]:
            self._scratch.forget((BEFORE, unit))
            del self._before[unit]

    def put_back(self) -> bool:
        """Give everything the value that it had before the step; the answer is whether anything had
        changed."""
        changed = self._changed
        self._changed = {}
        for unit, tensors in changed.items():
            torch._foreach_copy_(tensors, self._before[unit])
        return bool(changed)

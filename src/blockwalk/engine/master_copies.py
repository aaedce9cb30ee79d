"""Masters that the processor behind an accelerator updates, and the copies of them that the device
computes with.

A unit's masters are one bucket, in pinned memory or in a file map. The device has a copy of the
bucket: in a slot while the unit's turn is near, or for good where the unit's trainables stay there.
No copy is ever written back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from blockwalk.engine.home import Job
from blockwalk.engine.slots import Slots
from blockwalk.plan.placement import StateKind
from blockwalk.program.placements import Placements
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.memory import Shapes, tensors_in, total_bytes
from blockwalk.tiers.protocols import UnitTier


class MasterCopies:
    """The copies on the device of every unit's masters.

    Args:
        shapes: each unit's masters.
        places: where each unit's trainables live, and the tier that their masters lie on.
        memories: where masters lie, a unit in the group ``(StateKind.TRAINABLE, unit)``.
    """

    def __init__(self, shapes: Sequence[Shapes], places: Placements, memories: Memories) -> None:
        self._shapes = shapes
        self._sizes = [total_bytes(unit_shapes) for unit_shapes in shapes]
        units = range(len(shapes))
        visits = [unit for unit in units if StateKind.TRAINABLE in places.parts(unit)]
        largest = max((self._sizes[unit] for unit in visits), default=0)
        tiers = [places.residences[unit, StateKind.TRAINABLE].tier for unit in units]
        self._memory = [memories[tier] for tier in tiers]
        self._tier: UnitTier | None = None
        """The buckets of masters whose copies visit slots: those of one tier, the plan's."""
        if visits:
            self._tier = memories.buckets(tiers[visits[0]], StateKind.TRAINABLE, largest)
        self.slots = Slots([largest] * places.slot_count, memories.device) if visits else None
        self._resident = {
            unit: torch.empty(self._sizes[unit], dtype=torch.uint8, device=memories.device)
            for unit in units
            if unit not in visits and self._sizes[unit]
        }
        self.values: dict[str, Tensor] = {}
        """Every trainable on the device, by name; one that visits a slot as it came last."""
        for unit, bytes_P in self._resident.items():
            self.values |= tensors_in(bytes_P, shapes[unit])

    def fetch(self, unit: int, slot: int) -> Job:
        """FETCH: copy a unit's masters to its slot, or to where its copy stays."""
        if unit in self._resident:
            return partial(self._refresh, unit)
        assert self.slots is not None
        assert self._tier is not None
        bytes_P = self.slots.enter(unit, slot, self._sizes[unit])
        self.values |= tensors_in(bytes_P, self._shapes[unit])
        tier = self._tier

        def work() -> None:
            tier.read_unit(unit, bytes_P)

        return work

    def _refresh(self, unit: int) -> None:
        # out of a file map the copy waits, on the lane of updates, which nothing waits for before
        # the step's end
        self._memory[unit].read((StateKind.TRAINABLE, unit), self._resident[unit])

    def refresh(self) -> None:
        """Bring every copy that stays on the device up to date."""
        for unit in self._resident:
            self._refresh(unit)

    def close(self) -> None:
        """Let go of threads."""
        if self._tier is not None:
            self._tier.close()

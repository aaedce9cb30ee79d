"""Masters that the processor behind an accelerator updates, and the copies of them that the device
computes with.

A unit's masters are one bucket, in pinned memory or in a file map. The device has a copy of the
bucket: in a slot while the unit's turn is near, or for good where the unit's trainables stay there.
No copy is ever written back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from blockwalk.engine.bucket_tensors import BucketLayout
from blockwalk.engine.home import Job
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.slots import Slots
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.placement import Codec, StateKind, Tier
from blockwalk.program.placements import Placements
from blockwalk.tiers.memories import Memories


class MasterCopies:
    """The masters of every unit, with their copies on the device.

    Args:
        model: the model; nothing is read from it yet.
        places: where the plan has each unit's trainables.
        memories: where masters lie.
        tier: the tier that they lie on.
    """

    def __init__(
        self, model: ModelHandle, places: Placements, memories: Memories, tier: Tier
    ) -> None:
        codec = model.plan.trainable.codec
        device = model.device
        self._buckets = [
            BucketLayout(
                {
                    p.name: Layout(p.shape, Codec.RAW, codec.dtype_of(p.dtype))
                    for p in unit.part(True)
                }
            )
            for unit in model.spec.units
        ]
        units = range(len(self._buckets))
        sizes = [bucket.nbytes for bucket in self._buckets]
        visits = [unit for unit in units if places.streams(unit, StateKind.TRAINABLE)]
        largest = max((sizes[unit] for unit in visits), default=0)
        self._bytes = [
            memories[tier]
            .zeros({"masters": ((nbytes,), torch.uint8)}, (StateKind.TRAINABLE, unit))
            .get("masters", torch.empty(0, dtype=torch.uint8))
            for unit, nbytes in enumerate(sizes)
        ]
        self._tier = memories.buckets(tier, StateKind.TRAINABLE, largest)
        self.slots = Slots([largest] * places.slot_count, device) if visits else None
        stay = [unit for unit in units if unit not in visits and sizes[unit]]
        self._resident = {
            unit: torch.empty(sizes[unit], dtype=torch.uint8, device=device) for unit in stay
        }
        self.values: dict[str, Tensor] = {}
        """Every trainable on the device, by name; one that visits a slot as it came last."""
        for unit, bytes_P in self._resident.items():
            self.values |= self._tensors(unit, bytes_P)

    def masters(self, unit: int) -> dict[str, Tensor]:
        """Return a unit's masters by name, where the processor updates them."""
        return self._tensors(unit, self._bytes[unit])

    def _tensors(self, unit: int, bytes_P: Tensor) -> dict[str, Tensor]:
        parts = self._buckets[unit].parts(bytes_P)
        return {name: layout.codes(part_P).view(layout.shape) for name, layout, part_P in parts}

    def fetch(self, unit: int, slot: int) -> Job:
        """FETCH: copy a unit's masters to its slot, or to where its copy stays."""
        if unit in self._resident:
            return partial(self._refresh, unit)
        assert self.slots is not None
        bytes_P = self.slots.enter(unit, slot, self._buckets[unit].nbytes)
        self.values |= self._tensors(unit, bytes_P)
        tier = self._tier

        def work() -> None:
            tier.read_unit(unit, bytes_P)

        return work

    def _refresh(self, unit: int) -> None:
        # out of a file map the copy waits, on the lane of updates, which nothing waits for before
        # the step's end
        self._resident[unit].copy_(self._bytes[unit], non_blocking=True)

    def refresh(self) -> None:
        """Bring every copy that stays on the device up to date."""
        for unit in self._resident:
            self._refresh(unit)

    def close(self) -> None:
        """Let go of threads."""
        self._tier.close()

"""The memories of a run, one for each tier that state is placed on, and who makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from blockwalk.numerics.device import is_cpu
from blockwalk.plan.placement import StateKind, Tier
from blockwalk.system.paths import StrPath
from blockwalk.tiers.memory import Memory, device_memory, host_memory
from blockwalk.tiers.protocols import UnitTier
from blockwalk.tiers.scratch_maps import ScratchMaps
from blockwalk.tiers.unit_buckets import Staged, UnitBuckets

Maker = Callable[[torch.device, ScratchMaps], Memory]
"""The maker of a tier's memory: a function of the device that blocks compute on, and of the run's
file maps, whose ``folder`` is its working folder. It is called once a run, when state is first
placed on the tier."""

MAKERS: Mapping[str, Maker] = {
    "device": lambda device, scratch: device_memory(device),
    "host": lambda device, scratch: host_memory(device),
    "disk": lambda device, scratch: scratch,
}
"""The makers of our own tiers' memories; the row of another brings its own."""


class Memories:
    """The memories of one run, each made when state is first placed in it.

    Args:
        device: where blocks compute.
        workdir: a folder for files.
    """

    def __init__(self, device: torch.device, workdir: StrPath) -> None:
        self.device = device
        self.scratch = ScratchMaps(workdir)
        """File maps, which a processor's graphs and undone steps use whatever the tiers are."""
        self.pageable: Memory = device_memory(torch.device("cpu"))
        """The processor's own memory, for what no accelerator copies from or to."""
        self._memories: dict[str, Memory] = {}

    def __getitem__(self, tier: str) -> Memory:
        if tier not in self._memories:
            make = Tier(tier).facts.implementation or MAKERS[tier]
            self._memories[tier] = make(self.device, self.scratch)
        return self._memories[tier]

    def buckets(self, tier: Tier, kind: StateKind, largest: int) -> UnitTier:
        """Return a tier's memory as buckets of one kind of state, of at most ``largest`` bytes
        each, which visit slots."""
        buckets = UnitBuckets(self[tier], kind)
        return buckets if tier.facts.pinned or not largest else self.visited(buckets, largest)

    def visited(self, tier: UnitTier, largest: int) -> UnitTier:
        """Return a tier of CPU buffers as slots are filled from it: by way of pinned memory, behind
        an accelerator."""
        return tier if is_cpu(self.device) else Staged(tier, largest, self.device)

    def close(self) -> None:
        """Free every memory that was made."""
        for memory in (*self._memories.values(), self.scratch):
            memory.close()

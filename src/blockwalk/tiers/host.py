"""The host tier: every streamed bucket in host memory, pinned where an accelerator copies from it.

Pinned once and never grown: copies run asynchronously on the lanes' streams, and an event per
bucket keeps a step's fetch behind the last step's store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from blockwalk.numerics.device import host_buffers, is_cpu, recorded
from blockwalk.tiers.protocols import UnitTier


class HostTier:
    """Buckets in host memory (a :class:`~blockwalk.tiers.protocols.UnitTier`).

    Args:
        sizes: bytes of each unit's bucket; 0 for a unit that is not here.
        device: where buckets go; an accelerator pins the memory.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._buckets = host_buffers(sizes, device)
        self._steps = [0] * len(sizes)
        self._stored: list[torch.Event | None] = [None] * len(sizes)

    def bucket(self, unit: int) -> Tensor:
        """Return a unit's bytes (CPU uint8 [nbytes]), when the copy that was last queued to them
        has arrived."""
        if (stored := self._stored[unit]) is not None:
            stored.synchronize()
        return self._buckets[unit]

    def step(self, unit: int) -> int:
        return self._steps[unit]

    def read_unit(self, unit: int, out_P: Tensor) -> int:
        stored = self._stored[unit]
        if stored is not None:
            torch.accelerator.current_stream(out_P.device).wait_event(stored)
        out_P.copy_(self._buckets[unit], non_blocking=True)
        return self._steps[unit]

    def write_unit(self, unit: int, data_P: Tensor, step: int) -> None:
        self._buckets[unit].copy_(data_P, non_blocking=True)
        if not is_cpu(data_P.device):
            self._stored[unit] = recorded(data_P.device)
        self._steps[unit] = step

    def close(self) -> None:
        """Do nothing: the tier holds memory alone, which goes with it."""


class Staged:
    """A tier of CPU buffers behind an accelerator: two pinned buffers on the way in, one on the way
    out.

    A unit has left its slot when it is in the latter; a thread of its own waits for that and for
    the tier, so that no slot waits for a disk. An error of the tier's is raised for the next unit
    that is written, or for whoever reads this one."""

    def __init__(self, tier: UnitTier, largest: int, device: torch.device) -> None:
        self._tier = tier
        self._device = device
        *self._inward, self._outward = host_buffers([largest] * 3, device)
        self._copied: list[torch.Event | None] = [None, None]
        self._turn = 0
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blockwalk writer")
        self._leaving: tuple[int, int, Future[None]] | None = None
        """The unit that was last written, its step, and the end of its writing."""

    def step(self, unit: int) -> int:
        leaving = self._leaving
        return leaving[1] if leaving is not None and leaving[0] == unit else self._tier.step(unit)

    def _settle(self) -> None:
        """Wait until the tier has what was written to it."""
        if self._leaving is not None:
            self._leaving[2].result()

    def read_unit(self, unit: int, out_P: Tensor) -> int:
        if self._leaving is not None and self._leaving[0] == unit:
            self._settle()
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        staging_P = self._inward[self._turn][: len(out_P)]
        if copied is not None:
            copied.synchronize()
        step = self._tier.read_unit(unit, staging_P)
        out_P.copy_(staging_P, non_blocking=True)
        self._copied[self._turn] = recorded(self._device)
        return step

    def bucket(self, unit: int) -> Tensor | None:
        self._settle()
        return self._tier.bucket(unit)

    def write_unit(self, unit: int, data_P: Tensor, step: int) -> None:
        self._settle()
        staging_P = self._outward[: len(data_P)]
        staging_P.copy_(data_P, non_blocking=True)
        copied = recorded(self._device)

        def write() -> None:
            copied.synchronize()
            self._tier.write_unit(unit, staging_P, step)

        self._leaving = unit, step, self._writer.submit(write)

    def close(self) -> None:
        self._writer.shutdown(wait=True)
        self._tier.close()

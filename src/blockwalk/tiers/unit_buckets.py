"""Units' buckets in a memory, which visit slots one at a time: as they lie there, or behind an
accelerator by way of pinned staging."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from blockwalk.numerics.device import host_buffers, issued, recorded
from blockwalk.plan.placement import StateKind
from blockwalk.tiers.memory import Memory
from blockwalk.tiers.protocols import UnitTier


class UnitBuckets:
    """Buckets of one kind of state in a memory (a :class:`~blockwalk.tiers.protocols.UnitTier`).

    Copies run asynchronously on the lanes' streams; an event per bucket keeps a step's fetch behind
    the last step's store."""

    def __init__(self, memory: Memory, kind: StateKind) -> None:
        self._memory = memory
        self._kind = kind
        self._steps: dict[int, int] = {}
        self._stored: dict[int, torch.Event] = {}

    def bucket(self, unit: int) -> Tensor | None:
        """Return a unit's bytes (CPU uint8 [nbytes]), when the copy that was last queued to them
        has arrived."""
        if unit in self._stored:
            self._stored[unit].synchronize()
        return self._memory.bytes((self._kind, unit))

    def step(self, unit: int) -> int:
        return self._steps.get(unit, 0)

    def read_unit(self, unit: int, out_P: Tensor) -> int:
        if unit in self._stored:
            torch.accelerator.current_stream(out_P.device).wait_event(self._stored[unit])
        self._memory.read((self._kind, unit), out_P)
        return self.step(unit)

    def write_unit(self, unit: int, data_P: Tensor, step: int) -> None:
        self._memory.write((self._kind, unit), data_P)
        event = issued(data_P.device)
        if event is not None:
            self._stored[unit] = event
        self._steps[unit] = step

    def close(self) -> None:
        """Do nothing: the memory is closed with the run's others."""


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

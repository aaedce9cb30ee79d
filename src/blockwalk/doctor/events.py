"""Seconds of work on an accelerator by its own events, which no start by the host is part of."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from blockwalk.numerics.device import is_cpu

FILL_BYTES = 256 << 20
"""Bytes of a copy on the device that keeps it busy."""
FILLS = 16
"""Copies before what is timed: 2 ms or more, in which the host queues some ten calls."""


def event_seconds(work: Callable[[], object], device: torch.device) -> float | None:
    """Return seconds of work on an accelerator; None on a processor, and on a device whose events
    tell no time.

    The events stand in the device's queue behind copies that keep it busy while the host queues
    the work, so that small kernels are timed and not their starts."""
    if is_cpu(device) or not _tells_time(device):
        return None
    source_P, target_P = _filler(device)
    for _ in range(FILLS):
        target_P.copy_(source_P)
    return _between(work, device)


@functools.cache
def _filler(device: torch.device) -> tuple[Tensor, Tensor]:
    source_P = torch.zeros(FILL_BYTES, dtype=torch.uint8, device=device)
    return source_P, torch.empty_like(source_P)


@functools.cache
def _tells_time(device: torch.device) -> bool:
    """Return whether a device's events can be asked for the time between them."""
    try:
        return _between(lambda: None, device) >= 0
    except (RuntimeError, NotImplementedError):
        return False


def _between(work: Callable[[], object], device: torch.device) -> float:
    """Return seconds between two events, before and after work on the current stream."""
    began, ended = (torch.Event(device, enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream(device)
    began.record(stream)
    work()
    ended.record(stream)
    torch.accelerator.synchronize(device)
    return float(began.elapsed_time(ended)) / 1e3

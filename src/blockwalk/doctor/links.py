"""Measurements of links: host and device, the disk, and the ranks of a run."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockwalk.doctor.events import event_seconds
from blockwalk.doctor.findings import TimedCollective
from blockwalk.numerics.device import left_on, wait_for
from blockwalk.simulate.hardware import Link


def device_links(device: torch.device) -> tuple[Link, Link, float]:
    """Return the links from host to device and back with pinned memory, and bytes/s to the device
    from pageable memory."""
    size = 256 << 20
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    plain = torch.ones(size, dtype=torch.uint8)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    small = 4096
    starts = [
        wall_seconds(lambda: target[:small].copy_(pinned[:small], non_blocking=True), device)
        for _ in range(50)
    ]
    latency = min(starts)
    up = size / best_seconds(lambda: target.copy_(pinned, non_blocking=True), device)
    down = size / best_seconds(lambda: pinned.copy_(target, non_blocking=True), device)
    return (
        Link(up, latency),
        Link(down, latency),
        size / best_seconds(lambda: target.copy_(plain), device),
    )


_DIRECT = getattr(os, "O_DIRECT", 0)


_FILE = 192 << 20


def disk_links(folder: Path) -> tuple[Link, Link, float]:
    """Return the links of reads and of writes past the page cache, where the file system allows it,
    and bytes/s of reads from the cache."""
    chunk = 8 << 20
    buffer = mmap.mmap(-1, chunk)
    buffer.write(os.urandom(1 << 16) * (chunk >> 16))
    handle, path = tempfile.mkstemp(prefix=".blockwalk-doctor-", dir=folder)
    os.close(handle)
    try:
        writing = _timed(path, os.O_WRONLY | _DIRECT, lambda file: os.write(file, buffer))
        ways = (_DIRECT, 0, 0)  # the second to fill the cache, the third from it
        reading, _, cached = [
            _timed(path, os.O_RDONLY | way, lambda file: os.readv(file, [buffer])) for way in ways
        ]
    finally:
        os.unlink(path)
        buffer.close()
    return Link(reading, 1e-4), Link(writing, 1e-4), cached


def _timed(path: str, flags: int, move: Callable[[int], int]) -> float:
    """Return bytes/s of moving a whole file a part at a time, to the disk where it is written."""
    try:
        file = os.open(path, flags)
    except OSError:  # a file system without direct input and output
        file = os.open(path, flags & ~_DIRECT)
    try:
        began = time.perf_counter()
        moved = 0
        while moved < _FILE and (count := move(file)):
            moved += count
        if flags & os.O_WRONLY:
            os.fsync(file)
        return moved / (time.perf_counter() - began)
    finally:
        os.close(file)


GATHERED = "all-gather"
SIZES = (4096, 1 << 20, 16 << 20)
"""The collective that a link's figures are read off, and the bytes that a rank hands in."""


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Links between ranks, as they were timed under a launcher; of one rank there are none."""

    free_bytes: int
    """Bytes of the device that are free beside the communicators; 0 on a processor."""
    collectives: tuple[TimedCollective, ...] = ()
    intra: Link | None = None
    """The link of one rank inside its node."""
    inter: Link | None = None
    """The link of a whole node to another."""
    ranks_per_node: int = 1
    nodes: int = 1


def rank_links(device: torch.device) -> RankLinks:
    """Time the collectives of a run over this machine's ranks, and return their links."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if world == 1:
        return RankLinks(left_on(device))
    import torch.distributed as dist

    starts_group = not dist.is_initialized()
    if starts_group:
        dist.init_process_group(dist.get_default_backend_for_device(device))
    rank = dist.get_rank()
    nodes = world // local
    groups = [dist.new_group(list(range(n * local, (n + 1) * local))) for n in range(nodes)]
    inside = _timings("inside a node", groups[rank // local], local, device) if local > 1 else ()
    columns = [dist.new_group(list(range(i, world, local))) for i in range(local)]
    # every column gathers at once, so that the node's link is shared as in a step; it is described
    # for the whole node
    across = _timings("between nodes", columns[rank % local], nodes, device) if nodes > 1 else ()
    if nodes > 1:
        # a run's sums may have communicators beside those of gathers, whose memory is no step's
        sums = [dist.new_group(list(range(i, world, local))) for i in range(local)]
        dist.all_reduce(torch.zeros(1, device=device), group=sums[rank % local])
    dist.barrier()
    free_bytes = left_on(device)
    if starts_group:
        dist.destroy_process_group()
    inter = _link(across, nodes)
    if inter is not None:
        inter = Link(inter.bandwidth * local, inter.latency)
    return RankLinks(free_bytes, inside + across, _link(inside, local), inter, local, nodes)


def _link(timed: tuple[TimedCollective, ...], ranks: int) -> Link | None:
    """Return the bandwidth (bytes/s) and latency (seconds) of one rank in a gather; None where none
    was timed."""
    seconds = {run.nbytes: run.seconds for run in timed if run.name == GATHERED}
    if not seconds:
        return None
    small = min(seconds)
    large = max(seconds)
    return Link((ranks - 1) * large / max(seconds[large] - seconds[small], 1e-9), seconds[small])


def _timings(
    place: str, group: Any, ranks: int, device: torch.device
) -> tuple[TimedCollective, ...]:
    """Return seconds of each collective that our programs use, the best of five, over one group."""
    import torch.distributed as dist

    def timed(collective: Callable[[], object]) -> float:
        runs = []
        for _ in range(5):
            dist.barrier(group=group)
            wait_for(device)
            began = time.perf_counter()
            collective()
            wait_for(device)
            runs.append(time.perf_counter() - began)
        return min(runs)

    collectives = []
    for size in SIZES:
        bytes_P = torch.zeros(size, dtype=torch.uint8, device=device)
        parts = [torch.empty_like(bytes_P) for _ in range(ranks)]
        summed = bytes_P.view(torch.float32).clone()
        pieces = [bytes_P[: size // ranks].clone() for _ in range(ranks)]
        arriving = [torch.empty_like(piece) for piece in pieces]
        kinds: dict[str, Callable[[], object]] = {
            GATHERED: partial(dist.all_gather, parts, bytes_P, group=group),
            "all-to-all": partial(dist.all_to_all, arriving, pieces, group=group),
            "all-reduce": partial(dist.all_reduce, summed, group=group),
        }
        collectives += [
            TimedCollective(place, name, size, timed(collective))
            for name, collective in kinds.items()
        ]
    return tuple(collectives)


def wall_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return seconds of one run by the host's clock, its starts included."""
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def best_seconds(
    work: Callable[[], object], device: torch.device, *, seconds: float = 0.1
) -> float:
    """Return seconds of the fastest of several runs, on an accelerator by its own events where they
    tell them."""
    best = float("inf")
    began = time.perf_counter()
    runs = 0
    while runs < 3 or time.perf_counter() - began < seconds:
        elapsed = event_seconds(work, device)
        if elapsed is None:
            elapsed = wall_seconds(work, device)
        best = min(best, elapsed)
        runs = runs + 1
    return best

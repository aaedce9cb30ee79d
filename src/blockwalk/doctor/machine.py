"""Measurements of this machine: the figures of a :class:`~blockwalk.simulate.hardware.Hardware`, in
well under a minute.

Every figure is the best of several short runs: what the machine can do when nothing else is in its
way. Under torchrun the links between ranks are measured as well, by gathers of a small and a large
size: α from the one, β from the other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from blockwalk.doctor import walks as probe_walk
from blockwalk.doctor.findings import Findings, gigabytes
from blockwalk.doctor.host import host_seconds
from blockwalk.doctor.links import best_seconds, device_links, disk_links, rank_links, wall_seconds
from blockwalk.numerics.codecs.codecs import decode_rows, encode_rows
from blockwalk.numerics.codecs.layout import Layout, name_of
from blockwalk.numerics.device import chosen, is_cpu
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import perturbed
from blockwalk.numerics.row_tiles import multiplied_in
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import ByDevice
from blockwalk.simulate.hardware import BLOCK_OPS, MEASURED, Hardware, Link, kind_of
from blockwalk.system.load import busy_now, of_other_ranks
from blockwalk.system.paths import StrPath
from blockwalk.system.process_memory import host_memory

_MATRIX = ByDevice(cpu=768, cuda=8192)
_COPY = ByDevice(cpu=128 << 20, cuda=1 << 30)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDS = 3
"""Rounds over all rates, of which the middle one counts."""


def measure(
    folder: StrPath = ".",
    name: str = "here",
    *,
    walk: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> Findings:
    """Measure this machine.

    Args:
        folder: on the disk that is to be measured; 192 MB are written there and removed.
        name: of the description.
        walk: on a CPU, run small walks as well: what a process holds beside its tensors.
        say: told what is measured next.
    """
    say("products, memory, noise and decoding ...")
    began = time.perf_counter()
    device = device_of_rank()
    kind = kind_of(device.type)
    host, limited = host_memory()
    probes: dict[str, Callable[[], float]] = {
        "memory_bandwidth": lambda: _bandwidth(device),
        "noise_rate": lambda: _noise(device),
        "decode_rate": lambda: _decoding(device),
        "op_seconds": lambda: _launch(device),
        **{name_of(dtype): partial(_flops, device, dtype) for dtype in _DTYPES},
    }
    ranks_threads = of_other_ranks(torch.get_num_threads())
    busy = busy_now(ranks_threads)
    rates: dict[str, Any] = medians(probes)
    busy = busy or busy_now(ranks_threads)
    flops = {name_of(dtype): rates.pop(name_of(dtype)) for dtype in _DTYPES}
    bandwidth = rates["memory_bandwidth"]
    if kind == "cuda":
        up, down, pageable = device_links(device)
    else:
        up = down = Link(_copy_rate())
        pageable = 0.0
    host_lane: dict[str, Any] = {}
    if kind == "cuda":
        say("steps that wait for the host alone ...")
        start, turn = host_seconds(device)
        host_lane = {"host_start_seconds": start, "host_turn_seconds": turn}
    say("the disk ...")
    disk_read, disk_write, cached = disk_links(Path(folder))
    links = rank_links(device)
    beside: dict[str, Any] = {}
    if kind == "cpu" and walk and os.environ.get("RANK", "0") == "0":
        say("small training steps, which take most of the time ...")
        beside = probe_walk.beside_tensors(probe_walk.measure())
    hardware = Hardware(
        name=name,
        device=kind,
        device_bytes=links.free_bytes or host,
        host_bytes=host,
        disk_bytes=shutil.disk_usage(folder).free,
        host_to_device=up,
        device_to_host=down,
        disk_read=disk_read,
        disk_write=disk_write,
        intra=links.intra or Link(bandwidth),
        inter=links.inter or links.intra or Link(bandwidth),
        devices_per_node=links.ranks_per_node,
        nodes=links.nodes,
        source=f"{MEASURED} blockwalk doctor",
        flops=flops,
        **rates,
        **host_lane,
        **beside,
    )
    warnings = list(_warnings(hardware, limited, pageable))
    if busy:
        warnings.insert(
            0,
            f"{busy} before or after this: what is foreseen from these figures is of a busy"
            " machine; run doctor again when nothing else runs",
        )
    seconds = time.perf_counter() - began
    return Findings(hardware, tuple(warnings), cached, pageable, links.collectives, seconds)


def medians(probes: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Return each figure by its name, the middle one of a few rounds: a shared machine has seconds
    at half its speed."""
    rounds = [{name: probe() for name, probe in probes.items()} for _ in range(ROUNDS)]
    return {name: median(figures[name] for figures in rounds) for name in probes}


def device_of_rank() -> torch.device:
    """Return the device that this process measures: of several ranks on a node, each its own from
    the start."""
    if chosen().type != "cpu" and (count := torch.accelerator.device_count()) > 1:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return chosen()


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    n = _MATRIX[device.type]
    dtype = multiplied_in(dtype) if is_cpu(device) else dtype
    # a card that multiplies ones takes less power, and is faster, than on data
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / best_seconds(lambda: a @ b.t(), device)


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(_COPY[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / best_seconds(lambda: target.copy_(source), device)


def _copy_rate() -> float:
    """Return bytes/s of copies by one thread, as a lane of a processor makes them."""
    source = torch.ones(_COPY["cpu"], dtype=torch.uint8)
    target = torch.empty_like(source)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return source.numel() / best_seconds(lambda: target.copy_(source), source.device)
    finally:
        torch.set_num_threads(threads)


def _launch(device: torch.device) -> float:
    x = torch.ones(16, device=device)

    def start() -> None:
        for _ in range(BLOCK_OPS):
            x.add(1.0)

    return min(wall_seconds(start, device) for _ in range(20))


def _noise(device: torch.device) -> float:
    """Return elements/s of perturbing float32 weights a chunk at a time, from memory, as a forward
    does. An accelerator's chunk is a millisecond's."""
    chunk = 1 << (20 if device.type == "cpu" else 28)
    xs = torch.zeros(16 if device.type == "cpu" else 1, chunk, dtype=torch.float32, device=device)
    out = torch.empty_like(xs[0])
    key = NoiseKey(0, 1, 0, "doctor")
    return xs.numel() / best_seconds(lambda: [perturbed(x, out, key, 0, 1e-3) for x in xs], device)


def _decoding(device: torch.device) -> float:
    """Return elements/s of decoding 4-bit weights a chunk at a time, from memory."""
    shape = (16384, 1024) if device.type == "cpu" else (8192, 8192)
    rows = 1024 if device.type == "cpu" else 8192
    layout = Layout(shape, Codec.INT4)
    buffer = encode_rows(
        torch.ones(shape), torch.empty(layout.nbytes, dtype=torch.uint8), layout, 0
    ).to(device)
    out = torch.empty((rows, shape[1]), dtype=torch.bfloat16, device=device)
    starts = range(0, shape[0], rows)
    seconds = best_seconds(
        lambda: [decode_rows(buffer, layout, row, row + rows, out) for row in starts], device
    )
    return shape[0] * shape[1] / seconds


def _warnings(hardware: Hardware, limited: bool, pageable: float) -> Iterator[str]:
    """Yield sentences on whatever will slow a run on this machine."""
    import psutil

    if limited:
        yield (
            f"a cgroup limits this process to {gigabytes(hardware.host_bytes)}: pages of mapped"
            " files count against it as well"
        )
    if psutil.swap_memory().used > 64 << 20:
        yield (
            f"{gigabytes(psutil.swap_memory().used)} of swap are in use: what is swapped out comes"
            " back at the disk's speed"
        )
    if hardware.device == "cpu":
        flags = set(processor().get("flags", "").split())
        if flags and "avx512f" not in flags:
            yield "no AVX-512: products take about twice as long as they might"
        if multiplied_in(torch.bfloat16) == torch.float32:
            yield "no bfloat16 instructions: products of bfloat16 are made in float32"
        if torch.get_num_threads() < (os.cpu_count() or 1):
            yield (
                f"PyTorch uses {torch.get_num_threads()} of {os.cpu_count()} cores"
                " (OMP_NUM_THREADS)"
            )
    elif hardware.host_to_device.bandwidth < 10e9:
        yield (
            f"{hardware.host_to_device.bandwidth / 1e9:.1f} GB/s to the device: the link runs at"
            " half width or less"
        )
    if pageable and pageable < hardware.host_to_device.bandwidth / 3:
        yield (
            f"memory that is not pinned is copied at {pageable / 1e9:.1f} GB/s, a third or less of"
            " pinned memory"
        )
    numa = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(numa) > 1 and len(os.sched_getaffinity(0)) == os.cpu_count():
        yield (
            f"{len(numa)} NUMA nodes and no affinity: bind each rank to the node of its device"
            " (numactl)"
        )


def processor() -> dict[str, str]:
    """Return the kernel's facts about the last processor, by name; none where there is no
    ``/proc``."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name.strip(): fact.strip() for name, _, fact in (line.partition(":") for line in lines)}

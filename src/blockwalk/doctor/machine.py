"""Measurements of this machine: the figures of a :class:`~blockwalk.simulate.hardware.Hardware`, in
well under a minute.

Every figure is the best of several short runs: what the machine can do when nothing else is in its
way. Under torchrun the links between ranks are measured as well, by gathers of a small and a large
size: α from the one, β from the other."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockwalk.doctor import rates as probe_rates
from blockwalk.doctor import walks as probe_walk
from blockwalk.numerics.codecs.codecs import decode_rows, encode_rows
from blockwalk.numerics.codecs.layout import Layout, name_of
from blockwalk.numerics.device import chosen, is_cpu, left_on
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import perturbed
from blockwalk.numerics.row_tiles import multiplied_in
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import ByDevice
from blockwalk.simulate.hardware import BLOCK_OPS, MEASURED, Hardware, Link, kind_of
from blockwalk.system.paths import StrPath
from blockwalk.system.process_memory import COUNTED, host_memory

_MATRIX = ByDevice(cpu=768, cuda=8192)
_COPY = ByDevice(cpu=128 << 20, cuda=1 << 30)
_FILE = 192 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class Findings:
    """Figures that were measured, and warnings."""

    hardware: Hardware
    warnings: tuple[str, ...]
    cached_read: float = 0.0
    """Bytes/s at which the page cache serves a file."""
    pageable: float = 0.0
    """Bytes/s of a copy to the device from memory that is not pinned; 0 on a CPU."""
    collectives: tuple[tuple[str, str, int, float], ...] = ()
    """Timed collectives: where, which, bytes that a rank hands in, seconds."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that measuring took."""

    def lines(self) -> Iterator[str]:
        """Yield the findings as a table."""
        hw = self.hardware
        yield f"{hw.name}: {hw.device}, measured in {self.seconds:.0f} s"
        yield (
            f"  memory            {_size(hw.device_bytes)} device, {_size(hw.host_bytes)} host,"
            f" {_size(hw.disk_bytes)} disk"
        )
        products = ", ".join(
            f"{dtype} {value / 1e9:.0f} GFLOP/s" for dtype, value in hw.flops.items()
        )
        yield f"  products          {products}"
        yield f"  memory bandwidth  {hw.memory_bandwidth / 1e9:.1f} GB/s"
        if hw.device == "cpu":
            yield f"  a lane's copies   {hw.host_to_device.bandwidth / 1e9:.1f} GB/s"
        for dtype, curve in hw.products.items():
            rates = ", ".join(
                f"{size / 1e6:.0f}: {size / seconds / 1e9:.0f}" for size, seconds in curve.points
            )
            yield f"  {dtype:<17} GFLOP/s of one product by its MFLOPs: {rates}"
        for dtype, curve in hw.passes.items():
            rates = ", ".join(
                f"{size / 1e3:.0f}: {size / seconds / 1e9:.1f}" for size, seconds in curve.points
            )
            yield f"  {dtype:<17} GB/s of one pass by its kB: {rates}"
        if hw.fresh_bandwidth:
            yield f"  fresh memory      is first touched at {hw.fresh_bandwidth / 1e9:.1f} GB/s"
        if hw.start_seconds:
            starts = ", ".join(
                f"{1e6 * seconds:.1f} ({kind})" for kind, seconds in hw.start_seconds.items()
            )
            yield f"  an operation      takes so many µs to start: {starts}"
        if hw.process_bytes:
            yield f"  a process         holds so much {COUNTED};"
            yield (
                "                    measured without tokenizer and data: a run's own first lines"
                " have these"
            )
        for kind, nbytes in hw.process_bytes.items():
            more = (
                f"{hw.buffers[kind] / 1e6:.0f} more in steps, {hw.slack[kind]:.2f} × what comes and"
                " goes"
            )
            yield f"  a process         {nbytes / 1e6:.0f} MB beside its tensors ({kind}), {more}"
        yield (
            f"  noise, decoding   {hw.noise_rate / 1e6:.0f} and {hw.decode_rate / 1e6:.0f} million"
            " elements/s"
        )
        if hw.device == "cuda":
            up = hw.host_to_device.bandwidth / 1e9
            down = hw.device_to_host.bandwidth / 1e9
            yield (
                f"  host to device    {up:.1f} GB/s pinned, {self.pageable / 1e9:.1f} pageable;"
                f" back {down:.1f}"
            )
        read = hw.disk_read.bandwidth / 1e9
        write = hw.disk_write.bandwidth / 1e9
        yield (
            f"  disk              reads {read:.2f} GB/s, writes {write:.2f}; from the page cache"
            f" {self.cached_read / 1e9:.1f}"
        )
        if hw.world > 1:
            for name, link in (("inside a node", hw.intra), ("between nodes", hw.inter)):
                yield f"  {name:<17} {link.bandwidth / 1e9:.2f} GB/s, {1e6 * link.latency:.0f} µs"
        for where, which in dict.fromkeys(each[:2] for each in self.collectives):
            found = [each[2:] for each in self.collectives if each[:2] == (where, which)]
            times = ", ".join(f"{size / 1e3:.0f}: {1e3 * seconds:.2f}" for size, seconds in found)
            yield f"  {which:<17} ms {where}, by the kB that a rank hands in: {times}"
        yield from (f"  warning: {warning}" for warning in self.warnings)
        yield f"verdict: {self.verdict()}"

    def verdict(self) -> str:
        """Return the findings in one sentence: what fits, and how many things will hurt."""
        most = self.hardware.disk_bytes / (0.5 + 2 / 32)
        count = len(self.warnings)
        some = f"{count} thing{'s' * (count > 1)} will hurt: see the warnings"
        hurts = some if count else "nothing was found that will hurt"
        return f"the disk has room for 4-bit copies of up to {most / 1e9:.0f}B parameters; {hurts}"


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
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    say("products, memory, noise and decoding ...")
    began = time.perf_counter()
    device = device_of_rank()
    kind = kind_of(device.type)
    host, limited = host_memory()
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    rates: dict[str, Callable[[], Any]] = {
        "memory_bandwidth": lambda: _bandwidth(device),
        "host_to_device": lambda: _copy_rate(),
        "noise_rate": lambda: _noise(device),
        "decode_rate": lambda: _decoding(device),
    }
    found = (
        probe_rates.measure(rates)
        if kind == "cpu"
        else {name: rate() for name, rate in rates.items()}
    )
    bandwidth = found["memory_bandwidth"]
    copied = Link(found.pop("host_to_device"))
    up, down, pageable = _links(device) if kind == "cuda" else (copied, copied, 0.0)
    say("the disk ...")
    read, write, cached = _disk(Path(folder))
    collectives, intra, inter, per_node, nodes, left = _collectives(device)
    if kind == "cpu" and walk and os.environ.get("RANK", "0") == "0":
        say("small training steps, which take most of the time ...")
        walks = probe_walk.measure()
        starts = {kind: each.start_seconds for kind, each in walks.items()}
        found |= {"start_seconds": starts, **probe_walk.beside_tensors(walks)}
    hardware = Hardware(
        name=name,
        device=kind,
        device_bytes=left or host,
        host_bytes=host,
        disk_bytes=shutil.disk_usage(folder).free,
        op_seconds=_launch(device) if kind == "cuda" else 0.0,
        host_to_device=up,
        device_to_host=down,
        disk_read=read,
        disk_write=write,
        intra=intra or Link(bandwidth),
        inter=inter or intra or Link(bandwidth),
        devices_per_node=per_node,
        nodes=nodes,
        source=f"{MEASURED} blockwalk doctor",
        flops={name_of(dtype): _flops(device, dtype) for dtype in dtypes},
        **found,
    )
    busy = (
        f"{load:.1f} processes were computing on {cores} cores when this began: what is foreseen"
        " from these figures is of a"
    )
    busy += " busy machine; run doctor again when nothing else runs"
    warnings = (*([busy] if load > cores / 2 else []), *_warnings(hardware, limited, pageable))
    return Findings(hardware, warnings, cached, pageable, collectives, time.perf_counter() - began)


def device_of_rank() -> torch.device:
    """Return the device that this process measures: of several ranks on a node, each its own from
    the start."""
    if chosen().type != "cpu" and (count := torch.accelerator.device_count()) > 1:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return chosen()


def _best(work: Callable[[], object], device: torch.device, *, seconds: float = 0.1) -> float:
    """Return seconds of the fastest of several runs."""
    best = float("inf")
    began = time.perf_counter()
    runs = 0
    while runs < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work()
        if not is_cpu(device):
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
        runs = runs + 1
    return best


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    n = _MATRIX[device.type]
    dtype = multiplied_in(dtype) if is_cpu(device) else dtype
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    return 2 * n**3 / _best(lambda: a @ b.t(), device)


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(_COPY[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(lambda: target.copy_(source), device)


def _copy_rate() -> float:
    """Bytes/s of copies by one thread, as a lane of a processor makes them."""
    source = torch.ones(_COPY["cpu"], dtype=torch.uint8)
    target = torch.empty_like(source)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return source.numel() / _best(lambda: target.copy_(source), source.device)
    finally:
        torch.set_num_threads(threads)


def _launch(device: torch.device) -> float:
    x = torch.ones(16, device=device)

    def start() -> None:
        for _ in range(BLOCK_OPS):
            x.add(1.0)

    return _best(start, device)


def _noise(device: torch.device) -> float:
    """Elements/s of perturbing float32 weights a chunk at a time, from memory, as a forward
    does."""
    chunk = 1 << (20 if device.type == "cpu" else 25)
    xs = torch.zeros(16 if device.type == "cpu" else 1, chunk, dtype=torch.float32, device=device)
    out = torch.empty_like(xs[0])
    key = NoiseKey(0, 1, 0, "doctor")
    return xs.numel() / _best(lambda: [perturbed(x, out, key, 0, 1e-3) for x in xs], device)


def _decoding(device: torch.device) -> float:
    """Elements/s of decoding 4-bit weights a chunk at a time, from memory."""
    shape = (16384, 1024) if device.type == "cpu" else (8192, 8192)
    rows = 1024 if device.type == "cpu" else 8192
    layout = Layout(shape, Codec.INT4)
    buffer = encode_rows(
        torch.ones(shape), torch.empty(layout.nbytes, dtype=torch.uint8), layout, 0
    ).to(device)
    out = torch.empty((rows, shape[1]), dtype=torch.bfloat16, device=device)
    firsts = range(0, shape[0], rows)
    taken = _best(
        lambda: [decode_rows(buffer, layout, at, at + rows, out) for at in firsts], device
    )
    return shape[0] * shape[1] / taken


def _links(device: torch.device) -> tuple[Link, Link, float]:
    """Bytes/s from host to device and back with pinned memory, and to the device from pageable
    memory."""
    size = 256 << 20
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    plain = torch.ones(size, dtype=torch.uint8)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    small = 4096
    latency = _best(
        lambda: there[:small].copy_(pinned[:small], non_blocking=True), device, seconds=0.05
    )
    up = size / _best(lambda: there.copy_(pinned, non_blocking=True), device)
    down = size / _best(lambda: pinned.copy_(there, non_blocking=True), device)
    return Link(up, latency), Link(down, latency), size / _best(lambda: there.copy_(plain), device)


def _disk(folder: Path) -> tuple[Link, Link, float]:
    """Bytes/s of reads and writes past the page cache where the file system allows it, and of reads
    from the cache."""
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
    """Bytes/s of moving a whole file a part at a time, and to the disk where it is written."""
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


_Timed = tuple[tuple[str, str, int, float], ...]

GATHERED = "all-gather"
SIZES = (4096, 1 << 20, 16 << 20)
"""The collective that a link's figures are read off, and the bytes that a rank hands in."""


def _collectives(device: torch.device) -> tuple[_Timed, Link | None, Link | None, int, int, int]:
    """Return collectives by where, which and size; links inside a node and between nodes, ranks of
    a node, nodes; None where there is one rank; and the device's bytes that are left beside the
    communicators."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if world == 1:
        return (), None, None, 1, 1, left_on(device)
    import torch.distributed as dist

    started = not dist.is_initialized()
    if started:
        dist.init_process_group(dist.get_default_backend_for_device(device))
    rank = dist.get_rank()
    nodes = world // local
    groups = [dist.new_group(list(range(n * local, (n + 1) * local))) for n in range(nodes)]
    inside = _timings("inside a node", groups[rank // local], local, device) if local > 1 else ()
    columns = [dist.new_group(list(range(i, world, local))) for i in range(local)]
    # every column gathers at once, so that the node's link is shared as in a step; it is described
    # for the whole node
    across = _timings("between nodes", columns[rank % local], nodes, device) if nodes > 1 else ()
    if (
        nodes > 1
    ):  # a run's sums may have communicators beside those of gathers, whose memory is no step's
        sums = [dist.new_group(list(range(i, world, local))) for i in range(local)]
        dist.all_reduce(torch.zeros(1, device=device), group=sums[rank % local])
    dist.barrier()
    left = left_on(device)
    if started:
        dist.destroy_process_group()
    between = _link(across, nodes)
    if between is not None:
        between = Link(between.bandwidth * local, between.latency)
    return inside + across, _link(inside, local), between, local, nodes, left


def _link(timed: _Timed, ranks: int) -> Link | None:
    """Return the bandwidth (bytes/s) and latency (seconds) of one rank in a gather; None where none
    was timed."""
    seconds = {size: taken for _, which, size, taken in timed if which == GATHERED}
    if not seconds:
        return None
    small = min(seconds)
    large = max(seconds)
    return Link((ranks - 1) * large / max(seconds[large] - seconds[small], 1e-9), seconds[small])


def _timings(where: str, group: Any, ranks: int, device: torch.device) -> _Timed:
    """Return seconds of each collective that our programs use, the best of five, over one group."""
    import torch.distributed as dist

    def timed(collective: Callable[[], object]) -> float:
        runs = []
        for _ in range(5):
            dist.barrier(group=group)
            if not is_cpu(device):
                torch.accelerator.synchronize(device)
            began = time.perf_counter()
            collective()
            if not is_cpu(device):
                torch.accelerator.synchronize(device)
            runs.append(time.perf_counter() - began)
        return min(runs)

    found = []
    for size in SIZES:
        mine = torch.zeros(size, dtype=torch.uint8, device=device)
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        summed = mine.view(torch.float32).clone()
        pieces = [mine[: size // ranks].clone() for _ in range(ranks)]
        arriving = [torch.empty_like(piece) for piece in pieces]
        kinds: dict[str, Callable[[], object]] = {
            GATHERED: partial(dist.all_gather, parts, mine, group=group),
            "all-to-all": partial(dist.all_to_all, arriving, pieces, group=group),
            "all-reduce": partial(dist.all_reduce, summed, group=group),
        }
        found += [(where, which, size, timed(collective)) for which, collective in kinds.items()]
    return tuple(found)


def _warnings(hardware: Hardware, limited: bool, pageable: float) -> Iterator[str]:
    """Sentences on whatever will slow a run on this machine."""
    import psutil

    if limited:
        yield (
            f"a cgroup limits this process to {_size(hardware.host_bytes)}: pages of mapped files"
            " count against it as well"
        )
    if psutil.swap_memory().used > 64 << 20:
        yield (
            f"{_size(psutil.swap_memory().used)} of swap are in use: what is swapped out comes back"
            " at the disk's speed"
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


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"

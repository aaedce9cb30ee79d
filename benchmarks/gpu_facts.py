"""Facts of one accelerator, each measured by itself in a few seconds: copies, launches, the host's
steps, noise, decoding, products with encoded matrices, the norm, the loss, and the shared memory of
our kernels. The part ``facts`` of ``gpu.py``.

Kernels are timed by the device's own events, at sizes that fill a card. A row tells which share it
reached of what the card reaches in a copy (bytes read and written), or in a product of bfloat16.

The planner reads them from ``gpu-facts-CARD.json``, in whose folder ``hardware.yaml`` lies: a file
with the figures that are there, written anew after each row."""

from __future__ import annotations

import functools
import resource
import shutil
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks import zo_runs
from benchmarks.common import Bound

from blockwalk.doctor.events import event_seconds
from blockwalk.doctor.host import LAYERS, host_seconds
from blockwalk.doctor.links import wall_seconds
from blockwalk.numerics.codecs.codecs import decode_rows, encode_rows
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import DenseWeight
from blockwalk.numerics.device import host_buffers, is_cpu
from blockwalk.numerics.losses.cross_entropy import chunked_cross_entropy
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import perturbed
from blockwalk.numerics.updates import square_sums
from blockwalk.plan.placement import Codec

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

CODECS = (Codec.INT4A, Codec.NF4)
"""The codecs whose products are measured."""
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Rows of the products' inputs."""
KEY = NoiseKey(1, 2, 0, "w")


def facts(bench: Bench) -> list[Bound]:
    """Measure all of them, in the order of what a planner needs most."""
    card = Card(bench)
    card.row("environment", lambda row: row.update(environment(bench.device)))
    card.row(
        "copies", lambda row: row.update(copies(bench.device, 1 << 20 if bench.tiny else 1 << 28))
    )
    card.row("launches", lambda row: row.update(launches(bench.device)))
    card.row("host", lambda row: row.update(host(bench.device, 2 if bench.tiny else LAYERS)))
    side = 64 if bench.tiny else 8192
    card.row("limits", lambda row: row.update(limits(bench.device, side)))
    elements = 1 << 16 if bench.tiny else 1 << 28
    card.kernel("noise", lambda: noise(bench.device, elements))
    for codec in (*CODECS, Codec.INT8, Codec.FP8):
        card.kernel(f"decode {codec}", partial(decoding, bench.device, codec, side))
    for codec in CODECS:
        for rows in ROWS[:2] if bench.tiny else ROWS:
            measure = partial(product, bench.device, codec, side, rows)
            card.kernel(f"product of {rows} rows, {codec}", measure)
    card.kernel("norm", lambda: norm(bench.device, elements))
    sizes = (64, 32, 512) if bench.tiny else (8192, 3584, 152064)
    card.kernel("loss", lambda: loss(bench.device, *sizes))
    card.row("shared memory", lambda row: row.update(shared_memory(bench.device)))
    shared = bench.rows.get("shared memory", {})
    return [
        Bound(
            f"{name}: bytes of shared memory",
            size,
            shared["limit"],
            rests="the device's, for one program",
        )
        for name, size in shared.get("of", {}).items()
    ]


class Card:
    """The rows of a part and, beside them, the file that a planner reads."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.path = bench.facts_path

    def row(self, name: str, measure: Callable[[dict[str, Any]], None]) -> None:
        from benchmarks.gpu import write

        self._bench.row(name, measure)
        write(self.path, planned(self._bench.rows))

    def kernel(self, name: str, measure: Callable[[], dict[str, float]]) -> None:
        """A row of a kernel's rates, with the shares of the card's limits that they are."""

        def with_shares(row: dict[str, Any]) -> None:
            rates = measure()
            row.update(rates | shares(rates, self._bench.rows.get("limits", {})))

        self.row(name, with_shares)


def planned(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Collect the figures for a planner, of the rows that are there: bytes a second (copies in both
    directions at once: together), microseconds, elements a second, and the most rows of a product
    in which decoding inside is no slower."""
    out: dict[str, Any] = {}
    for name in ("environment", "copies", "launches", "host", "limits", "noise", "norm", "loss"):
        out |= {key: rows[name][key] for key in FIGURES if key in rows.get(name, {})}
    codecs = [codec for codec in Codec if "per_s" in rows.get(f"decode {codec}", {})]
    out["decode_rate"] = {str(codec): rows[f"decode {codec}"]["per_s"] for codec in codecs}
    crossings = {str(codec): crossing(rows, codec) for codec in CODECS}
    out["fused_crossing_rows"] = {
        codec: most for codec, most in crossings.items() if most is not None
    }
    return out


FIGURES = ("name", "memory_bytes", "capability", "copy_up", "copy_down", "copy_both", "launch_us",
           "operator_us", "host_start_us", "host_turn_us", "copy_on_device", "product_flops",
           "noise_per_s", "norm_bytes_per_s", "loss_s")  # fmt: skip


def crossing(rows: dict[str, dict[str, Any]], codec: Codec) -> int | None:
    """Find the most rows up to which decoding inside the product was never slower than before it; 0
    where it was at the fewest, None before anything was measured."""
    most = None
    for number in ROWS:
        row = rows.get(f"product of {number} rows, {codec}", {})
        if "inside_s" not in row:
            continue
        if row["inside_s"] > row["before_s"]:
            return most or 0
        most = number
    return most


def timed(
    work: Callable[[], Any], device: torch.device, *, calls: int = 5, rounds: int = 4
) -> float:
    """Time one call by the device's own events, where they tell the time: the median of some rounds
    of some calls, after one round that does not count."""

    def several() -> None:
        for _ in range(calls):
            work()

    seconds = []
    for _ in range(rounds + 1):
        zo_runs.wait(device)
        by_events = event_seconds(several, device)
        seconds.append(wall_seconds(several, device) if by_events is None else by_events)
    return statistics.median(seconds[1:]) / calls


def started(work: Callable[[], Any], device: torch.device, *, calls: int) -> float:
    """Time one call by the host's clock, for work that is next to nothing: its start."""

    def several() -> None:
        for _ in range(calls):
            work()

    return statistics.median([wall_seconds(several, device) for _ in range(5)][1:]) / calls


def environment(device: torch.device) -> dict[str, Any]:
    """Describe the card, and versions and limits that a run on it depends on."""
    module = None if is_cpu(device) else torch.get_device_module(device)
    properties_of = getattr(module, "get_device_properties", None)
    card = None if properties_of is None else properties_of(device)
    major = getattr(card, "major", None)
    minor = getattr(card, "minor", None)
    name_of = getattr(module, "get_device_name", None)
    return {
        "name": str(device.type if name_of is None else name_of(device)),
        "memory_bytes": int(getattr(card, "total_memory", 0)),
        "capability": "" if major is None else f"{major}.{minor}",
        "torch": torch.__version__,
        "triton": installed("triton"),
        "bitsandbytes": installed("bitsandbytes"),
        "driver and link": driver(),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shared_memory_of_processes": shutil.disk_usage("/dev/shm").total
        if Path("/dev/shm").exists()
        else 0,
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """Ask nvidia-smi for the driver's version, and the generation and width of the card's PCIe link
    now and at most."""
    fields = [
        "driver_version",
        "pcie.link.gen.current",
        "pcie.link.gen.max",
        "pcie.link.width.current",
        "pcie.link.width.max",
    ]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not tell: {error}"


def copies(device: torch.device, nbytes: int) -> dict[str, float]:
    """Time copies, in bytes a second, of memory that is registered with the driver: up, down, and
    both at once."""
    up_P, down_P = host_buffers([nbytes, nbytes], device)
    received_P, sent_P = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    streams = [] if is_cpu(device) else [torch.Stream(device=device) for _ in range(2)]

    def up() -> None:
        received_P.copy_(up_P, non_blocking=True)

    def down() -> None:
        down_P.copy_(sent_P, non_blocking=True)

    def both() -> None:
        for stream, copy in zip(streams, (up, down), strict=False):
            with stream:
                copy()
        if not streams:
            up()
            down()

    rates = {f"copy_{work.__name__}": nbytes / timed(work, device) for work in (up, down)}
    # two streams are no queue that an event could stand in
    seconds = statistics.median([wall_seconds(both, device) for _ in range(6)][1:])
    return {**rates, "copy_both": 2 * nbytes / seconds}


def launches(device: torch.device) -> dict[str, float]:
    """Time launches, in microseconds, of one of our kernels, and one of torch's, on data that take
    no time."""
    x = torch.zeros(64, device=device)
    operator = started(lambda: x.add_(1.0), device, calls=500)
    ours = started(lambda: perturbed(x, x, KEY, 0, 1e-3), device, calls=200)
    return {"launch_us": ours * 1e6, "operator_us": operator * 1e6}


def host(device: torch.device, layers: int) -> dict[str, float]:
    """Time the host, in microseconds, for an operation that it starts in a walk, and for a turn."""
    start, turn = host_seconds(device, layers)
    return {"host_start_us": start * 1e6, "host_turn_us": turn * 1e6}


def limits(device: torch.device, side: int) -> dict[str, float]:
    """Find what the card reaches in a copy on itself (bytes read and written a second), and in a
    product of bfloat16 on random data (FLOP/s)."""
    source = torch.zeros(4 * side * side, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = timed(lambda: target.copy_(source), device)
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    multiplied = timed(lambda: torch.mm(a, b, out=out), device)
    return {
        "copy_on_device": 2 * source.nbytes / copied,
        "product_flops": 2 * side**3 / multiplied,
    }


def shares(row: dict[str, Any], reached: dict[str, Any]) -> dict[str, float]:
    """Tell which share of the card's limits a row's rates are; nothing before these are known."""
    if not reached:
        return {}
    shares_of = {
        "share_of_copy": row.get("bytes_per_s", 0.0) / reached["copy_on_device"],
        "share_of_product": row.get("flops_per_s", 0.0) / reached["product_flops"],
    }
    return {name: share for name, share in shares_of.items() if share}


def noise(device: torch.device, elements: int) -> dict[str, float]:
    x = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    seconds = timed(lambda: perturbed(x, x, KEY, 0, 1e-3), device)
    return {"noise_per_s": elements / seconds, "bytes_per_s": 2 * x.nbytes / seconds}


@functools.cache
def encoded(device: torch.device, codec: Codec, side: int) -> tuple[Layout, torch.Tensor]:
    layout = Layout((side, side), codec)
    values = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    return layout, encode_rows(values, torch.empty(layout.nbytes, dtype=torch.uint8), layout, 0).to(
        device
    )


def decoding(device: torch.device, codec: Codec, side: int) -> dict[str, float]:
    layout, bytes_P = encoded(device, codec, side)
    out = torch.empty(side, side, dtype=torch.bfloat16, device=device)
    seconds = timed(lambda: decode_rows(bytes_P, layout, 0, side, out), device)
    moved = out.nbytes + bytes_P.nbytes
    return {"per_s": side * side / seconds, "bytes_per_s": moved / seconds}


def product(device: torch.device, codec: Codec, side: int, rows: int) -> dict[str, float]:
    """Time a product, in seconds, whose matrix is decoded inside it, and before it."""
    layout, bytes_P = encoded(device, codec, side)
    matrix = torch.empty(side, side, dtype=torch.bfloat16, device=device)
    x = torch.randn(rows, side).to(device, torch.bfloat16)
    out = torch.empty_like(x)
    arguments = (x, bytes_P, None, str(codec), (side, side), layout.group_size, True)

    def before() -> None:
        torch.mm(x, decode_rows(bytes_P, layout, 0, side, matrix).t(), out=out)

    inside = timed(lambda: torch.ops.blockwalk.product_(out, *arguments), device)
    return {
        "inside_s": inside,
        "before_s": timed(before, device),
        "bytes_per_s": (bytes_P.nbytes + x.nbytes + out.nbytes) / inside,
        "flops_per_s": 2 * rows * side * side / inside,
    }


def norm(device: torch.device, elements: int) -> dict[str, float]:
    gradient = torch.ones(elements, device=device)
    rate = gradient.nbytes / timed(lambda: square_sums(gradient), device)
    return {"norm_bytes_per_s": rate, "bytes_per_s": rate}


def loss(device: torch.device, tokens: int, hidden: int, vocab: int) -> dict[str, float]:
    """Time the loss and its gradient, in seconds, the head frozen, in bfloat16."""
    hidden_ND = torch.randn(tokens, hidden).to(device, torch.bfloat16)
    head = DenseWeight(torch.full((vocab, hidden), 0.01, dtype=torch.bfloat16, device=device))
    labels_N = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    work = lambda: chunked_cross_entropy(hidden_ND, labels_N, head, grad_scale=1.0)  # noqa: E731
    seconds = timed(work, device, calls=1)
    flops = 4 * tokens * hidden * vocab  # logits, and the gradient of the hidden states
    return {"loss_s": seconds, "loss_tokens": tokens, "flops_per_s": flops / seconds}


def shared_memory(device: torch.device) -> dict[str, Any]:
    """Find the bytes of shared memory of each kernel that ran here, of its largest variant, and the
    device's limit."""
    if is_cpu(device) or installed("triton") == "not installed":
        return {}
    from triton.runtime.jit import JITFunction

    from blockwalk.numerics import kernels

    rooms = kernels.loaded()
    sizes: dict[str, int] = {}
    for room in (rooms.codecs, rooms.noise, rooms.products, rooms.updates):
        for name, function in vars(room).items():
            caches = (
                getattr(function, "device_caches", {}) if isinstance(function, JITFunction) else {}
            )
            for cache in caches.values():
                compiled = [kernel for kernel in cache[0].values() if hasattr(kernel, "metadata")]
                sizes[name] = max(
                    [kernel.metadata.shared for kernel in compiled], default=sizes.get(name, 0)
                )
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    properties = properties_of(device) if properties_of is not None else None
    limit = getattr(properties, "shared_memory_per_block_optin", 0)
    return (
        {"of": {name: size for name, size in sizes.items() if size}, "limit": limit}
        if limit
        else {}
    )

"""The capabilities of a machine, or of a cluster of them: a value, read from YAML and written to
it. Bytes, seconds, FLOP/s.

``blockwalk doctor`` measures one; descriptions of known ones ship in `machines`. Nothing
here imports torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from blockwalk.plan.parsing import NoAliases, did_you_mean, hints_of, parse_bytes
from blockwalk.plan.table import LOOSE
from blockwalk.program.settling import PINNED
from blockwalk.system import card as cards
from blockwalk.system.atomic_files import read_yaml, reading
from blockwalk.system.card import Card, Facts, is_called

SHIPPED = Path(__file__).with_name("machines")

HERE = Path("hardware.yaml")
"""The file that ``blockwalk doctor`` writes unless it is told otherwise, and ``method: auto`` and
``--hardware here`` read."""


MEASURED = "measured by"
"""The beginning of the source of figures that were measured."""

SIMULATED = "(simulated)"
"""The mark of a figure that a simulation made of a machine that nobody measured."""

USABLE = 0.92
"""The share of an accelerator's memory that a plan may count on. The rest is the driver's context
(some 0.5 GB), loaded kernels, fragments, and what the forecast is wrong by."""

BLOCK_OPS = 60
"""PyTorch operations that a block's forward starts, about: an op's launches cost so many times one
launch."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes: ``latency`` seconds before the first (α), then ``bandwidth`` bytes a second
    (1/β)."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return seconds of one transfer; 0 for no bytes."""
        return self.latency + nbytes / self.bandwidth if nbytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of node, and how many there are.

    Raises:
        ValueError: a figure that is not positive.
    """

    name: str
    device: str = "cuda"
    """cuda or cpu. On a CPU, device and host memory are one."""
    device_bytes: int = 0
    """Bytes of memory of one device that a step may use."""
    host_bytes: int = 0
    """Bytes of host memory of a whole node."""
    disk_bytes: int = 0
    flops: Mapping[str, float] = field(default_factory=dict)
    """Matrix throughput of one device that is reached in practice, by dtype, FLOP/s."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s that the maker promises, by dtype: MFU is a fraction of them; ``flops`` where they are
    not given."""
    memory_bandwidth: float = 1e12
    """Bytes/s of the device's own memory."""
    op_seconds: float = 0.0
    """Seconds to start an op's work: :data:`BLOCK_OPS` launches, Python. Of an accelerator whose
    host is described, ``host_start_seconds`` and ``host_turn_seconds`` stand in its place."""
    host_start_seconds: float = 0.0
    """Seconds of the host to start one operation on an accelerator; 0 on a processor."""
    host_turn_seconds: float = 0.0
    """Seconds of the host for a turn, or an update, of a unit on an accelerator, beside those of
    the operations that it starts; 0 on a processor."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s of fused attention, by dtype; else ``flops``."""
    process_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a process holds beside its tensors when a model is open, by kind of walk:
    interpreter and libraries; without it tensors alone are foreseen."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """Bytes that its steps add whatever the model, by kind of walk: buffers, compiled products,
    heap that is always kept."""
    slack: Mapping[str, float] = field(default_factory=dict)
    """Freed memory that the allocator keeps, by kind of walk: as a multiple of what comes and goes
    in a step."""
    noise_rate: float = 5e10
    """Elements of a perturbation drawn and added per second, by one device. For the GPUs that ship
    it is reckoned, not measured: 64 to 69 instructions an element, counted in what ptxas makes of
    the kernel for sm_80 and sm_90, at 128 a clock of each multiprocessor ("CUDA C++ Programming
    Guide", arithmetic instructions), three quarters of it; or the memory's bandwidth."""
    decode_rate: float = 1e11
    """Elements of a 4- or 8-bit weight decoded per second, by one device. For the GPUs that ship it
    is reckoned, not measured: some 50 instructions an element, counted in what ptxas makes of the
    kernel for sm_86 to sm_90, at the rate of ``noise_rate``'s; or the memory's bandwidth at 2.6
    bytes an element of four bits."""
    decode_rates: Mapping[str, float] = field(default_factory=dict)
    """Elements decoded per second by codec, where that was measured; else ``decode_rate``."""
    host_to_device: Link = Link(25e9, 1e-5)
    device_to_host: Link = Link(25e9, 1e-5)
    disk_read: Link = Link(3e9, 1e-4)
    disk_write: Link = Link(1e9, 1e-4)
    links: Mapping[str, Link] = field(default_factory=dict)
    """Links of further tiers to host memory: ``NAME_read`` and ``NAME_write``, where the tier's row
    has the name; else the disk's."""
    intra: Link = Link(300e9, 1e-5)
    """The link between the devices of one node, as one rank can send over it."""
    inter: Link = Link(12.5e9, 2e-5)
    """The link of a whole node to the others, which its ranks share."""
    devices_per_node: int = 1
    nodes: int = 1
    card: str = ""
    """The words of torch's name of such a device; empty for a description that stands for no make
    of card."""
    source: str = ""
    """The origin of the figures."""

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ValueError(
                f"hardware {self.name!r}: device is {self.device!r}; it must be cuda or cpu"
            )
        for key in ("device_bytes", "memory_bandwidth", "devices_per_node", "nodes"):
            if getattr(self, key) <= 0:
                raise ValueError(
                    f"hardware {self.name!r}: {key} is {getattr(self, key)}; it must be above 0"
                )
        for key in ("host_start_seconds", "host_turn_seconds"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(
                    f"hardware {self.name!r}: {key} is {getattr(self, key)}; it must be a finite"
                    " number of at least 0"
                )
        if not self.flops or any(value <= 0 for value in self.flops.values()):
            raise ValueError(
                f"hardware {self.name!r}: flops is {dict(self.flops)}; it needs a positive figure"
                " for a dtype"
            )

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.devices_per_node * self.nodes

    def without_host(self) -> Hardware:
        """Return the machine with a host that takes no time."""
        return dataclasses.replace(self, host_start_seconds=0.0, host_turn_seconds=0.0)

    @property
    def idle_seconds(self) -> float:
        """Seconds in which a device does nothing before an op's work, where the host is not
        described by itself."""
        is_described = self.host_start_seconds or self.host_turn_seconds
        return 0.0 if is_described else self.op_seconds

    @property
    def measured(self) -> bool:
        """True where the figures were measured on the machine that is described."""
        return self.source.startswith(MEASURED)

    @property
    def usable_bytes(self) -> int:
        """Device bytes that a plan may count on: all of a processor's, :data:`USABLE` of an
        accelerator's."""
        return self.device_bytes if self.device == "cpu" else int(USABLE * self.device_bytes)

    @property
    def host_room(self) -> int:
        """Host bytes that a plan may count on: all beside a processor, :data:`PINNED` beside an
        accelerator, whose copies come from pinned memory."""
        return self.host_bytes if self.device == "cpu" else int(PINNED * self.host_bytes)

    def reads(self, link: str) -> Link:
        """Return the way from a link's far end to host memory."""
        return self.links.get(f"{link}_read", self.disk_read)

    def writes(self, link: str) -> Link:
        """Return the way from host memory to a link's far end."""
        return self.links.get(f"{link}_write", self.disk_write)

    def decodes(self, codec: str) -> float:
        """Return elements of a codec that one device decodes per second."""
        return self.decode_rates.get(codec) or self.decode_rate

    def flops_of(self, dtype: str) -> float:
        """Return reached FLOP/s in a dtype; one that was not measured runs as fast as float32."""
        return self.flops.get(dtype) or self.flops.get("float32") or min(self.flops.values())

    def peak_of(self, dtype: str) -> float:
        """Return the promised FLOP/s in a dtype, or what is reached."""
        return self.peak_flops.get(dtype) or self.flops_of(dtype)


_READERS: dict[Any, Callable[[Any], Any]] = {
    str: str,
    int: parse_bytes,
    float: float,
    Link: lambda link: Link(float(link["bandwidth"]), float(link.get("latency", 0.0))),
}
"""Readers of figures by the type of their field; a field that maps names to figures takes that of
the figures."""


def names() -> list[str]:
    """Return the machines that ship."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load(name_or_path: str | Path) -> Hardware:
    """Return a shipped machine by its name; ``here``, what :data:`HERE` says of this one, and the
    file of figures of a card beside it; or a description in a file: doctor's, or a card's figures
    as ``benchmarks/gpu.sh`` writes them.

    Raises:
        ValueError: an unknown name or key, or a figure out of range.
    """
    if name_or_path == "here" and not HERE.is_file():
        raise ValueError(
            f"hardware: here is {HERE} in this folder, which is not there; write it with"
            " blockwalk doctor"
        )
    shipped = SHIPPED / f"{name_or_path}.yaml"
    path = HERE if name_or_path == "here" else shipped if shipped.is_file() else Path(name_or_path)
    if not path.is_file():
        matches = difflib.get_close_matches(str(name_or_path).lower(), names(), n=1, cutoff=LOOSE)
        similar = matches[0] if matches else "the most similar of these"
        raise ValueError(
            f"unknown hardware {str(name_or_path)!r}: for another card take {similar} with its"
            f" memory, --hardware {matches[0] if matches else 'NAME'} --budget SIZE; a file, or one"
            f" of {', '.join(names())}"
        )
    if path.suffix == ".json":
        return with_facts(described_as(cards.read(path).name), cards.read(path))
    raw = read_yaml(path, NoAliases)
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds no mapping of figures")
    with reading(path):
        machine = _from_mapping(path, raw)
    if name_or_path != "here" or machine.device != "cuda":
        return machine
    facts_files = sorted(path.parent.glob(cards.PATTERN))
    return with_facts(machine, cards.read(facts_files[0])) if len(facts_files) == 1 else machine


def described_as(name: str) -> Hardware:
    """Return the shipped description of one card by torch's name of it; of one that none describes
    the RTX 4090's."""
    described = (machine for machine in map(load, names()) if is_called(name, machine.card))
    machine = next(described, None) or load("rtx-4090")
    return dataclasses.replace(machine, devices_per_node=1, nodes=1)


def with_facts(machine: Hardware, facts: Facts) -> Hardware:
    """Return a machine with a card's measured figures in place of its own. A figure that was not
    measured stays."""
    links = {"host_to_device": facts.copy_up, "device_to_host": facts.copy_down}
    changes: dict[str, Any] = {
        name: dataclasses.replace(getattr(machine, name), bandwidth=rate)
        for name, rate in links.items()
        if rate
    }
    figures = {
        "device_bytes": facts.memory_bytes,
        "noise_rate": facts.noise_per_s,
        "op_seconds": BLOCK_OPS * facts.operator_us * 1e-6,
        "decode_rates": facts.decode_rate,
        "host_start_seconds": facts.host_start_us * 1e-6,
        "host_turn_seconds": facts.host_turn_us * 1e-6,
    }
    changes |= {name: figure for name, figure in figures.items() if figure}
    if machine.measured:  # doctor's memory is what others leave of the card's
        changes.pop("device_bytes", None)
    source = f"{MEASURED} benchmarks/gpu.sh; the rest: {machine.source}"
    return dataclasses.replace(machine, name=facts.name, source=source, **changes)


def _from_mapping(path: Path, raw: dict[Any, Any]) -> Hardware:
    """Return a machine from a file's keys and figures."""
    hints = hints_of(Hardware)
    values: dict[str, Any] = {"name": path.stem}
    for key, value in raw.items():
        if key not in hints:
            raise ValueError(
                f"{path}: unknown key {key!r}{did_you_mean(str(key), list(hints), LOOSE)}; where"
                " an earlier version wrote the file, run blockwalk doctor again"
            )
        if hints[key] in _READERS:
            values[key] = _READERS[hints[key]](value)
        elif not isinstance(value, dict):
            raise ValueError(
                f"{path}: {key} is {value}; it must be a mapping by name (blockwalk doctor writes"
                " such a file)"
            )
        else:
            reader = _READERS[get_args(hints[key])[1]]
            values[key] = {str(name): reader(figure) for name, figure in value.items()}
    return Hardware(**values)


UNMEASURED = "this machine, not measured"
"""The name of a machine that doctor has not described."""


def kind_of(device: str) -> str:
    """Return the kind of a device in a description, by torch's name of its type: ``cpu``, or
    ``cuda`` for an accelerator of any make."""
    return "cpu" if device == "cpu" else "cuda"


def of_this_machine(device: str = "cpu", card: Card | None = None) -> Hardware:
    """Return the machine as doctor described it here, with the figures of its card where
    ``benchmarks/gpu.sh`` left them beside. Before either has run, it is the memory that there is,
    with rates that only rank plans by their work.

    Args:
        device: torch's name of the type that blocks compute on: ``cpu``, ``cuda``, ``xpu`` or
            another.
        card: the facts that the driver tells of the accelerator; its memory and rates are else
            those of an RTX 4090.
    """
    device = kind_of(device)
    card = card or Card()
    facts = cards.facts_of(card.name, HERE.parent) if device == "cuda" else None
    machine = load(HERE) if HERE.is_file() else None
    if machine is None or machine.device != device:
        machine = _unmeasured(device, card)
    return machine if facts is None else with_facts(machine, facts)


def _unmeasured(device: str, card: Card) -> Hardware:
    """Return this machine before doctor has described it."""
    import shutil

    import psutil

    host_bytes = int(psutil.virtual_memory().total)
    disk_bytes = shutil.disk_usage(".").free
    rough = load("laptop") if device == "cpu" else described_as(card.name)
    device_bytes = host_bytes if device == "cpu" else card.memory_bytes or rough.device_bytes
    if _PAIRS & _processor_flags():
        buffers = {**rough.buffers, _IN_16_BITS: _BUFFERS_OF_PAIRS}
        slack = {**rough.slack, _IN_16_BITS: _SLACK_OF_PAIRS}
        rough = dataclasses.replace(rough, buffers=buffers, slack=slack)
    return dataclasses.replace(
        rough,
        name=UNMEASURED,
        device=device,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


_CORE_FLOPS = {"": (1.5e10, 1.1e11), "avx512_bf16": (4e10, 4e11), "amx_bf16": (4e10, 1.5e12)}
"""Least and most FLOP/s of products that one core of a processor reaches, by the flag of the kernel
that the last of them with such units has: ``laptop.yaml``'s as it throttles, and what cores reached
here (``dev/LOG.md``, row 87: 220 GFLOP/s beside other work)."""

_IN_16_BITS = "streamed, 16 bits"
_PAIRS = {"avx512_bf16", "amx_bf16"}
"""Flags of processors that add up pairs of bfloat16 numbers: others make their products of float32
copies, which leave more free heap."""
_BUFFERS_OF_PAIRS = 24 * 10**6
_SLACK_OF_PAIRS = 1.0
"""The buffers in bytes, and the free heap, of a streamed walk in 16 bits on such a processor: 28
and 13 MB, 0.82 and 1.41, by doctor on an EPYC with AVX-512, 27 November, with our own kernels."""

_ACCELERATOR_SHARE = (0.2, 1.0)
"""The least and the most of a described card's rates that one of its kind reaches in a step."""


def extremes(machine: Hardware) -> tuple[Hardware, Hardware]:
    """Return the slowest and the fastest machine that one may be which was not measured."""
    shares = _ACCELERATOR_SHARE
    if machine.device == "cpu":
        flags = _processor_flags()
        rates = next(rates for flag, rates in reversed(_CORE_FLOPS.items()) if flag in flags)
        # a processor without units for bfloat16 computes it in float32
        described = machine.flops_of("float32")
        machine = dataclasses.replace(machine, flops=dict.fromkeys(machine.flops, described))
        shares = (_threads() * rates[0] / described, _threads() * rates[1] / described)
    return _scaled(machine, shares[0]), _scaled(machine, shares[1])


def _scaled(machine: Hardware, share: float) -> Hardware:
    """Return a machine whose device computes at a share of its rates."""
    return dataclasses.replace(
        machine,
        flops={dtype: rate * share for dtype, rate in machine.flops.items()},
        noise_rate=machine.noise_rate * share,
        decode_rate=machine.decode_rate * share,
    )


def _threads() -> int:
    """Return the threads that products are computed by."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0:
        return int(threads)
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _processor_flags() -> frozenset[str]:
    """Return the kernel's flags of this processor, and the empty one; that alone where there is no
    ``/proc``."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(("", *flags.partition(":")[2].split()))


def save(hardware: Hardware, path: str | Path) -> None:
    """Write a description that :func:`load` reads back to an equal value."""
    value = dataclasses.asdict(hardware)
    Path(path).write_text(
        yaml.safe_dump(value, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )

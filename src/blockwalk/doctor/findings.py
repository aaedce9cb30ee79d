"""The findings of ``blockwalk doctor``: figures of a machine, warnings, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from blockwalk.simulate.hardware import Hardware
from blockwalk.system.process_memory import COUNTED


class TimedCollective(NamedTuple):
    """A collective that was timed."""

    place: str
    """Words for the ranks: inside a node, or between nodes."""
    name: str
    nbytes: int
    """Bytes that a rank hands in."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Findings:
    """Figures that were measured, and warnings."""

    hardware: Hardware
    warnings: tuple[str, ...]
    cached_read: float = 0.0
    """Bytes/s at which the page cache serves a file."""
    pageable: float = 0.0
    """Bytes/s of a copy to the device from memory that is not pinned; 0 on a CPU."""
    collectives: tuple[TimedCollective, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    """Seconds that measuring took."""

    def lines(self) -> Iterator[str]:
        """Yield the findings as a table."""
        hw = self.hardware
        yield f"{hw.name}: {hw.device}, measured in {self.seconds:.0f} s"
        yield (
            f"  memory            {gigabytes(hw.device_bytes)} device,"
            f" {gigabytes(hw.host_bytes)} host, {gigabytes(hw.disk_bytes)} disk"
        )
        products = ", ".join(
            f"{dtype} {value / 1e9:.0f} GFLOP/s" for dtype, value in hw.flops.items()
        )
        yield f"  products          {products}"
        yield f"  memory bandwidth  {hw.memory_bandwidth / 1e9:.1f} GB/s"
        if hw.device == "cpu":
            yield f"  a lane's copies   {hw.host_to_device.bandwidth / 1e9:.1f} GB/s"
        yield f"  a block's op      takes {1e6 * hw.op_seconds:.0f} µs to start"
        if hw.host_turn_seconds or hw.host_start_seconds:
            yield (
                f"  the host          takes {1e6 * hw.host_turn_seconds:.0f} µs a turn, and"
                f" {1e6 * hw.host_start_seconds:.0f} an operation that it starts"
            )
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
        yield (
            f"  disk              reads {hw.disk_read.bandwidth / 1e9:.2f} GB/s, writes"
            f" {hw.disk_write.bandwidth / 1e9:.2f}; from the page cache"
            f" {self.cached_read / 1e9:.1f}"
        )
        if hw.world > 1:
            for name, link in (("inside a node", hw.intra), ("between nodes", hw.inter)):
                yield f"  {name:<17} {link.bandwidth / 1e9:.2f} GB/s, {1e6 * link.latency:.0f} µs"
        for place, name in dict.fromkeys((run.place, run.name) for run in self.collectives):
            runs = [run for run in self.collectives if (run.place, run.name) == (place, name)]
            times = ", ".join(f"{run.nbytes / 1e3:.0f}: {1e3 * run.seconds:.2f}" for run in runs)
            yield f"  {name:<17} ms {place}, by the kB that a rank hands in: {times}"
        yield from (f"  warning: {warning}" for warning in self.warnings)
        yield f"verdict: {self.verdict()}"

    def verdict(self) -> str:
        """Return the findings in one sentence: what fits, and how many things will hurt."""
        parameters = self.hardware.disk_bytes / (0.5 + 2 / 32)
        count = len(self.warnings)
        hurts = "nothing was found that will hurt"
        if count:
            hurts = f"{count} thing{'s' * (count > 1)} will hurt: see the warnings"
        room = f"the disk has room for 4-bit copies of up to {parameters / 1e9:.0f}B parameters"
        return f"{room}; {hurts}"


def gigabytes(nbytes: float) -> str:
    """Return bytes in GB."""
    return f"{nbytes / 1e9:.1f} GB"

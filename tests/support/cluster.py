"""Nodes for tests: network namespaces joined by a bridge, one link each, its bytes counted by the
kernel. Not a test.

What ranks of one node send each other stays in their namespace; only what leaves the node crosses
its link."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.processes import run_ranks


@dataclass(frozen=True)
class Cluster:
    """``nodes`` namespaces with ``ranks_per_node`` ranks each."""

    prefix: str
    nodes: int
    ranks_per_node: int

    def run(
        self, work: Callable[..., Any], *args: Any, timeout: float = 120, may_die: bool = False
    ) -> list[Any]:
        """``work(rank, *args)`` on every rank: the answers by rank, or exit codes of those that may
        die."""
        names = [
            f"{self.prefix}{node}" for node in range(self.nodes) for _ in range(self.ranks_per_node)
        ]
        environment = {"namespaces": names, "master": "10.78.0.1"}
        return run_ranks(len(names), work, *args, timeout=timeout, may_die=may_die, **environment)

    def limit(self, rate: str | None) -> None:
        """Limit what every node sends, such as ``"200mbit"``; None lifts the limit."""
        for node in range(self.nodes):
            inside = ("ip", "netns", "exec", f"{self.prefix}{node}", "tc", "qdisc")
            subprocess.run(
                [*inside, "del", "dev", "eth0", "root"], capture_output=True, check=False
            )
            if rate is not None:
                shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                subprocess.run([*inside, "add", "dev", "eth0", "root", *shape], check=True)


def sent_bytes() -> int:
    """Bytes that the calling rank's node has sent over its link so far, headers included; read
    inside the node."""
    return _sent()[0]


def sent_payload(device: str = "eth0") -> int:
    """:func:`sent_bytes`, or those of another network device, less 66 bytes a packet (Ethernet 14,
    IPv4 20, TCP with timestamps 32). A busy machine sends the same payload in up to forty times as
    many packets, 5 % of it in headers; an idle one in packets of 64 KB, 0.1 %."""
    nbytes, packets = _sent(device)
    return nbytes - 66 * packets


def payload_of(work: Callable[[], object]) -> int:
    """Payload that the calling rank's node sends over its link while every rank does ``work``: the
    least of three rounds, since a busy machine's kernel sends some of it again (64 KB of 4 MB once
    in 48, under a load of ten)."""
    rounds = []
    for _ in range(3):
        dist.barrier()
        start = sent_payload()
        dist.barrier()
        work()
        dist.barrier()
        rounds.append(sent_payload() - start)
    return min(rounds)


def whole_step(walker: Any, batch: Any) -> Any:
    """A step with all that it sends: a walker goes on refreshing slices when it has ended."""
    result = walker.step(batch)
    walker.flush()
    return result


def _sent(device: str = "eth0") -> tuple[int, int]:
    """Bytes and packets, by the kernel's counters of the link."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == device:
            return int(figures.split()[8]), int(figures.split()[9])
    raise AssertionError(f"no {device}: this is no node of a cluster")


@contextmanager
def cluster(nodes: int, ranks_per_node: int) -> Iterator[Cluster]:
    """Namespaces for the time of a test; skips it where they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    machines = Cluster(f"bw{os.getpid() % 10000}n", nodes, ranks_per_node)
    bridge = f"bw{os.getpid() % 10000}br"
    try:
        try:
            _ip(f"link add {bridge} type bridge")
            _ip(f"link set {bridge} up")
            for node in range(nodes):
                name = f"{machines.prefix}{node}"
                _ip(f"netns add {name}")
                _ip(f"link add {name}v type veth peer name eth0 netns {name}")
                _ip(f"link set {name}v master {bridge} up")
                _ip(f"-n {name} link set lo up")
                _ip(f"-n {name} addr add 10.78.0.{node + 1}/24 dev eth0")
                _ip(f"-n {name} link set eth0 up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield machines
    finally:
        for node in range(nodes):
            _ip(f"netns del {machines.prefix}{node}", check=False)
            _ip(f"link del {machines.prefix}{node}v", check=False)
        _ip(f"link del {bridge}", check=False)


def _ip(arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments.split()], capture_output=True, check=check)

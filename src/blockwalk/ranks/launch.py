"""The start of a run's ranks: their place is read from torchrun's or SLURM's variables, or they are
started here.

    blockwalk train run.yaml --nproc-per-node 4             starts ranks on this machine
    torchrun ... -m blockwalk train run.yaml                one of these on each node of a cluster
    srun --ntasks-per-node 4 blockwalk train run.yaml       likewise

Ranks that are started here find each other through a file in a folder that only their user can
enter, and talk over the loopback interface: nobody else can reach them. Nothing here imports torch
before a process joins the others."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from blockwalk.plan.words import counted
from blockwalk.ranks.place import (
    LOST,
    PORT,
    TIMEOUT,
    LostRank,
    Place,
    meeting_point,
    port_of,
    reason_of,
)
from blockwalk.system import links
from blockwalk.system.child_python import SAFE_PATH, python_command
from blockwalk.system.cores import usable_cores
from blockwalk.system.signals import STOPS, handled
from blockwalk.system.terminal import clean_record, say

LAUNCH_FLAGS = ("--nproc-per-node", "--nnodes")
LAZILY = "TORCH_GLOO_LAZY_INIT"
"""The variable by which gloo connects two ranks when they first talk to each other: a group over
all of n ranks has few of n − 1 connections a rank then, for its collectives talk along rings and
trees."""
STORE = "BLOCKWALK_STORE"
"""The variable with the path of the file through which ranks of one machine find each other."""
GRACE = 10.0
"""Seconds that ranks have to end by themselves after another has failed."""
_PR_SET_PDEATHSIG = 1


OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher gives a rank: a process that is none must not have them."""


def start(arguments: Sequence[str], ranks_per_node: int, nodes: int) -> int:
    """Start ranks on this machine and answer their exit code, or, for several nodes, print what to
    run on each of them.

    Args:
        arguments: of ``blockwalk``, without :data:`LAUNCH_FLAGS`.
    """
    module = ["-m", "blockwalk", *arguments]
    if nodes > 1:
        say("run on each node, with the first node's name in place of HOST:")
        # torchrun itself starts ranks with python -m
        variables = " ".join(f"{name}={value}" for name, value in SAFE_PATH.items())
        for node in range(nodes):
            address = f"--nnodes {nodes} --node-rank {node} --master-addr HOST --master-port {PORT}"
            count = f"--nproc-per-node {ranks_per_node}"
            say(f"{variables} torchrun {address} {count} {shlex.join(module)}")
        say(
            "ranks listen without a password: whoever reaches them can stop the run or falsify"
            " it. Keep others out, as root on each node, with the nodes' network (such as"
            " 10.0.0.0/24) in place of NETWORK; --interface NAME keeps the ranks' traffic on one"
            " interface:"
        )
        say(firewall(_own_ports()))
        return 0
    _require_loopback()
    hint = "for several nodes, add --nnodes N to see the command for each"
    say(f"starting {counted(ranks_per_node, 'rank')} here; {hint}")
    with tempfile.TemporaryDirectory(prefix="blockwalk-ranks-") as folder:  # mode 0700
        common = {
            "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks_per_node)),
            **os.environ,
            **SAFE_PATH,
            STORE: str(Path(folder, "store")),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
        }
        environments = (
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks_per_node)
        )
        command = python_command(*module)
        ends = _ends_with(os.getpid()) if sys.platform == "linux" else None
        # a group of its own: a terminal's Ctrl-C comes from here alone, and a second one would end
        # a rank at once
        return _attend(
            [
                subprocess.Popen(command, env=env, process_group=0, preexec_fn=ends)
                for env in environments
            ]
        )


def _require_loopback() -> None:
    """Raise ValueError where this machine's loopback interface is down: ranks that are started here
    talk over it."""
    for address, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        with (
            contextlib.suppress(OSError),
            socket.create_server((address, 0), family=family) as server,
        ):
            socket.create_connection(server.getsockname()[:2], timeout=5.0).close()
            return
    raise ValueError(
        f"the loopback interface of {platform.node()} is down, and ranks that are started here"
        " talk over it: bring it up with"
        " ip link set lo up (a container's network may have none), or start one rank"
    )


def _ends_with(launcher: int) -> Callable[[], None]:
    """Run in a rank before its program: the kernel sends it SIGTERM when its launcher is gone,
    however that ended."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux's alone

    def die_with_parent() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            os._exit(LOST)

    return die_with_parent


def _attend(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for ranks, pass signals on to them, stop all of them when one has failed, and return the
    run's exit code."""
    signals: list[int] = []

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        for process in ranks:
            process.send_signal(number)

    def failures() -> list[tuple[int, int, int]]:
        expected = (0, *(code for n in signals for code in (-n, 128 + n)))
        codes = [(rank, process.pid, process.poll() or 0) for rank, process in enumerate(ranks)]
        return [failure for failure in codes if failure[2] not in expected]

    def run_on() -> bool:
        return any(process.poll() is None for process in ranks)

    with handled(pass_on, STOPS):
        try:
            while run_on() and not failures():
                time.sleep(0.1)
            if failures():
                deadline = time.monotonic() + GRACE
                for process in ranks:
                    process.terminate()
                while run_on() and time.monotonic() < deadline:
                    time.sleep(0.1)
                message, code = first_failure(failures())
                say(f"blockwalk: {message}", file=sys.stderr)
                return code
            return 128 + signals[0] if any(process.returncode for process in ranks) else 0
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def first_failure(failures: Sequence[tuple[int, int, int]]) -> tuple[str, int]:
    """Return the message and the exit code of a run whose ranks failed with these (rank, process,
    exit code). A rank that only lost the others, or was stopped because of them, is not the
    cause."""
    effects = (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)
    causes = [failure for failure in failures if failure[2] not in effects]
    lost = [failure for failure in failures if failure[2] == LOST]
    rank, process, code = min(causes or lost or failures)
    culprit = f"rank {rank} (process {process})"
    if code > 0 and code != LOST:
        said = "what it says is above, and in output_dir/logs"
        return f"{culprit} ended with exit code {code}, so the run ended; {said}", code
    how = "lost the others" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    again = "go on with --resume_from_checkpoint latest, with as many ranks as you like"
    text = f"{culprit} {how}, so the run ended. Every rank's log is in output_dir/logs; {again}"
    return text, code if code > 0 else 128 - code


def lost_rank(rank: int, error: RuntimeError) -> LostRank | None:
    """Return a broken collective's error as a :class:`LostRank` that says what to do; None where
    the error is another one. An error that names the lost rank stays as it is."""
    from torch.distributed import DistError

    if isinstance(error, LostRank):
        return error
    if not isinstance(error, DistError) and "gloo" not in str(error):
        return None
    reason = reason_of(error)
    if "Unable to find address for" in reason:
        return LostRank(
            f"rank {rank} on {platform.node()} has no address to talk to other ranks from"
            f" ({reason}): that interface is down"
            " or has none; name another one with interface, or bring it up"
        )
    return LostRank(
        f"rank {rank} lost the connection to another rank ({reason}): that one has ended, or"
        " cannot be reached. The run ends;"
        " start it again to resume"
    )


@contextlib.contextmanager
def joined(
    here: Place, output_dir: Path, start_timeout: float, interface: str = ""
) -> Iterator[None]:
    """Join the other ranks for the time of a run, and watch them. Every rank's log is
    ``output_dir/logs``; what ranks other than 0 print goes there as well.

    Args:
        start_timeout: seconds that this rank waits for the others.
        interface: the one that gloo and NCCL listen and talk on; empty: the one they choose.

    Raises:
        ValueError: this machine has no such interface, a rank's log is a link, or the variables of
            the launcher do not say where rank 0 is.
        LostRank: a rank has not come within that time, or was lost later.
    """
    if here.world == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    from blockwalk.ranks.watch import Watch

    if interface and STORE not in os.environ:
        interfaces = [name for _, name in socket.if_nameindex()]
        if interface not in interfaces:
            raise ValueError(
                f"interface is {interface!r}, and {platform.node()} has {', '.join(interfaces)}"
            )
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface

    if STORE not in os.environ:
        meeting_point(here)  # refused before anything is written

    folder = output_dir / "logs"
    links.refuse_linked(folder)
    links.refuse_linked(folder / f"rank-{here.rank:04d}")
    folder.mkdir(parents=True, exist_ok=True)
    rank_log = links.append_to(folder / f"rank-{here.rank:04d}.log")
    logging.basicConfig(
        stream=rank_log, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s"
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(clean_record)
    logging.captureWarnings(True)
    logging.getLogger(__name__).info(
        "rank %d of %d, process %d", here.rank, here.world, os.getpid()
    )
    store = _store(here, start_timeout)
    watch = Watch(here, store, start_timeout=start_timeout)
    store.set_timeout(TIMEOUT)
    backend = "gloo"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        index = here.local_rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        read_properties = getattr(
            torch.get_device_module(accelerator), "get_device_properties", None
        )
        # Apple's module has no such function
        properties: Any = None if read_properties is None else read_properties(index)
        if accelerator.type == "cuda":
            bind_to_gpu(properties)
        device_name = f"{platform.node()} {getattr(properties, 'uuid', index)}"
        if have_their_own(store, here, device_name):
            of_device = dist.get_default_backend_for_device(accelerator)
            backend = f"cpu:gloo,{accelerator.type}:{of_device}"
    console = sys.stdout
    os.environ.setdefault(LAZILY, "1")
    try:
        dist.init_process_group(
            backend, store=store, rank=here.rank, world_size=here.world, timeout=TIMEOUT
        )
        if here.rank:
            sys.stdout = rank_log
        yield
        watch.close()
        dist.destroy_process_group()
    except RuntimeError as error:
        raise (lost_rank(here.rank, error) or error) from error.__cause__
    finally:
        sys.stdout = console


def _store(here: Place, timeout: float) -> Any:
    """Return the store of keys through which ranks find each other: a file's where they were
    started here, rank 0's (under torchrun: its agent's) where they may be on other machines.

    Raises:
        LostRank: rank 0's does not answer.
    """
    import torch.distributed

    dist: Any = torch.distributed
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if STORE in os.environ:
        return dist.PrefixStore(attempt, dist.FileStore(os.environ[STORE], -1))
    address, port = meeting_point(here)
    serves = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    variables = "MASTER_ADDR and MASTER_PORT"
    store = key_store(address, port, timeout, serves, f"rank {here.rank}", "rank 0", variables)
    return dist.PrefixStore(
        attempt, store
    )  # torchrun's outlives its restarts, and gloo would find ranks that are gone


def key_store(
    address: str, port: int, timeout: float, serves: bool, role: str, host: str, setting: str
) -> Any:
    """Return a store of keys at an address: served there by this process, ``who``, or reached
    within ``timeout`` seconds where ``host`` serves it; ``setting`` is what says the address.

    Raises:
        LostRank: there is none.
        ValueError: the port is out of range.
    """
    import torch.distributed

    dist: Any = torch.distributed
    port_of(str(port), setting)
    role = f"{role} on {platform.node()}"
    deadline = time.monotonic() + timeout
    while not serves:  # torch's own client would print a page for each attempt
        try:
            socket.create_connection((address, port), max(1.0, deadline - time.monotonic())).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise LostRank(
                    f"{role} could not reach {host} at {address}:{port} for {timeout:g} s"
                    f" ({error}): start every rank with {host}'s {setting}, or give it longer"
                    " (start_timeout)"
                ) from None
            time.sleep(0.2)
    outcomes: list[Any] = []

    def make() -> None:
        try:
            # torch's own listens on every address
            listens = {"master_listen_fd": _listening(address, port)} if serves else {}
            limit = timedelta(seconds=timeout)
            outcomes.append(
                dist.TCPStore(address, port, None, serves, limit, wait_for_workers=False, **listens)
            )
        except Exception as error:
            outcomes.append(error)

    # torch's client waits for the first answer without a limit: where another program listens, for
    # ever
    maker = threading.Thread(target=make, name="blockwalk store", daemon=True)
    maker.start()
    maker.join(max(1.0, deadline - time.monotonic()))
    if not outcomes:
        raise LostRank(
            f"{role} reached {address}:{port}, which has not answered for {timeout:g} s: it is"
            f" another program's port, or {host} is stopped; change {setting}, or give it longer"
            " (start_timeout)"
        )
    if isinstance(outcomes[0], Exception):
        reason = str(outcomes[0]).splitlines()[0]
        raise LostRank(
            f"{role}: {address}:{port} is no store of ranks ({reason}); change {setting}"
        )
    return outcomes[0]


def _listening(address: str, port: int) -> int:
    """Return the descriptor of a socket that listens on an address of this machine, and on no
    other."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family, backlog=socket.SOMAXCONN).detach()


def firewall(ports: str) -> str:
    """Return the command by which root keeps everybody outside a network from the ports of a node's
    ranks."""
    return (
        f"iptables -I INPUT ! -i lo ! -s NETWORK -p tcp -m multiport --dports {PORT},{ports}"
        " -m conntrack --ctstate NEW -j DROP"
    )


def _own_ports() -> str:
    """Return the range from which this machine's kernel takes ports that nobody named."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return ":".join(path.read_text().split()) if path.is_file() else "32768:60999"


PCI_DEVICES = Path("/sys/bus/pci/devices")


def cores_beside(pci_address: str) -> set[int]:
    """Return the cores of the NUMA node of a PCI device such as ``0000:3b:00.0``; none where the
    kernel does not say."""
    listed = PCI_DEVICES / pci_address.lower() / "local_cpulist"
    return parse_cores(listed.read_text()) if listed.is_file() else set()


def parse_cores(text: str) -> set[int]:
    """Return the kernel's list format: ``0-3,8`` are cores 0, 1, 2, 3 and 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        lowest, _, highest = part.partition("-")
        cores.update(range(int(lowest), int(highest or lowest) + 1))
    return cores


def have_their_own(store: Any, here: Place, own: str) -> bool:
    """Return whether every rank has a device of its own, by the names of devices that all ranks
    call this with together: a task may see one device alone, its own or everybody's."""
    store.set(f"device/{here.rank}", own)
    return len({store.get(f"device/{rank}") for rank in range(here.world)}) == here.world


def bind_to_gpu(properties: Any) -> set[int]:
    """Keep this process, and the threads that it starts from here on, on the cores beside a CUDA
    device, as far as it may use them; answers the cores that it has then."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    bus = f"{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    address = f"{properties.pci_domain_id:04x}:{bus}"
    allowed = os.sched_getaffinity(0)
    cores = cores_beside(address) & allowed
    if cores:
        os.sched_setaffinity(0, cores)
    return cores or allowed

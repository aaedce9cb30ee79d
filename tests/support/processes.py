"""Real ranks for tests: forked processes joined by gloo. Not a test: no oracle.

Forking after the imports costs a hundredth of starting an interpreter. A rank may first enter a
network namespace."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""


def run_ranks(
    world: int,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    namespaces: Sequence[str] = (),
    master: str = "127.0.0.1",
    may_die: bool = False,
    fresh: bool = False,
) -> list[Any]:
    """Run ``work(rank, *args)`` on every rank of a new process group, and return the answers by
    rank.

    Args:
        namespaces: of each rank, the network namespace to enter.
        may_die: answer the exit code of a rank that ends without an answer, instead of failing.
        fresh: start an interpreter for each rank, which takes seconds. A forked one finds room in
            its parent's heap, so that what it allocates is not what the kernel counts.
    """
    context = multiprocessing.get_context("spawn" if fresh else "fork")
    ranks = []
    pipes = []
    listener = None
    if (
        not namespaces
    ):  # taken here once and for all: a port that was free a moment ago may be another's by now
        listener = socket.create_server((master, 0))
    port = listener.getsockname()[1] if listener else 29500 + os.getpid() % 20000
    for rank in range(world):
        receiving, sending = context.Pipe(duplex=False)
        namespace = namespaces[rank] if namespaces else None
        process = context.Process(
            target=_rank, args=(rank, world, master, port, listener, namespace, sending, work, args)
        )
        process.start()
        sending.close()
        ranks.append(process)
        pipes.append(receiving)
    if listener is not None:
        listener.close()  # the first rank's own stays
    answers: list[Any] = [None] * world
    failures = []
    deadline = time.monotonic() + timeout
    try:
        for rank, (process, pipe) in enumerate(zip(ranks, pipes, strict=True)):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} gave no answer within {timeout} s")
                continue
            try:
                ok, answers[rank] = pickle.loads(
                    pipe.recv_bytes()
                )  # tensors by value: their rank will be gone
                if not ok:
                    failures.append(f"rank {rank}:\n{answers[rank]}")
            except EOFError:
                process.join(5)
                answers[rank] = process.exitcode
                if not may_die:
                    failures.append(f"rank {rank} ended with {process.exitcode}")
    finally:
        for process in ranks:
            process.join(0 if failures else 20)
            if process.is_alive():
                process.kill()
                process.join()
    assert not failures, "\n".join(failures)
    return answers


def private_bytes() -> int:
    """Return the bytes of anonymous memory that this process maps.

    Pages that a forked rank shares with its parent count in full: a proportional share would change
    as ranks come and go."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def _rank(
    rank: int,
    world: int,
    master: str,
    port: int,
    listener: socket.socket | None,
    namespace: str | None,
    pipe: Any,
    work: Any,
    args: tuple[Any, ...],
) -> None:
    if namespace is not None:
        with Path("/run/netns", namespace).open() as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK) == 0, (
                os.strerror(ctypes.get_errno())
            )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if namespace is None else "eth0"
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=60)
        listening = None if listener is None or rank else listener.detach()
        if listener is not None and rank:
            listener.close()
        store = dist.TCPStore(master, port, world, rank == 0, limit, master_listen_fd=listening)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        pipe.send_bytes(pickle.dumps((True, work(rank, *args))))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        os._exit(0)

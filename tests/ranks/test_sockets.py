"""Oracle: the kernel's list of a process's open files."""

from __future__ import annotations

import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from blockwalk.plan.choices import MeshSettings
from blockwalk.ranks.agreement import first_json, gather_json
from blockwalk.ranks.launch import STORE, joined
from blockwalk.ranks.place import TIMEOUT, Place
from blockwalk.ranks.scalars import make_scalars

NODE = 4
"""Ranks of a node."""


def sockets() -> int:
    """Sockets that this process has open."""
    files = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(file) and "socket:" in str(os.readlink(file)) for file in files)


def _talk(rank: int, world: int, folder: Path, pipe: Any) -> None:
    os.environ[STORE] = str(folder / "store")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    before = sockets()
    with joined(Place(rank, world, rank % NODE, NODE), folder, 60.0):
        mesh = MeshSettings(world=world, ranks_per_node=NODE)
        scalars = make_scalars(mesh, rank)
        saver = dist.new_group(timeout=TIMEOUT, backend="gloo")
        for group in (None, saver):
            dist.barrier(group)
            assert gather_json(rank, group) == list(range(world))
        assert first_json(rank) == 0
        numbers = scalars.gather(torch.tensor([float(rank)]))
        assert numbers.flatten().tolist() == list(range(world))
        pipe.send(sockets() - before)
        pipe.close()
        scalars.close()
        dist.destroy_process_group(saver)
    os._exit(0)


def talked(world: int, folder: Path) -> int:
    """The most sockets that a rank has, once all have talked in the default group, a saver's and
    that of scalars."""
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(world):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_talk, args=(rank, world, folder, sending))
        process.start()
        sending.close()
        ranks.append((process, receiving))
    counts = []
    for _, receiving in ranks:
        assert receiving.poll(100)
        counts.append(receiving.recv())
    for process, _ in ranks:
        process.join(30)
        assert process.exitcode == 0
    return max(counts)


def test_a_rank_has_no_socket_for_every_other(tmp_path: Path) -> None:
    """Four groups, each with a socket that listens, two neighbours in a ring and two partners a
    round of a barrier: O(log n). A full mesh of the first two groups alone would have 2 (n - 1)."""
    few, many = (talked(world, tmp_path / str(world)) for world in (8, 24))
    most = 2 * (1 + 2 + 2 * math.ceil(math.log2(24))) + 2 * NODE + 24 // NODE
    assert many <= most < 2 * 23 + 2 * NODE + 24 // NODE
    assert many - few <= 12

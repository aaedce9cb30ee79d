"""Oracle: sums and concatenations written out by hand on every rank's numbers; the kernel's byte
counters; exit codes."""

from __future__ import annotations

import os
import platform
import signal
import time
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from blockwalk.plan.choices import MeshSettings
from blockwalk.program.program import Lane
from blockwalk.ranks.agreement import gather_json, require_agreement
from blockwalk.ranks.groups import finish, make_groups
from blockwalk.ranks.place import LostRank, Place
from blockwalk.ranks.ranks import first
from blockwalk.ranks.watch import Watch, naming
from tests.support.cluster import cluster, payload_of
from tests.support.messages import refused, says
from tests.support.processes import run_ranks

CPU = torch.device("cpu")


def _refuse(why: str) -> None:
    raise ValueError(why)


def _collectives(rank: int) -> None:
    groups = make_groups(MeshSettings(world=4, ranks_per_node=2), CPU, sums_apart=True)
    inner = groups.between(1, 2)
    outer = groups.between(2, 4)
    numel = 24
    generator = torch.Generator().manual_seed(7)
    everyone = torch.randn(4, numel, generator=generator)
    # Gathering: each rank brings its slice over the world; inter-node first, then inside the node.
    whole = everyone[0]
    full = torch.full((numel,), float("nan"))
    own = groups.slice(numel, 4)
    full[own] = whole[own]
    groups.gather_(full[groups.slice(numel, 2)], outer, Lane.INTER)
    groups.gather_(full, inner, Lane.INTRA)
    assert torch.equal(full, whole)
    # Reducing: first inside the node, then between nodes, each in the order of the ranks.
    mine = groups.reduce(
        groups.reduce(everyone[rank].clone(), inner, Lane.INTRA), outer, Lane.INTER
    )
    expected = (everyone[0] + everyone[1]) + (everyone[2] + everyone[3])
    assert torch.equal(mine, expected[own])
    replica = everyone[rank].clone()
    apart = Thread(target=groups.gather_, args=(full, outer, Lane.INTER))
    if rank < 2:  # a gather that the other node has not come to: the sum passes it by
        apart.start()
    finish(groups.begin_sum_(replica, outer, Lane.INTER_SUMS))
    if rank >= 2:
        apart.start()
    apart.join()
    assert torch.equal(replica, everyone[rank % 2] + everyone[rank % 2 + 2])
    assert groups.exchange([rank, 0.5]) == [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5], [3.0, 0.5]]
    # what torch unpickles objects with
    dist.distributed_c10d._tensor_to_object = None  # type: ignore[assignment]
    require_agreement({"plan": "same", "torch": torch.__version__})
    assert gather_json({"rank": rank, "é": [0.1, None]}) == [
        {"rank": r, "é": [0.1, None]} for r in range(4)
    ]
    assert first(lambda: {"rank": rank}) == {"rank": 0}
    with refused(ValueError, "rank 0 no"):
        first(partial(_refuse, f"rank {rank} says no"))
    with refused(ValueError, "rank 0 a 3 b"):
        require_agreement({"plan": "b" if rank == 3 else "a"})
    groups.close()


def test_gathers_and_reductions_are_the_sums_in_rank_order() -> None:
    run_ranks(4, _collectives)


def _count(rank: int, numel: int) -> tuple[int, int]:
    groups = make_groups(MeshSettings(world=4, ranks_per_node=2), CPU)
    full = torch.ones(numel)
    node = full[groups.slice(numel, 2)]

    def gather() -> None:
        groups.gather_(node, groups.between(2, 4), Lane.INTER)
        groups.gather_(full, groups.between(1, 2), Lane.INTRA)

    def reduce() -> None:
        groups.reduce(
            groups.reduce(full, groups.between(1, 2), Lane.INTRA), groups.between(2, 4), Lane.INTER
        )

    sent = payload_of(gather), payload_of(reduce)
    groups.close()
    return sent


@pytest.mark.root
def test_a_gather_and_a_reduction_send_half_of_the_buffer_between_two_nodes() -> None:
    """Operating system: bytes on each node's link are (N − 1)/N of the buffer, within 2 % and 16 KB
    for headers."""
    numel = 2_000_000
    with cluster(2, 2) as nodes:
        for gathered, reduced in nodes.run(_count, numel)[::2]:
            for sent in (gathered, reduced):
                assert 4 * numel / 2 <= sent <= 1.02 * 4 * numel / 2 + 16_384


def store() -> Any:
    return dist.distributed_c10d._get_default_store()  # type: ignore[no-untyped-call]


def _watched(rank: int, how: str) -> Any:
    watch = Watch(Place(rank, 2, rank, 2), store(), interval=0.2, dead_after=2.0, stuck_after=1.0)
    began = time.monotonic()
    if how == "fine":
        for _ in range(3):
            watch.begin_step()
            time.sleep(0.05)
            watch.end_step()
        done: list[int] = []
        watch.begin_step(lambda: len(done))
        for _ in range(6):  # slow, but alive: ops end while this thread waits for them
            time.sleep(0.5)
            done.append(1)
        watch.end_step()
        watch.close()
        return time.monotonic() - began
    if how == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "killed 0" and rank == 1:
        store().set("rank 1 has met rank 0", "")
    if how == "killed 0" and rank == 0:
        store().wait(["rank 1 has met rank 0"])
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "busy" and rank == 1:
        began_at = time.process_time()
        while time.process_time() - began_at < 3.5:
            sum(range(10**8))  # no other thread of this process runs
    if how == "busy":
        dist.barrier()
        time.sleep(1)
        watch.close()
        return "went on"
    if how == "stuck":
        watch.begin_step()
        watch.end_step()
        watch.begin_step()
    time.sleep(60)
    return "never noticed"


@pytest.mark.parametrize("how", ["killed", "killed 0", "stopped", "stuck"])
def test_a_dead_stopped_or_stuck_rank_ends_the_others(
    how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Operating system: exit codes, within seconds."""
    began = time.monotonic()
    codes = run_ranks(2, _watched, how, timeout=30, may_die=True)
    assert time.monotonic() - began < 15
    dead = {"killed": 1, "killed 0": 0, "stopped": 1}.get(how)  # a stopped neighbour is killed
    assert codes == [-signal.SIGKILL if rank == dead else 13 for rank in range(2)]
    expected = {"killed 0": "rank 0", "stuck": "stuck"}.get(how, "rank 1")
    says(capfd.readouterr().err, expected)


def test_a_rank_that_lets_no_other_thread_run_is_busy_and_not_dead() -> None:
    """Operating system: the processor time that a silent process uses."""
    assert run_ranks(2, _watched, "busy", timeout=60) == ["went on"] * 2


class Flaky:
    """A store of keys in memory that can be out of order."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.broken = False
        self.most_read = 0

    def clone(self) -> Flaky:
        return self

    def set_timeout(self, _: object) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        if self.broken:
            raise RuntimeError("Connection reset by peer")
        self.values[key] = value.encode()

    def add(self, key: str, more: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + more).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.most_read = max(self.most_read, len(keys))
        return [self.values[key] for key in keys]


def test_a_store_that_fails_for_a_moment_ends_nothing_and_one_that_stays_away_does() -> None:
    """Closed form: nothing before ``dead_after`` seconds without an answer, the message with its
    cause after them."""
    there = Flaky()
    said = list[str]()
    watch = Watch(Place(), there, interval=0.05, dead_after=1.0, end=said.append)
    there.broken = True
    time.sleep(0.3)
    there.broken = False
    time.sleep(1.0)
    assert said == []
    there.broken = True
    deadline = time.monotonic() + 10
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "does not answer for 1 s (Connection reset by peer)" in said[0]
    watch._done.set()
    Watch.current = None


def test_a_rank_reads_a_few_beats_of_1024_and_hears_of_those_that_it_does_not_read() -> None:
    """Closed form: of nodes of four ranks it reads its own and the next; rank 6 is silent, and
    rank 512, which reads no beat of it, ends with the same reason."""
    there = Flaky()
    said = list[str]()
    watches = []
    for rank, dead_after in ((512, 60.0), (3, 1.0)):
        about = f"blockwalk/watch-{Watch._made}" if not watches else watches[0]._about
        there.values |= {f"{about}/beat/{other}": b"0" for other in range(1024)}
        there.values |= {f"{about}/process/{other}": b"0  elsewhere" for other in range(1024)}
        there.values[f"{about}/present"] = b"1023"
        Watch._made = int(about.rpartition("-")[2])
        watches.append(
            Watch(
                Place(rank, 1024, rank % 4, 4),
                there,
                interval=0.05,
                dead_after=dead_after,
                end=said.append,
            )
        )
    deadline = time.monotonic() + 20
    alive = [rank for rank in range(1024) if rank not in (3, 6, 512)]
    beat = 0
    while len(said) < 2 and time.monotonic() < deadline:
        beat += 1
        there.values |= {f"{about}/beat/{rank}": str(beat).encode() for rank in alive}
        time.sleep(0.05)
    for watch in watches:
        watch._done.set()
    Watch.current = None
    assert there.most_read == 8
    reason = "no sign of life from rank 6 for 1 s"
    assert [text.partition(reason)[0] for text in said] == ["rank 3: ", "rank 512: "]


def _breaks(rank: int, victim: int) -> str:
    watch = Watch(Place(rank, 3, rank, 3), store())
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostRank) as told, naming(watch):
        _exchange_for_ever()
    return str(told.value)


def _exchange_for_ever() -> None:
    while True:
        dist.all_reduce(torch.zeros(1))


def test_a_connection_that_breaks_names_the_rank_that_ended() -> None:
    """Closed form: of three ranks one is killed; gloo says an address alone."""
    said = run_ranks(3, _breaks, 1, may_die=True)
    assert said[1] == -signal.SIGKILL
    named = [said[rank].partition(" ended (")[0] for rank in (0, 2)]
    assert all("rank 1" in names for names in named), named


def _come(rank: int) -> str:
    with pytest.raises(LostRank) as told:
        Watch(Place(rank, 4, rank % 2, 2), store(), start_timeout=0.5)
    return str(told.value)


def test_ranks_that_do_not_come_are_named_by_every_rank_that_came() -> None:
    """Closed form: three of four ranks on two nodes."""
    began = time.monotonic()
    (told,) = set(run_ranks(3, _come))
    assert told.startswith(
        f"rank 3 (node 1, {platform.node()}) did not come within 0.5 s (start_timeout)"
    )
    assert time.monotonic() - began < 15


def test_slow_but_living_steps_are_left_alone() -> None:
    assert all(seconds > 3 for seconds in run_ranks(2, _watched, "fine", timeout=30))

"""Ranks that work together: process groups on the axes of a mesh, gathers and reductions in a fixed order, and the watch
over ranks that die or hang.

An axis inside the node belongs to the intra-node lane, one between nodes to the inter-node lane: each lane has process
groups of its own, so that collectives of different lanes never wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from blockwalk.launch import LOST, LostRank, Place, place
from blockwalk.mesh import Axis, between, make_axes, slice_of
from blockwalk.plan import MeshSettings
from blockwalk.program import Lane

DEAD_AFTER = 20.0
"""Seconds without a sign of life after which a rank counts as dead; noticed within another five."""

START_TIMEOUT = 120.0
"""Seconds that a rank waits for the others to come."""

STUCK_AFTER = 30.0
"""Seconds without a finished op after which a step counts as stuck, if ten usual steps are not longer."""


all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By their names of torch 2.13, or by those before."""


@dataclass(slots=True)
class Groups:
    """This rank's process groups: one for every axis of the mesh, used by one lane."""

    mesh: MeshSettings
    rank: int
    axes: tuple[Axis, ...]
    device: torch.device
    _groups: dict[tuple[Axis, Lane], dist.ProcessGroup] = field(default_factory=dict)
    _scratch: dict[Lane, torch.Tensor] = field(default_factory=dict)

    def slice(self, numel: int, size: int) -> slice:
        """This rank's slice of a buffer over its group of ``size`` ranks."""
        return slice(*slice_of(self.axes, self.rank, numel, size))

    def gather_(self, full: torch.Tensor, axes: Sequence[Axis], lane: Lane, *, direct: bool = False) -> None:
        """Complete ``full`` in place. The piece that this rank brings, its slice of ``full`` over these axes, is already
        where it belongs; the outermost axis goes first.

        Args:
            full: [P], contiguous: this rank's slice over the group inside the innermost of ``axes``.
            direct: on a CPU, send to each rank by itself: as many bytes, and no second buffer of P as gloo's gather has.
        """
        pieces = [full]
        for axis in axes:
            pieces.append(pieces[-1].chunk(axis.length)[axis.coordinate(self.rank)])
        for axis, out in reversed(list(zip(axes, pieces, strict=False))):
            own = out.chunk(axis.length)[axis.coordinate(self.rank)]
            if direct and not out.is_cuda:
                self._swap(out, axis, lane)
            else:
                all_gather(out, own, group=self._groups[axis, lane])

    def _swap(self, out: torch.Tensor, axis: Axis, lane: Lane) -> None:
        """Send this rank's piece of ``out`` to the others of an axis, and take theirs into place."""
        group, pieces = self._groups[axis, lane], out.chunk(axis.length)
        others = [
            (each, piece) for each, piece in zip(axis.members(self.rank), pieces, strict=True) if each != self.rank
        ]
        own = pieces[axis.coordinate(self.rank)]
        works = [dist.irecv(piece, each, group=group) for each, piece in others]
        works += [dist.isend(own, each, group=group) for each, _ in others]
        for work in works:
            assert work is not None
            work.wait()

    def reduce(self, full: torch.Tensor, axes: Sequence[Axis], lane: Lane) -> torch.Tensor:
        """The sum over the ranks of these axes of this rank's slice of ``full``, innermost axis first: a part of ``full``
        itself, whose other parts are used up. Float32, added in the order of the ranks (on NCCL in its own fixed order).

        gloo's reduce_scatter moves the bytes of an all-reduce; an all-to-all and a local sum move half of them.
        """
        assert full.dtype == torch.float32, f"gradients are reduced in float32, not {full.dtype}"
        for axis in axes:
            own = full.chunk(axis.length)[axis.coordinate(self.rank)]
            group = self._groups[axis, lane]
            if full.device.type == "cuda":
                reduce_scatter(own, full, group=group)
            else:
                received = self._room(lane, full.numel())
                dist.all_to_all_single(received, full, group=group)
                first, *others = received.chunk(axis.length)
                own.copy_(first)
                for other in others:
                    own.add_(other)
            full = own
        return full

    def sum_(self, slice_P: torch.Tensor, axes: Sequence[Axis], lane: Lane) -> None:
        """Sum in place over ranks that hold the same slice."""
        self.reduce(slice_P, axes, lane)
        self.gather_(slice_P, axes, lane)

    def lane(self, axis: Axis) -> Lane:
        """The lane whose process group an axis has."""
        return Lane.INTER if axis.crosses_nodes else Lane.INTRA

    def between(self, inner: int, outer: int) -> tuple[Axis, ...]:
        return between(self.axes, inner, outer)

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Everybody's values, float64, by rank."""
        if self.mesh.world == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        out = torch.empty(self.mesh.world * len(values), dtype=torch.float64, device=self.device)
        all_gather(out, own)
        return [row.tolist() for row in out.chunk(self.mesh.world)]

    def close(self) -> None:
        """Let go of the process groups, together: a rank that leaves early breaks what the others still send."""
        if self._groups:
            dist.barrier()
            for group in self._groups.values():
                dist.destroy_process_group(group)
            self._groups.clear()

    def _room(self, lane: Lane, numel: int) -> torch.Tensor:
        if lane not in self._scratch or self._scratch[lane].numel() < numel:
            self._scratch[lane] = torch.empty(numel)
        return self._scratch[lane][:numel]


def started(mesh: MeshSettings) -> int:
    """The ranks that were started. Raises ValueError where they, or those of this node, are not the mesh's."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.world != world:
        raise ValueError(f"mesh.world is {mesh.world}, and {world} ranks were started; set mesh.world: {world}")
    here = place()
    if here.world == world and here.ranks_per_node % mesh.ranks_per_node:
        raise ValueError(
            f"mesh.ranks_per_node is {mesh.ranks_per_node} (mesh.world unless given), and {here.ranks_per_node} ranks were"
            f" started on this node; set mesh.ranks_per_node: {here.ranks_per_node}"
        )
    return world


def make_groups(mesh: MeshSettings, device: torch.device) -> Groups:
    """The process groups of a mesh; every rank calls this together.

    Raises:
        ValueError: the mesh does not nest, or is not the world that was started.
    """
    axes, world = make_axes(mesh), started(mesh)
    groups = Groups(mesh, dist.get_rank() if world > 1 else 0, axes, device)
    for axis in axes:
        lane = groups.lane(axis)
        for first in range(world):
            if axis.coordinate(first) == 0:
                members = axis.members(first)
                made = dist.new_group(list(members))
                if groups.rank in members:
                    groups._groups[axis, lane] = made
    return groups


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that die or hang
# ---------------------------------------------------------------------------------------------------------------------


def _end_process(message: str) -> None:
    """Say why, once, and leave at once: a thread that waits in a collective would never return."""
    print(message, file=sys.stderr, flush=True)
    os._exit(LOST)


class Watch:
    """Ends this process when another rank is dead, or when this one is stuck. Two threads: one talks to the store over a
    connection of its own, where a link that is down can hold it for minutes; the other looks at the clock.

    It begins when every rank has come, which it waits for. Every three seconds a rank counts its own beat up and reads the
    others'. A rank whose beat stands still for :data:`DEAD_AFTER` seconds is dead, stopped or unreachable; so is the store's
    host where it does not answer for as long. Inside a step (see :meth:`begin_step`) the time since the last finished op is
    watched: more than :data:`STUCK_AFTER` seconds and ten usual steps, and the step is stuck. A slow step whose ops finish is
    left alone, and so is a first step of any length.

    A silent rank of this node whose process has used its processor since is busy (a library can keep every other thread of
    a process waiting): this rank counts its beat up for it. Any other is killed: one that was stopped would not hear its
    launcher, which waits for it.

    Args:
        here: this process among the ranks.
        store: of keys, the one that all ranks share.
        end: what to do, given the message; ends the process unless given.

    Raises:
        LostRank: a rank has not come within ``start_timeout`` seconds; its number and node are named.
    """

    current: ClassVar[Watch | None] = None
    """The one that watches this process."""
    _made: ClassVar[int] = 0

    def __init__(
        self,
        here: Place,
        store: Any,
        *,
        start_timeout: float = START_TIMEOUT,
        interval: float = 3.0,
        dead_after: float = DEAD_AFTER,
        stuck_after: float = STUCK_AFTER,
        end: Callable[[str], None] = _end_process,
    ) -> None:
        self.interval, self.dead_after, self.stuck_after, self.end = interval, dead_after, stuck_after, end
        self._here, self._rank = here, here.rank
        self._done = threading.Event()
        self._progress: float | None = None
        self._began = 0.0
        self._steps: list[float] = []
        self._about = f"blockwalk/watch-{Watch._made}"
        Watch._made += 1
        self._keys = [f"{self._about}/beat/{rank}" for rank in range(here.world)]
        first = here.rank // here.ranks_per_node * here.ranks_per_node
        self._node = range(first, first + here.ranks_per_node)
        self._seen: dict[int, tuple[bytes, float]] = {}
        """Of each rank its newest beat, and when that was first seen."""
        self._used: dict[int, int] = {}
        """Of silent ranks of this node the processor time that they had used when that was last looked at."""
        self._trouble = ""
        self._store = store.clone()
        self._meet(start_timeout)
        self._store.set_timeout(timedelta(seconds=dead_after / 2))
        self._lived = 0.0
        """Seconds on this rank's clock: while its process is stopped, or no thread of it gets to run, it stands still."""
        self._answered = 0.0
        """When the store last answered, on that clock; so are all times below."""
        self._threads = [
            threading.Thread(target=work, name="blockwalk watch", daemon=True) for work in (self._beat, self._look)
        ]
        for thread in self._threads:
            thread.start()
        Watch.current = self

    def _meet(self, timeout: float) -> None:
        """Wait until every rank has come. What one rank says of those that are missing, all say."""
        here, store, missing = self._here, self._store, f"{self._about}/missing"
        count, wait, deadline = f"{self._about}/present", 0.01, time.monotonic() + timeout
        try:
            store.set(self._keys[here.rank], "0")
            store.set(self._process(here.rank), f"{os.getpid()} {_began(os.getpid())} {platform.node()}")
            store.add(count, 1)
            while store.add(count, 0) < here.world:
                if store.check([missing]):
                    raise LostRank(store.get(missing).decode())
                if time.monotonic() > deadline:
                    store.set(missing, self._absent(timeout))
                    time.sleep(min(1.0, timeout / 4))  # rank 0 may hold the store: let the others read it
                time.sleep(wait)
                wait = min(2 * wait, 0.2)
        except (RuntimeError, OSError) as error:
            if isinstance(error, LostRank):
                raise
            raise LostRank(
                f"rank {here.rank} lost the store of ranks while it waited for the others: {error}"
            ) from None

    def _absent(self, timeout: float) -> str:
        """What to say of the ranks that have not come."""
        each = self._here.ranks_per_node
        there = {rank for rank in range(self._here.world) if self._store.check([self._process(rank)])}
        hosts = {rank // each: self._store.get(self._process(rank)).decode().split()[2] for rank in there}
        who = ", ".join(
            f"rank {rank} (node {rank // each}, {hosts.get(rank // each, 'from which no rank has come')})"
            for rank in range(self._here.world)
            if rank not in there
        )
        return (
            f"{who} did not come within {timeout:g} s (start_timeout): not started, stopped, or unable to reach the others"
        )

    def begin_step(self) -> None:
        self._began, self._progress = time.monotonic(), self._lived

    def progress(self) -> None:
        """An op is done."""
        if self._progress is not None:
            self._progress = self._lived

    def end_step(self) -> None:
        self._progress = None
        self._steps = [*self._steps[-19:], time.monotonic() - self._began]

    def close(self) -> None:
        """Stop watching, when every rank has come this far."""
        if not self._done.is_set():
            dist.barrier()
            self._done.set()
            for thread in self._threads:
                thread.join()
            Watch.current = None

    def stuck(self) -> str | None:
        """What to say where this rank's step is stuck."""
        progress, steps = self._progress, self._steps
        if progress is None or not steps:
            return None
        waited = self._lived - progress
        usual = statistics.median(steps)
        if waited <= max(self.stuck_after, 10 * usual):
            return None
        return (
            f"rank {self._rank}: no operation of this step has finished for {waited:.0f} s, and a step usually takes"
            f" {usual:.1f} s: it is stuck. The run ends; start it again to resume"
        )

    def _beat(self) -> None:
        """Count up, and read how far the others are."""
        beats = 0
        while not self._done.wait(self.interval):
            beats += 1
            try:
                self._store.set(self._keys[self._rank], str(beats))
                values = self._store.multi_get(self._keys)
                now = self._answered = self._lived
                for rank, value in enumerate(values):
                    if rank not in self._seen or self._seen[rank][0] != value:
                        self._seen[rank] = (value, now)
                    elif rank in self._node and now - self._seen[rank][1] > self.dead_after / 2 and self._works(rank):
                        self._store.set(self._keys[rank], f"{beats} of rank {self._rank}")
            except Exception as error:  # a store that fails once may answer again, over another connection
                self._trouble = f" ({str(error).splitlines()[0]})"
                with contextlib.suppress(Exception):
                    self._store = self._store.clone()

    def _works(self, rank: int) -> bool:
        """Whether the process of a silent rank of this node has used its processor since this was last asked."""
        before, used = self._used.get(rank), _used(self._store.get(self._process(rank)).decode())
        self._used[rank] = used
        return before is not None and used > before

    def _look(self) -> None:
        """End the process where the clock says so."""
        before = time.monotonic()
        while not self._done.wait(self.interval / 2):
            now = time.monotonic()
            self._lived += min(now - before, self.interval)
            before = now
            message = self.unheard() or self.stuck()
            if message is not None and not self._done.is_set():
                self.end(message)
                return

    def unheard(self) -> str | None:
        """What to say where other ranks are silent; those of this node are killed."""
        now = self._lived
        silence = now - self._answered
        if silence > self.dead_after:
            return (
                f"rank {self._rank}: the host of rank 0 does not answer for {silence:.0f} s{self._trouble}: the run ends;"
                " start it again to resume"
            )
        silent = [rank for rank, (_, since) in list(self._seen.items()) if now - since > self.dead_after]
        if not silent:
            return None
        for rank in silent:
            if rank in self._node:
                _kill(self._store.clone().get(self._process(rank)).decode())
        return (
            f"rank {self._rank}: no sign of life from rank {', '.join(map(str, silent))} for {self.dead_after:.0f} s: dead,"
            " stopped or unreachable. The run ends; start it again to resume"
        )

    def _process(self, rank: int) -> str:
        """The key of a rank's process: its number, when it began, and its host."""
        return f"{self._about}/process/{rank}"


def begin_watch(mesh: MeshSettings) -> Watch:
    """A watch over ranks whose process group is there already; every rank calls this together."""
    rank, node = dist.get_rank(), mesh.ranks_per_node
    c10d: Any = dist.distributed_c10d
    return Watch(Place(rank, mesh.world, rank % node, node), c10d._get_default_store())


def _stat(process: int) -> list[str]:
    """What the kernel says of a process of this machine, from the third field of proc(5)'s stat; nothing where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _began(process: int) -> str:
    """When a process of this machine began, in the kernel's ticks: with its number, it is that process and no other."""
    return (_stat(process) or [""] * 20)[19]


def _used(process: str) -> int:
    """Processor time of a process, given as its number and its beginning, in the kernel's ticks; 0 where it is gone."""
    number, began, *_ = process.split(" ")
    found = _stat(int(number))
    return int(found[11]) + int(found[12]) if found and found[19] == began else 0


def _kill(process: str) -> None:
    """Kill a process, given as its number and its beginning, if it is still there."""
    number, began, *_ = process.split(" ")
    if began and _began(int(number)) == began:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(number), signal.SIGKILL)

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from blockwalk.launch import LOST
from blockwalk.mesh import Axis, between, make_axes, slice_of
from blockwalk.plan import MeshSettings
from blockwalk.program import Lane

DEAD_AFTER = 20.0
"""Seconds without a sign of life after which a rank counts as dead; noticed within another five."""

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
        others = [(each, piece) for each, piece in zip(axis.members(self.rank), pieces, strict=True) if each != self.rank]
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
    """The ranks that were started. Raises ValueError where they are not the mesh's."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.world != world:
        raise ValueError(f"mesh.world is {mesh.world}, and {world} ranks were started; set mesh.world: {world}")
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
# The same run everywhere
# ---------------------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What must be equal on all ranks whatever they compute."""
    found = {"python": platform.python_version()}
    for package in ("blockwalk", "torch", "transformers", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def require_agreement(facts: Mapping[str, str]) -> None:
    """Compare facts (plan, model, versions, ...) on all ranks; every rank calls this together.

    Raises:
        ValueError: on every rank, naming the ranks and what differs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(facts))
    wrong = []
    for key in sorted({key for each in everyone for key in each}):
        expected = everyone[0].get(key)
        differing = [rank for rank, each in enumerate(everyone) if each.get(key) != expected]
        if differing:
            other = everyone[differing[0]].get(key)
            wrong.append(f"{key}: rank 0 has {expected!r}, rank {', '.join(map(str, differing))} has {other!r}")
    if wrong:
        raise ValueError("the ranks were not started alike; " + "; ".join(wrong))


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

    Every three seconds a rank counts its own beat up and reads the others'. A rank whose beat stands still for
    :data:`DEAD_AFTER` seconds is dead, stopped or unreachable; so is the store's host where it does not answer. Inside a
    step (see :meth:`step`) the time since the last finished op is watched: more than :data:`STUCK_AFTER` seconds and ten usual
    steps, and the step is stuck. A slow step whose ops finish is left alone, and so is a first step of any length.

    A silent rank of this node is killed: one that was stopped would not hear its launcher, which waits for it.

    Args:
        ranks_per_node: neighbours in the numbering of ranks.
        end: what to do, given the message; ends the process unless given.
    """

    def __init__(
        self,
        ranks_per_node: int = 1,
        *,
        interval: float = 3.0,
        dead_after: float = DEAD_AFTER,
        stuck_after: float = STUCK_AFTER,
        end: Callable[[str], None] = _end_process,
    ) -> None:
        self.interval, self.dead_after, self.stuck_after, self.end = interval, dead_after, stuck_after, end
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if self._world > 1 else 0
        self._done = threading.Event()
        self._progress: float | None = None
        self._began = 0.0
        self._steps: list[float] = []
        self._keys = [f"blockwalk/beat/{rank}" for rank in range(self._world)]
        self._node = range(self._rank // ranks_per_node * ranks_per_node, (self._rank // ranks_per_node + 1) * ranks_per_node)
        self._seen: dict[int, tuple[bytes, float]] = {}
        """Of each rank its newest beat, and when that was first seen."""
        self._answered = time.monotonic()
        """When the store last answered."""
        self._trouble = ""
        self._threads: list[threading.Thread] = []
        if self._world > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()
            self._store.set_timeout(timedelta(seconds=dead_after / 2))
            self._store.set(self._keys[self._rank], "0")
            self._store.set(_process_key(self._rank), f"{os.getpid()} {_began(os.getpid())}")
            dist.barrier()
            self._answered = time.monotonic()
            for work in (self._beat, self._look):
                self._threads.append(threading.Thread(target=work, name="blockwalk watch", daemon=True))
                self._threads[-1].start()

    def begin_step(self) -> None:
        self._began = self._progress = time.monotonic()

    def progress(self) -> None:
        """An op is done."""
        if self._progress is not None:
            self._progress = time.monotonic()

    def end_step(self) -> None:
        self._progress = None
        self._steps = [*self._steps[-19:], time.monotonic() - self._began]

    def close(self) -> None:
        """Stop watching, when every rank has come this far."""
        if self._threads:
            dist.barrier()
            self._done.set()
            for thread in self._threads:
                thread.join()
            self._threads.clear()

    def stuck(self) -> str | None:
        """What to say where this rank's step is stuck."""
        progress, steps = self._progress, self._steps
        if progress is None or not steps:
            return None
        waited = time.monotonic() - progress
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
            except Exception as error:
                self._trouble = f" ({str(error).splitlines()[0]})"
                return
            now = self._answered = time.monotonic()
            for rank, value in enumerate(values):
                if rank not in self._seen or self._seen[rank][0] != value:
                    self._seen[rank] = (value, now)

    def _look(self) -> None:
        """End the process where the clock says so."""
        while not self._done.wait(self.interval / 2):
            message = self.unheard() or self.stuck()
            if message is not None and not self._done.is_set():
                self.end(message)
                return

    def unheard(self) -> str | None:
        """What to say where other ranks are silent; those of this node are killed."""
        now = time.monotonic()
        silence = now - self._answered
        if self._trouble or silence > self.dead_after:
            return (
                f"rank {self._rank}: the host of rank 0 does not answer{self._trouble or f' for {silence:.0f} s'}: the run"
                " ends; start it again to resume"
            )
        silent = [rank for rank, (_, since) in list(self._seen.items()) if now - since > self.dead_after]
        if not silent:
            return None
        for rank in silent:
            if rank in self._node:
                _kill(self._store.clone().get(_process_key(rank)).decode())
        return (
            f"rank {self._rank}: no sign of life from rank {', '.join(map(str, silent))} for {self.dead_after:.0f} s: dead,"
            " stopped or unreachable. The run ends; start it again to resume"
        )


def _process_key(rank: int) -> str:
    return f"blockwalk/process/{rank}"


def _began(process: int) -> str:
    """When a process of this machine began, in the kernel's ticks: with its number, it is that process and no other."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _kill(process: str) -> None:
    """Kill a process, given as its number and its beginning, if it is still there."""
    number, _, began = process.partition(" ")
    if began and _began(int(number)) == began:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(number), signal.SIGKILL)

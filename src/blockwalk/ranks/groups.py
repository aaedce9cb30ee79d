"""Ranks that work together: process groups on the axes of a mesh, gathers and reductions in a fixed
order.

An axis inside the node belongs to the intra-node lane, one between nodes to the inter-node lane:
each lane has process groups of its own, so that collectives of different lanes never wait for each
other. Reductions between nodes may have such a lane beside that of gathers
(:attr:`blockwalk.plan.plan.Plan.sums_apart`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.mesh import Axis, between, context_axis, make_axes, named, slice_of
from blockwalk.plan.words import counted
from blockwalk.program.program import Lane
from blockwalk.ranks.exchange import CountedExchange, RankCollectives, all_gather
from blockwalk.ranks.place import TIMEOUT, place
from blockwalk.ranks.stages import Stages, make_stages

reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Torch's reduce-scatter over one tensor, by its name of torch 2.13 or by that before."""


@dataclass(slots=True)
class Groups:
    """This rank's process groups: one for every axis of the mesh, used by one lane."""

    mesh: MeshSettings
    rank: int
    axes: tuple[Axis, ...]
    device: torch.device
    _groups: dict[tuple[Axis, Lane], dist.ProcessGroup] = field(default_factory=dict)
    _scratch: dict[Lane, deque[Tensor]] = field(default_factory=dict)
    context: CountedExchange | None = None
    """The exchange with the ranks that hold parts of the same sequences."""
    stages: Stages | None = None
    """The ranks at this one's place in the other stages of a pipeline."""

    def slice(self, numel: int, size: int) -> slice:
        """Return this rank's slice, as a range of elements, of a buffer of ``numel`` elements over
        its group of ``size`` ranks."""
        return slice(*slice_of(self.axes, self.rank, numel, size))

    def gather_(
        self, full: Tensor, axes: Sequence[Axis], lane: Lane, *, direct: bool = False
    ) -> None:
        """Complete ``full`` in place. This rank's slice of ``full`` over these axes is already
        where it belongs; the outermost axis goes first.

        Args:
            full: [P], contiguous: this rank's slice over the group inside the innermost of
                ``axes``.
            direct: on a CPU, send to each rank by itself: as many bytes, and no second buffer of P
                as gloo's gather has.
        """
        finish(self.begin_gather_(full, axes, lane, direct=direct))

    def begin_gather_(
        self, full: Tensor, axes: Sequence[Axis], lane: Lane, *, direct: bool = False
    ) -> Completion | None:
        """Begin :meth:`gather_`, and return its completion; None where it is done, as far as the
        host has to wait for it."""
        slices = [full]
        for axis in axes:
            slices.append(slices[-1].chunk(axis.length)[axis.coordinate(self.rank)])
        completion: Completion | None = None
        for axis, out in reversed(list(zip(axes, slices, strict=False))):
            finish(completion)
            completion = self._begin_gathering(out, axis, lane, direct=direct)
        return _completion_on(lane, completion)

    def _begin_gathering(
        self, out: Tensor, axis: Axis, lane: Lane, *, direct: bool
    ) -> Completion | None:
        group = self._groups[axis, lane]
        local = out.chunk(axis.length)[axis.coordinate(self.rank)]
        if direct and out.device.type == "cpu":
            self._swap(out, axis, lane)
        elif self._over_host(group):
            host = torch.empty(out.shape, dtype=out.dtype)
            all_gather(host, local.cpu(), group=group)
            out.copy_(host)
        elif out.device.type == "cpu":
            return partial(_wait, all_gather(out, local, group=group, async_op=True))
        else:
            all_gather(out, local, group=group)
        return None

    def _swap(self, out: Tensor, axis: Axis, lane: Lane) -> None:
        """Send this rank's slice of ``out`` [P] to the others of an axis, and receive their slices
        into place."""
        group = self._groups[axis, lane]
        slices = dict(zip(axis.members(self.rank), out.chunk(axis.length), strict=True))
        local = slices.pop(self.rank)
        works = [dist.irecv(slice_P, rank, group=group) for rank, slice_P in slices.items()]
        works += [dist.isend(local, rank, group=group) for rank in slices]
        for work in works:
            assert work is not None
            work.wait()

    def reduce(self, full: Tensor, axes: Sequence[Axis], lane: Lane) -> Tensor:
        """Return this rank's slice of a sum when it is there, see :meth:`begin_reduce`."""
        slice_P, completion = self.begin_reduce(full, axes, lane)
        finish(completion)
        return slice_P

    def begin_reduce(
        self, full: Tensor, axes: Sequence[Axis], lane: Lane
    ) -> tuple[Tensor, Completion | None]:
        """Begin to sum ``full`` (float32 [P]) over the ranks of these axes, innermost axis first.
        Return this rank's slice of the sum, a view of ``full`` whose other elements are
        overwritten, and the completion after which it is there, as :meth:`begin_gather_` does.
        Addition is in the order of the ranks (on NCCL in its own).

        gloo's reduce_scatter moves the bytes of an all-reduce; an all-to-all and a local sum move
        half of them."""
        assert full.dtype == torch.float32, f"gradients are reduced in float32, not {full.dtype}"
        completion: Completion | None = None
        for axis in axes:
            finish(completion)
            completion = self._begin_reduction(full, axis, lane)
            full = full.chunk(axis.length)[axis.coordinate(self.rank)]
        return full, _completion_on(lane, completion)

    def _begin_reduction(self, full: Tensor, axis: Axis, lane: Lane) -> Completion | None:
        local = full.chunk(axis.length)[axis.coordinate(self.rank)]
        group = self._groups[axis, lane]
        if full.device.type != "cpu" and not self._over_host(group):
            reduce_scatter(local, full, group=group)
            return None
        received = self._room(lane, full.numel())
        work = dist.all_to_all_single(received, full.cpu(), group=group, async_op=True)

        def completion() -> None:
            _wait(work)
            total, *addends = received.chunk(axis.length)
            for addend in addends:
                total.add_(addend)
            local.copy_(total)

        if full.device.type == "cpu":
            return completion
        completion()
        return None

    def begin_sum_(self, slice_P: Tensor, axes: Sequence[Axis], lane: Lane) -> Completion | None:
        """Begin to sum ``slice_P`` (float32 [P]) in place over the ranks that hold it too, and
        return the completion after which the sum is there."""
        self.reduce(slice_P, axes, lane)
        return self.begin_gather_(slice_P, axes, lane)

    def _over_host(self, group: dist.ProcessGroup) -> bool:
        """Return whether a group of an accelerator's ranks speaks over the host: gloo, where
        several ranks share one device."""
        return self.device.type != "cpu" and dist.get_backend(group) == "gloo"

    def lane(self, axis: Axis) -> Lane:
        """Return the lane whose process group serves an axis."""
        return Lane.INTER if axis.crosses_nodes else Lane.INTRA

    def between(self, inner: int, outer: int) -> tuple[Axis, ...]:
        return between(self.axes, inner, outer)

    def named(self, names: Sequence[str]) -> tuple[Axis, ...]:
        return named(self.axes, names)

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values, float64, by rank."""
        if self.mesh.world == 1:
            return [list(values)]
        # over gloo, where it is there: no device waits for it
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        local = torch.tensor(values, dtype=torch.float64, device=device)
        out = torch.empty(self.mesh.world * len(values), dtype=torch.float64, device=device)
        all_gather(out, local)
        return [row.tolist() for row in out.chunk(self.mesh.world)]

    def meet(self) -> None:
        """Wait until every rank has come here."""
        self.exchange([0.0])

    def close(self) -> None:
        """Destroy the process groups; every rank calls this together: one that leaves early breaks
        what the others still send."""
        if self._groups or self.stages is not None:
            dist.barrier()
            for group in self._groups.values():
                dist.destroy_process_group(group)
            if self.stages is not None:
                self.stages.close()
                self.stages = None
            self._groups.clear()

    def _room(self, lane: Lane, numel: int) -> Tensor:
        """Return the longest unused of a lane's rooms to receive in, one for each op that is on its
        way."""
        rooms = self._scratch.setdefault(lane, deque(torch.empty(0) for _ in range(lane.at_once)))
        room = rooms.popleft()
        if room.numel() < numel:
            room = torch.empty(numel)
        rooms.append(room)
        return room[:numel]


Completion = Callable[[], None]
"""The end of a collective that has begun: it blocks until the collective is done."""


def finish(completion: Completion | None) -> None:
    """Wait for the end of a collective, where there is anything to wait for."""
    if completion is not None:
        completion()


def _completion_on(lane: Lane, completion: Completion | None) -> Completion | None:
    """Return a completion where the lane goes on before it, and None when it is waited for."""
    if lane.at_once == 1:
        finish(completion)
        return None
    return completion


def _wait(work: Any) -> None:
    work.wait()


def started(mesh: MeshSettings) -> int:
    """Return the ranks that were started. Raises ValueError where they, or those of this node, are
    not the mesh's."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.world != world:
        raise ValueError(
            f"mesh.world is {mesh.world}, and {counted(world, 'rank')} started; set mesh.world:"
            f" {world}"
        )
    if world == 1:
        return world
    local = place()
    if local.world == world and local.ranks_per_node % mesh.ranks_per_node:
        raise ValueError(
            f"mesh.ranks_per_node is {mesh.ranks_per_node} (mesh.world unless given), and"
            f" {local.ranks_per_node} ranks were started on this node; set mesh.ranks_per_node:"
            f" {local.ranks_per_node}"
        )
    return world


def _backend(device: torch.device) -> str | None:
    """Return the backend of the default group for a device alone: an axis needs no connections of
    any other."""
    pairs = str(dist.get_backend_config()).split(",")
    return dict(pair.split(":") for pair in pairs if ":" in pair).get(device.type)


def make_groups(mesh: MeshSettings, device: torch.device, *, sums_apart: bool = False) -> Groups:
    """Return the process groups of a mesh, with ``sums_apart`` others for reductions between nodes;
    every rank calls this together.

    Raises:
        ValueError: the mesh does not nest, or is not the world that was started.
    """
    axes = make_axes(mesh)
    world = started(mesh)
    groups = Groups(mesh, dist.get_rank() if world > 1 else 0, axes, device)
    for axis in axes:
        lanes = [
            groups.lane(axis),
            *([Lane.INTER_SUMS] if sums_apart and axis.crosses_nodes else []),
        ]
        for lane, rank in product(lanes, range(world)):
            if axis.coordinate(rank) == 0:
                members = axis.members(rank)
                group = dist.new_group(list(members), timeout=TIMEOUT, backend=_backend(device))
                if groups.rank in members:
                    groups._groups[axis, lane] = group
    parts = context_axis(mesh)
    for begin in range(0, world if parts.length > 1 else 0, parts.length):
        members = parts.members(begin)
        group = dist.new_group(list(members), timeout=TIMEOUT, backend=_backend(device))
        if groups.rank in members:
            groups._groups[parts, Lane.COMPUTE] = group
            groups.context = CountedExchange(RankCollectives(group, parts.length))
    if world > 1:
        groups.stages = make_stages(mesh, groups.rank)
    return groups

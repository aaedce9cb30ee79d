"""This rank among those at its place in the other stages of a pipeline: sending from stage to
stage.

Values travel over gloo, from host memory. Each way has a process group of its own, so that a lane
that waits for its neighbour holds no other up. P elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockwalk.plan.choices import MeshSettings
from blockwalk.program.program import Lane
from blockwalk.ranks.place import TIMEOUT


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages' ranks at one place, and their process groups.

    W stages."""

    mesh: MeshSettings
    rank: int
    onwards: dist.ProcessGroup
    """The group of hidden states, which go to the next stage."""
    back: dist.ProcessGroup
    """The group of their gradients, which go to the stage before."""
    ends: dist.ProcessGroup | None
    """The group of sums over the first and the last stage; None on the others."""

    @property
    def number(self) -> int:
        """The number of this rank's stage."""
        return self.rank // self.mesh.stage_ranks

    def _rank_at(self, stage: int) -> int:
        return (
            stage % self.mesh.pipeline * self.mesh.stage_ranks + self.rank % self.mesh.stage_ranks
        )

    @contextmanager
    def _named(self, stage: int) -> Iterator[int]:
        """Yield the rank at this one's place in a stage; an error while it is spoken to names it.

        Raises:
            RuntimeError: that stage cannot be reached.
        """
        rank = self._rank_at(stage)
        try:
            yield rank
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].partition(". This")[0].rpartition("] ")[2]
            raise RuntimeError(
                f"stage {stage % self.mesh.pipeline + 1} (rank {rank}) is lost, gloo says: {reason}"
            ) from error

    def send(self, value: Tensor, lane: Lane) -> None:
        """Send a tensor to the stage that a lane leads to."""
        step, group = (1, self.onwards) if lane is Lane.SEND else (-1, self.back)
        with self._named(self.number + step) as rank:
            dist.send(_bytes_of(value), rank, group=group)

    def receive(self, out: Tensor, lane: Lane) -> None:
        """Fill a tensor with what the stage sends that a lane comes from."""
        step, group = (-1, self.onwards) if lane is Lane.RECEIVE else (1, self.back)
        received = torch.empty(out.nbytes, dtype=torch.uint8)
        with self._named(self.number + step) as rank:
            dist.recv(received, rank, group=group)
        out.copy_(received.view(out.dtype).view(out.shape))

    def tell(self, bucket_P: Tensor, stage: int) -> None:
        """Give every stage the bucket that the ranks of one have; all call this together."""
        host_P = _bytes_of(bucket_P)
        dist.broadcast(host_P, self._rank_at(stage), group=self.onwards)
        if self.number != stage:
            bucket_P.copy_(host_P.view(bucket_P.dtype))

    def sum_ends_(self, slice_P: Tensor) -> None:
        """Add up what the first and the last stage have, in place; these two call it together."""
        assert self.ends is not None, "a middle stage holds no copy of the prologue"
        host_P = slice_P.cpu()
        dist.all_reduce(host_P, group=self.ends)
        slice_P.copy_(host_P)

    def close(self) -> None:
        """Destroy the process groups; every rank calls this together."""
        for group in (self.onwards, self.back, self.ends):
            if group is not None:
                dist.destroy_process_group(group)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in host memory, themselves where they lie there side by side."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()


def make_stages(mesh: MeshSettings, rank: int) -> Stages | None:
    """Return this rank among the stages; None where there is one. Every rank calls this
    together."""
    if mesh.pipeline == 1:
        return None
    own: dict[str, Any] = {"ends": None}
    members_of: dict[str, Callable[[list[int]], list[int]]] = {
        "onwards": lambda column: column,
        "back": lambda column: column,
        "ends": lambda column: [column[0], column[-1]],
    }
    for place in range(mesh.stage_ranks):
        column = list(range(place, mesh.world, mesh.stage_ranks))
        for name, members in members_of.items():
            ranks = members(column)
            group = dist.new_group(ranks, timeout=TIMEOUT, backend="gloo")
            if rank in ranks:
                own[name] = group
    return Stages(mesh, rank, **own)

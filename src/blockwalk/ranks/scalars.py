"""A few numbers from every rank to every rank, in few messages between nodes.

Inside a node its ranks gather theirs; between nodes the first ranks gather those of whole nodes, by
the algorithm of Bruck et al. ("Efficient Algorithms for All-to-All Communications in Multiport
Message-Passing Systems", 1997); then the first ranks tell their neighbours. So ⌈log₂ nodes⌉
messages leave a node in an exchange, however many ranks it has; gloo's ring over all ranks would
send world − 1. Numbers are only copied: the answer has the same bits on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockwalk.plan.choices import MeshSettings
from blockwalk.ranks.exchange import all_gather
from blockwalk.ranks.place import TIMEOUT


@dataclass(frozen=True, slots=True)
class Scalars:
    """This rank's process groups for scalars: on the CPU over gloo, so that no device waits for
    them.

    W ranks, numbered node by node; N numbers of each.
    """

    mesh: MeshSettings
    rank: int
    local: Any
    """The ranks of this node."""
    leaders: Any
    """The first ranks of all nodes."""

    def gather(self, own_N: Tensor) -> Tensor:
        """Return everybody's numbers, [W, N]; every rank calls this together with as many."""
        node = self.mesh.ranks_per_node
        nodes = self.mesh.world // node
        of_node_RN = self.of_node(own_N)
        if nodes == 1:
            return of_node_RN
        out_WN = own_N.new_empty(self.mesh.world, len(own_N))
        place, inside = divmod(self.rank, node)
        if inside == 0:
            self._between(out_WN.view(nodes, -1), of_node_RN.view(1, -1), place)
        if node > 1:
            dist.broadcast(out_WN, src=place * node, group=self.local)
        return out_WN

    def of_node(self, own_N: Tensor) -> Tensor:
        """Return the numbers of this node's ranks, [R, N]; they call this together."""
        node = self.mesh.ranks_per_node
        if node == 1:
            return own_N[None]
        of_node_RN = own_N.new_empty(node, len(own_N))
        all_gather(of_node_RN.view(-1), own_N, group=self.local)
        return of_node_RN

    def _between(self, out_KM: Tensor, own_1M: Tensor, place: int) -> None:
        """Gather M numbers from each of K nodes: every round doubles what a node has of those that
        follow it."""
        nodes = len(out_KM)
        node = self.mesh.ranks_per_node
        held_KM = torch.empty_like(out_KM)
        held_KM[:1] = own_1M
        have = 1
        while have < nodes:
            more = min(have, nodes - have)
            source = (place + have) % nodes * node
            target = (place - have) % nodes * node
            receiving = dist.irecv(held_KM[have : have + more], source, group=self.leaders)
            sending = dist.isend(held_KM[:more], target, group=self.leaders)
            assert receiving is not None
            assert sending is not None
            receiving.wait()
            sending.wait()
            have += more
        out_KM.copy_(held_KM.roll(place, 0))

    def close(self) -> None:
        """Let go of the process groups, together: a rank that leaves early breaks what the others
        still send."""
        dist.barrier()
        for group in (self.local, self.leaders):
            if group is not None:
                dist.destroy_process_group(group)


def make_scalars(mesh: MeshSettings, rank: int) -> Scalars:
    """Return the process groups for scalars; every rank calls this together."""
    node = mesh.ranks_per_node
    world = mesh.world
    leaders = list(range(0, world, node))
    local = None
    for leader in leaders if node > 1 else ():
        members = list(range(leader, leader + node))
        group = dist.new_group(members, timeout=TIMEOUT, backend="gloo")
        if rank in members:
            local = group
    between = dist.new_group(leaders, timeout=TIMEOUT, backend="gloo") if node < world else None
    return Scalars(mesh, rank, local, between if rank in leaders else None)

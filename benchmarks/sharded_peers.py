"""Peers of first-order training over ranks that ``sharded.py`` compares with this library: FSDP2 in
four settings, and DeepSpeed in two where it is installed.

FSDP2 wraps each block and the model, in float32 without recomputation. On gloo its reduce_scatter
moves the bytes of an all-reduce; a row with ``all_to_all`` is the same with the reduction that ours
uses, which moves what the formula says."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Batches = Sequence[Mapping[str, torch.Tensor]]
"""This rank's rows of each micro-batch."""


@dataclass(frozen=True)
class Peer:
    """A setting of FSDP2."""

    all_to_all: bool = True
    """Whether reductions move what their formula says, on gloo too."""
    hybrid: bool = False
    """HSDP: sharded in the node and replicated between nodes, whose all-reduce waits for the last
    micro-batch."""
    in_node: bool = False
    """Whether parameters stay sharded over the node between forward and backward
    (``reshard_after_forward`` = ranks of a node)."""


PEERS = {
    "fsdp2": Peer(all_to_all=False),
    "fsdp2-a2a": Peer(),
    "fsdp2-node": Peer(in_node=True),
    "hsdp": Peer(hybrid=True),
}
"""FSDP2 as it comes, then with reductions that move what its formula says; the other two are what
an expert would set on a slow link."""
_IN_NODE = {"deepspeed-zero3": (), "deepspeed-hpz": ("zero_hpz_partition_size",)}
"""DeepSpeed's settings that are a node's ranks, by system."""
DEEPSPEED = tuple(_IN_NODE) if importlib.util.find_spec("deepspeed") else ()
"""ZeRO-3, and with secondary shards in the node; none where DeepSpeed is not installed."""


class FullyShard:
    """A model under FSDP2 or HSDP, and its optimizer.

    Args:
        model: as transformers or PEFT made it.
        blocks: its decoder layers.
        max_norm: the global norm that gradients are clipped to; 0: none.
    """

    def __init__(
        self,
        peer: Peer,
        model: torch.nn.Module,
        blocks: Iterable[torch.nn.Module],
        batches: Batches,
        *,
        ranks_per_node: int,
        max_norm: float,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        world = dist.get_world_size()
        shape = (world // ranks_per_node, ranks_per_node) if peer.hybrid else (world,)
        names = ("replicate", "shard") if peer.hybrid else ("shard",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for module in [*blocks, model]:
            reshard = ranks_per_node if peer.in_node and module is not model else None
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            if peer.all_to_all:
                module.set_custom_reduce_scatter(AllToAll())  # type: ignore[attr-defined]
        self.peer = peer
        self.model: Any = model
        self.batches = batches
        self.max_norm = max_norm
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, weight_decay=0.0)

    def differentiate(self) -> None:
        """Add up the gradients of a step."""
        last = len(self.batches) - 1
        for k, batch in enumerate(self.batches):
            if self.peer.hybrid:
                self.model.set_requires_all_reduce(k == last)
            loss = self.model(**batch, use_cache=False).loss
            (loss / len(self.batches)).backward()

    def step(self) -> None:
        """Train one step."""
        self.differentiate()
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_(self.trained, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> int:
        """Return bytes of the slices that this rank holds when a step's gradients are there:
        parameters, gradients and optimizer states."""
        self.differentiate()
        tensors = [tensor for p in self.model.parameters() for tensor in (p, p.grad)]
        tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        self.optimizer.zero_grad()
        return sum(map(_local_bytes, tensors))


def _local_bytes(tensor: Any) -> int:
    """Return bytes of a rank's slice; 0 for a counter of steps, or nothing."""
    if tensor is None or not tensor.dim():
        return 0
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


class AllToAll:
    """A reduce-scatter of ``torch.distributed.fsdp`` that moves (G − 1)/G of its input."""

    def allocate(
        self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def deepspeed_step(
    system: str,
    model: torch.nn.Module,
    batches: Batches,
    arguments: argparse.Namespace,
    max_norm: float,
) -> Callable[[], None]:
    """Return a step of ZeRO-3 by DeepSpeed, float32; every parameter is cut, however small."""
    rank = dist.get_rank()
    node = arguments.ranks_per_node
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank % node,
        "WORLD_SIZE": dist.get_world_size(),
        "LOCAL_SIZE": node,
    }
    os.environ.update({name: str(value) for name, value in places.items()}, DS_ACCELERATOR="cpu")
    import deepspeed

    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0
    )
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "overlap_comm": True,
        **dict.fromkeys(_IN_NODE[system], node),
    }
    settings = {
        "train_micro_batch_size_per_gpu": arguments.rows,
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": max_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )

    def step() -> None:
        for batch in batches:
            engine.backward(engine(**batch, use_cache=False).loss)
            engine.step()

    return step


def sent(system: str, nodes: int, local: int, micro_batches: int, sizes: tuple[int, int]) -> float:
    """Return bytes that a node sends in a step of a peer by the published formulas, float32.

    Args:
        sizes: parameters, all and trained.
    """
    parameters, trained = sizes
    share_n = (nodes - 1) / nodes
    world = nodes * local
    share_g = (world - 1) / world
    if system in PEERS and PEERS[system].hybrid:
        return share_n * 4 * 2 * trained
    if system == "deepspeed-hpz":
        return share_g * 4 * (trained + micro_batches * trained)
    gathers = 1 if system in PEERS and PEERS[system].in_node else 2
    return micro_batches * share_g * 4 * (gathers * parameters + trained)


def own_rows(batch: Mapping[str, torch.Tensor], micro_batches: int) -> Iterator[dict[str, Any]]:
    """Yield this rank's rows of each micro-batch of a global batch."""
    world = dist.get_world_size()
    rank = dist.get_rank()
    for cut in zip(*(batch[key].chunk(micro_batches) for key in batch), strict=True):
        rows = (part.chunk(world)[rank] for part in cut)
        yield dict(zip(batch, rows, strict=True))

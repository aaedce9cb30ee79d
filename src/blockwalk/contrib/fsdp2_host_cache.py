"""A host cache and dirty flags behind FSDP2's public hook for all-gathers, for those who stay with
it.

Parameters then cross nodes once per optimizer step instead of twice per micro-batch; gradients are
still reduced as FSDP2 does. The first gather of a group after an optimizer step goes between nodes
(among ranks of equal local index), is kept on the host, and goes on inside the node; every later
one is read from the host and gathered inside the node. Groups without a trainable parameter stay
clean for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockwalk.ranks.groups import all_gather


@dataclass(eq=False)
class CachedAllGather:
    """All-gather of one FSDP2 group of parameters (``torch.distributed.fsdp``'s AllGather)."""

    between: dist.ProcessGroup
    inside: dist.ProcessGroup
    frozen: bool
    dirty: bool = True
    crossings: int = 0
    """Gathers that crossed nodes."""
    _host: Tensor = field(default_factory=lambda: torch.empty(0))

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """``input_tensor`` [P] of every rank into ``output_tensor`` [world · P], in the order of
        the ranks."""
        nodes = self.between.size()
        local = self.inside.size()
        numel = input_tensor.numel()
        assert group.size() == nodes * local, (
            f"{group.size()} ranks are gathered, and the mesh has {nodes} × {local}"
        )
        mine_NP = torch.empty(nodes, numel, dtype=input_tensor.dtype, device=input_tensor.device)
        if self.dirty or self._host.numel() != mine_NP.numel():
            all_gather(mine_NP.view(-1), input_tensor, group=self.between)
            if self._host.numel() != mine_NP.numel():
                pinned = input_tensor.device.type != "cpu"
                self._host = torch.empty(mine_NP.shape, dtype=mine_NP.dtype, pin_memory=pinned)
            self._host.copy_(mine_NP, non_blocking=True)
            self.dirty = False
            self.crossings += 1
        else:
            mine_NP.copy_(self._host, non_blocking=True)
        all_LNP = torch.empty(local, nodes, numel, dtype=mine_NP.dtype, device=mine_NP.device)
        all_gather(all_LNP.view(-1), mine_NP.view(-1), group=self.inside)
        output_tensor.view(nodes, local, numel).copy_(all_LNP.transpose(0, 1))


@dataclass(frozen=True)
class HostCache:
    """The cache that :func:`host_cache` installed; it marks every trainable parameter dirty after
    each optimizer step by itself."""

    gathers: tuple[CachedAllGather, ...]
    hook: Any

    def mark_dirty(self) -> None:
        """Parameters changed otherwise than by an optimizer of torch (a loaded checkpoint, say):
        gather all anew."""
        for gather in self.gathers:
            gather.dirty = True

    def remove(self) -> None:
        """Stop listening to optimizer steps; the model must not be used after."""
        self.hook.remove()


def host_cache(model: nn.Module, mesh: DeviceMesh) -> HostCache:
    """Put a host cache behind every FSDP2 module of ``model``.

    Args:
        model: after ``fully_shard`` of all its modules over the whole world.
        mesh: [nodes, ranks per node], ranks numbered node by node.

    Raises:
        ValueError: the mesh has not two dimensions, or nothing in the model is sharded by FSDP2.

    >>> cache = host_cache(model, init_device_mesh("cuda", (2, 8)))  # doctest: +SKIP
    """
    if mesh.ndim != 2:
        raise ValueError(f"the mesh has {mesh.ndim} dimensions; give [nodes, ranks per node]")
    made: list[CachedAllGather] = []
    for module, owned in _sharded(model):
        frozen = not any(parameter.requires_grad for parameter in owned)
        gather = CachedAllGather(mesh.get_group(0), mesh.get_group(1), frozen)
        module.set_custom_all_gather(gather)
        made.append(gather)
    if not made:
        raise ValueError("nothing in the model is sharded by FSDP2; call fully_shard first")

    def stepped(*_: object) -> None:
        for gather in made:
            gather.dirty = gather.dirty or not gather.frozen

    return HostCache(tuple(made), register_optimizer_step_post_hook(stepped))


def _sharded(model: nn.Module) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """FSDP2 modules that own parameters, with the parameters that are gathered with them."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    taken: set[int] = set()
    for module in reversed(modules):  # inner modules before those around them
        owned = [p for p in module.parameters() if id(p) not in taken]
        taken |= {id(p) for p in owned}
        if owned:
            yield module, owned

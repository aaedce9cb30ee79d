"""The tensors that a rank of a sharded run really keeps, counted one by one. Not a test."""

from __future__ import annotations

from typing import Any

import torch

from blockwalk.plan.placement import StateKind, Tier
from blockwalk.program.flat_layout import hosts_node_slice
from blockwalk.program.program import Pool


def held(engine: Any) -> dict[Pool, int]:
    """Bytes that this rank keeps between steps, without :func:`buffers`."""
    plan = engine.plan
    on = {Tier.DEVICE: Pool.DEVICE, Tier.HOST: Pool.HOST, Tier.DISK: Pool.DISK}
    node = Pool.HOST if hosts_node_slice(plan) else Pool.DEVICE
    kept: list[tuple[Pool, torch.Tensor | None]] = []
    for state in engine.trained.units.values():
        kept += [
            (on[plan.optimizer_state.tier], tensor)
            for tensor in (state.master, *state.moments.values())
        ]
        kept += [(Pool.DEVICE, state.gradient), (on[plan.gradient.tier], state.accumulator)]
    for home in engine.homes.values():
        kept += [
            pair for each in home.units for pair in ((node, each.node), (Pool.DEVICE, each.source))
        ]
    storages: dict[int, tuple[Pool, int]] = {}
    for pool, tensor in kept:
        if tensor is not None:
            storage = tensor.untyped_storage()
            number = storage.data_ptr() or storage._cdata  # on meta there is no address
            storages.setdefault(number, (pool, storage.nbytes()))
    return {
        pool: sum(n for home_pool, n in storages.values() if home_pool is pool) for pool in Pool
    }


def buffers(engine: Any) -> list[torch.Tensor]:
    """The slots and gradient buffers on the device."""
    return [
        *engine.gradients.buffers,
        *(buffer for home in engine.homes.values() for buffer in home.slots._buffers),
    ]


def numel(engine: Any) -> int:
    """Elements of all buckets, padding included."""
    return sum(
        unit_home.numel
        for part in StateKind
        if part in engine.homes
        for unit_home in engine.homes[part].units
    )


def masters(walker: Any) -> dict[str, torch.Tensor]:
    """The whole masters of a sharded run, on every rank, which call this together."""
    walker.flush()  # what is still refreshed is gathered over the same groups
    trained = walker.engine.trained
    by_unit = {unit: slices.master for unit, slices in trained.units.items()}
    return trained.part.whole(by_unit, walker.plan.optimizer_ranks)

"""Oracle: FSDP2 itself without the cache, bit for bit; gathers between nodes counted where they are
made."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from blockwalk.contrib.fsdp2_host_cache import host_cache
from tests.models import random_batch, tiny_model
from tests.ranks.processes import run_ranks


def _train(cached: bool) -> tuple[list[float], list[int]]:
    model: Any = tiny_model("llama")
    for parameter in model.model.layers[1].parameters():
        parameter.requires_grad_(False)
    world = init_device_mesh("cpu", (4,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=world)
    fully_shard(model, mesh=world)
    cache = host_cache(model, init_device_mesh("cpu", (2, 2))) if cached else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        for micro_batch in range(2):
            batch = random_batch(2, 8, seed=10 * step + micro_batch)
            loss: torch.Tensor = model(**batch, use_cache=False).loss / 2
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # as a loaded checkpoint would
        for parameter in model.parameters():
            parameter.mul_(0.5)
    if cache is not None:
        cache.mark_dirty()
    losses.append(float(model(**random_batch(2, 8), use_cache=False).loss.detach()))
    crossings = [] if cache is None else [gather.crossings for gather in cache.gathers]
    if cache is not None:
        cache.remove()
    return losses, crossings


def _both(rank: int) -> Any:
    return _train(False), _train(True)


def test_the_cache_changes_bytes_and_no_bit() -> None:
    """One gather between nodes per group and optimizer step, and one where weights changed
    otherwise; of a frozen block one in all, and that one."""
    for (plain, _), (cached, crossings) in run_ranks(4, _both):
        assert plain == cached
        assert sorted(crossings) == [2, 4, 4, 4]

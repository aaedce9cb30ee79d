"""Oracle: the numbers that every rank was given to tell, written out."""

from __future__ import annotations

import torch
import torch.distributed as dist

from blockwalk.plan.choices import MeshSettings
from blockwalk.ranks.scalars import make_scalars
from tests.support.processes import run_ranks


def _gathers(rank: int, ranks_per_node: int) -> list[list[list[float]]]:
    world = dist.get_world_size()
    scalars = make_scalars(MeshSettings(world=world, ranks_per_node=ranks_per_node), rank)
    first = scalars.gather(
        torch.tensor([rank + 0.1, -0.0, float("nan") if rank == 1 else 1e-300], dtype=torch.float64)
    )
    second = scalars.gather(torch.tensor([rank - 2**62], dtype=torch.int64))
    scalars.close()
    return [first.tolist(), second.tolist()]


def test_every_rank_hears_all_in_the_order_of_the_ranks() -> None:
    """Nodes of one to six ranks, of a number that is a power of two and of one that is not."""
    for ranks_per_node in (1, 2, 3, 6):
        for floats, integers in run_ranks(6, _gathers, ranks_per_node, timeout=60):
            told = [[rank + 0.1, -0.0, float("nan") if rank == 1 else 1e-300] for rank in range(6)]
            assert str(floats) == str(told)  # NaN and the sign of zero as well
            assert integers == [[rank - 2**62] for rank in range(6)]

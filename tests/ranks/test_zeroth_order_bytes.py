"""Oracle: the kernel's counters of each node's link."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from blockwalk import method
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.cluster import cluster, sent_bytes

STEPS = 20


def _sent(rank: int, hidden: int, ranks_per_node: int) -> tuple[int, int]:
    """Bytes that this rank's node sends in twenty steps, and the model's parameters."""
    plan = method("distzo2", mesh={"world": 2 * ranks_per_node, "ranks_per_node": ranks_per_node})
    model = tiny_model("llama", hidden_size=hidden)
    with Walker(model, plan, device="cpu") as walker:
        walker.step(random_batch(8))
        dist.barrier()
        began = sent_bytes()
        for step in range(STEPS):
            walker.step(random_batch(8, seed=step))
        sent = sent_bytes() - began
        dist.barrier()
        return sent, walker.spec.numel()


@pytest.mark.root
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_nodes_send_each_other_a_kilobyte_a_rank_and_step_whatever_the_model(
    ranks_per_node: int,
) -> None:
    with cluster(2, ranks_per_node) as nodes:
        sizes = []
        for hidden in (32, 256):
            answers = nodes.run(_sent, hidden, ranks_per_node)
            sizes.append(answers[0][1])
            for sent, _ in answers:
                assert sent / ranks_per_node / STEPS <= 1024
        assert sizes[1] > 8 * sizes[0]

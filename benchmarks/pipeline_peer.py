"""A step by torch.distributed.pipelining with FSDP2 beside ours, in turns: two stages of two ranks,
a stage a node, no recomputation.

FSDP2 runs twice: with blocks that stay whole on the device after their first gather of a step
(``reshard_after_forward=False``, what torchtitan sets with pipelines), and with blocks that are
gathered for every forward and backward. In both, torch's stages add up whole gradients and reduce
them once a step. Ours keeps the parameters of a chunk from one micro-batch to the next, and with
``pipeline.shared_sums`` its gradients; nothing else is whole."""

from __future__ import annotations

import copy
import time
import traceback
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.cluster import cluster

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 2048,
}
MICRO_BATCHES = 8
TOKENS = 256
RATES = (None, "200mbit")
"""What each node may send."""
ROUNDS = 5
STAGES = 2
RANKS = 2
"""Ranks of a stage."""
_BLOCKS = SIZES["num_hidden_layers"] // STAGES
_LEARNING_RATE = 1e-3


class _Stage(nn.Module):
    """The blocks of a stage, with the embeddings or the head."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        inner = model.model
        blocks = range(number * _BLOCKS, (number + 1) * _BLOCKS)
        last = number == STAGES - 1
        self.embed = None if number else inner.embed_tokens
        self.layers = nn.ModuleList(inner.layers[k] for k in blocks)
        self.rotary = inner.rotary_emb
        self.norm = inner.norm if last else None
        self.head = model.lm_head if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x if self.embed is None else self.embed(x)
        places = torch.arange(hidden.shape[1])[None]
        rope = self.rotary(hidden, places)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rope, attention_mask=None)
        if self.head is None or self.norm is None:
            return hidden
        answer: torch.Tensor = self.head(self.norm(hidden))
        return answer


class _Peer:
    """Torch's 1F1B over stages whose modules FSDP2 shards, or over stages alone."""

    def __init__(self, model: nn.Module, rank: int, *, fsdp: bool, reshard: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        mesh = init_device_mesh("cpu", (STAGES, RANKS), mesh_dim_names=("pp", "dp"))
        self.number = rank // RANKS
        module = _Stage(model, self.number)
        if fsdp:
            for layer in module.layers:
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard)
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
        self.optimizer = torch.optim.AdamW(module.parameters(), _LEARNING_RATE, weight_decay=0.0)
        stage = PipelineStage(
            module, self.number, STAGES, torch.device("cpu"), group=mesh.get_group("pp")
        )
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_loss)

    def step(self, ids: torch.Tensor) -> float:
        """Train one step on this rank's rows; return the mean of its losses, on the last stage."""
        losses: list[torch.Tensor] = []
        if self.number == 0:
            self.schedule.step(ids)
        else:
            self.schedule.step(target=ids, losses=losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / MICRO_BATCHES


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _timed(rank: int, peers: dict[str, dict[str, bool]]) -> dict[str, Any]:
    """Return seconds and losses of each system's steps, and the error of what does not run."""
    model = tiny_model("llama", **SIZES)
    plan = method(
        "zero3",
        mesh={"world": STAGES * RANKS, "ranks_per_node": RANKS, "pipeline": STAGES},
        gradient_accumulation_steps=MICRO_BATCHES,
        recompute="none",
        pipeline={"blocks": [_BLOCKS] * STAGES},
        optimizer={"learning_rate": _LEARNING_RATE, "weight_decay": 0.0, "max_grad_norm": 0.0},
    )
    generator = torch.Generator().manual_seed(1)
    shape = (MICRO_BATCHES, RANKS, TOKENS)
    ids = torch.randint(3, SIZES["vocab_size"], shape, generator=generator)
    rows = ids.flatten(0, 1)
    batch = {"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)}
    own = ids[:, rank % RANKS].contiguous()
    errors: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    summed = replace(plan, pipeline=replace(plan.pipeline, shared_sums=True))
    with (
        Walker(copy.deepcopy(model), plan, device="cpu") as walker,
        Walker(copy.deepcopy(model), summed, device="cpu") as summing,
    ):
        systems: dict[str, Any] = {
            "ours": lambda: walker.step(batch).loss,
            "ours, shared sums": lambda: summing.step(batch).loss,
        }
        for name, settings in peers.items():
            try:
                peer = _Peer(copy.deepcopy(model), rank, **settings)
            except Exception:  # the text is the answer
                errors[name] = traceback.format_exc()
            else:
                systems[name] = lambda peer=peer: peer.step(own)
        for turn in range(ROUNDS + 1):
            for name, step in systems.items():
                dist.barrier()
                began = time.perf_counter()
                loss = step()
                dist.barrier()
                if turn:  # the first of each makes its buffers
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
                losses.setdefault(name, []).append(loss)
    return {"seconds": seconds, "losses": losses, "errors": errors}


PEERS = {
    "pipelining with FSDP2": {"fsdp": True, "reshard": False},
    "pipelining with FSDP2, resharded": {"fsdp": True, "reshard": True},
}


def rounds(rate: str | None) -> dict[str, Any]:
    """Take steps of ours and of the peers in turn, with a limit to what each node sends; the peer
    to beat is the faster one."""
    certified(tiny_model("llama", **SIZES))
    with cluster(STAGES, RANKS) as nodes:
        nodes.limit(rate)
        answers = nodes.run(_timed, PEERS, timeout=450)
    answer = answers[-1]
    best = min(PEERS, key=lambda name: sorted(answer["seconds"][name])[ROUNDS // 2])
    losses = {}
    for name in answer["losses"]:
        of_ranks = zip(*(of_rank["losses"][name] for of_rank in answers[-RANKS:]), strict=True)
        losses[name] = [sum(of_step) / RANKS for of_step in of_ranks]
    return {
        "seconds": answer["seconds"],
        "losses": losses,
        "peer": best,
        "errors": answer["errors"],
    }

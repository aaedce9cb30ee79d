"""Steps of first-order training over ranks that ``sharded.py`` compares: this library's methods,
FSDP2, FSDP2 with its reductions by all-to-all, and DeepSpeed's ZeRO-3 with secondary shards in the
node (hpZ) where it is installed.

FSDP2 is ZeRO-3 (``reshard_after_forward``) in float32 without recomputation, as it comes. On gloo
its reduce_scatter moves the bytes of an all-reduce; ``fsdp2-a2a`` is the same with the reduction
that ours uses, which moves what the formula says."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 1024
PEERS = ("fsdp2", "fsdp2-a2a")
"""FSDP2, as it comes and with reductions that move what its formula says."""
DEEPSPEED = "deepspeed-hpz"


@dataclass(frozen=True)
class Case:
    """One system on one task."""

    system: str
    lora: bool
    micro_batches: int

    @property
    def task(self) -> str:
        return f"{'LoRA' if self.lora else 'full'} A={self.micro_batches}"

    def __str__(self) -> str:
        return f"{self.system} {self.task}"


def make_model(arguments: argparse.Namespace, lora: bool) -> torch.nn.Module:
    """A random Llama; LoRA of rank 8 on the attention's four projections."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=targets))
    return model


def global_batch(arguments: argparse.Namespace, case: Case, world: int) -> dict[str, torch.Tensor]:
    """Of one optimizer step: ``--rows`` sequences for each rank and micro-batch, int64 [B, S]."""
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows * world * case.micro_batches, arguments.sequence)
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass
class Run:
    """A system ready to step on this rank."""

    step: Callable[[], Any]
    walker: Any = None
    """None for a peer."""

    def close(self) -> None:
        if self.walker is not None:
            self.walker.close()


def open_run(arguments: argparse.Namespace, case: Case) -> Run:
    batch = global_batch(arguments, case, dist.get_world_size())
    if case.system in PEERS:
        return Run(_fsdp_step(arguments, case, batch))
    if case.system == DEEPSPEED:
        return Run(_deepspeed_step(arguments, case, batch))
    from blockwalk.plan.methods import method
    from blockwalk.walk.walker import Walker

    mesh = {"world": dist.get_world_size(), "ranks_per_node": arguments.ranks_per_node}
    plan = method(
        case.system,
        mesh=mesh,
        gradient_accumulation_steps=case.micro_batches,
        recompute=arguments.recompute,
        prefetch=arguments.prefetch,
    )
    walker = Walker(make_model(arguments, case.lora), plan, device="cpu")
    return Run(lambda: walker.step(batch), walker)


def _fsdp_step(
    arguments: argparse.Namespace, case: Case, batch: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """ZeRO-3 by PyTorch, gradients reduced in every micro-batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(arguments, case.lora)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base: Any = model.get_base_model() if case.lora else model  # type: ignore[operator]
    sharded = [*base.model.layers, model]
    for module in sharded:
        fully_shard(module, mesh=mesh)
        if case.system == "fsdp2-a2a":
            module.set_custom_reduce_scatter(AllToAll())
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0
    )
    parts = _own(batch, case)

    def step() -> None:
        for part in parts:
            (model(**part, use_cache=False).loss / case.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed_step(
    arguments: argparse.Namespace, case: Case, batch: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """ZeRO-3 by DeepSpeed, float32; every parameter is cut, however small."""
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

    model = make_model(arguments, case.lora)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0
    )
    zero = {
        "stage": 3,
        "zero_hpz_partition_size": arguments.ranks_per_node,
        "stage3_param_persistence_threshold": 0,
        "overlap_comm": True,
    }
    settings = {
        "train_micro_batch_size_per_gpu": arguments.rows,
        "gradient_accumulation_steps": case.micro_batches,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    parts = _own(batch, case)

    def step() -> None:
        for part in parts:
            engine.backward(engine(**part, use_cache=False).loss)
            engine.step()

    return step


def _own(batch: Mapping[str, torch.Tensor], case: Case) -> list[dict[str, torch.Tensor]]:
    """This rank's rows of each micro-batch."""
    world = dist.get_world_size()
    rank = dist.get_rank()
    cuts = zip(*(batch[key].chunk(case.micro_batches) for key in batch), strict=True)
    return [
        dict(zip(batch, (each.chunk(world)[rank] for each in cut), strict=True)) for cut in cuts
    ]


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


def formula(case: Case, nodes: int, local: int, parameters: int, trained: int) -> float:
    """Bytes that a node sends by the published formulas, float32."""
    share_n = (nodes - 1) / nodes
    world = nodes * local
    share_g = (world - 1) / world
    a = case.micro_batches
    if case.system in PEERS:
        return a * share_g * 4 * (2 * parameters + trained)
    if case.system == "zero3":
        return a * share_n * 4 * (2 * parameters + trained)
    if case.system == DEEPSPEED:
        return share_g * 4 * (trained + a * trained)
    if case.system == "zeropp":
        return share_n * 4 * (trained + a * trained)
    return share_n * 4 * 2 * trained


def limit(rate: str | None) -> None:
    """Limit what the calling rank's node sends, such as ``"200mbit"``; None lifts it. One rank of
    each node calls this. What may leave at once is little beside a step's bytes: 256 KB from 200
    Mbit/s on, below 32 KB."""
    program = ("tc", "qdisc")
    subprocess.run([*program, "del", "dev", "eth0", "root"], capture_output=True, check=False)
    if rate is not None:
        burst = "256kb" if bits(rate) >= 200e6 else "32kb"
        shape = ("tbf", "rate", rate, "burst", burst, "latency", "50ms")
        subprocess.run([*program, "add", "dev", "eth0", "root", *shape], check=True)


def bits(rate: str) -> float:
    """Bits a second of tc's ``100mbit`` or ``1gbit``; no limit is infinite."""
    if rate == "unshaped":
        return float("inf")
    match = re.fullmatch(r"(\d+)([kmg])bit", rate)
    if match is None:
        raise ValueError(f"{rate!r} is no rate; write it like 200mbit")
    return int(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]

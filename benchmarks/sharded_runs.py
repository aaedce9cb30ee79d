"""Steps of first-order training over ranks that ``sharded.py`` compares: this library's methods and
the peers of ``sharded_peers.py``."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.sharded_peers import DEEPSPEED, PEERS, FullyShard, deepspeed_step, own_rows, sent

VOCABULARY = 1024
TOGETHER = " together"
"""What ends the name of a method whose micro-batches visit each block together."""
PAIRS = " over pairs"
"""What ends the name of a method that spreads all state over groups of two ranks."""


@dataclass(frozen=True)
class Case:
    """One system on one task."""

    system: str
    lora: bool
    micro_batches: int
    max_norm: float = 0.0
    """The global norm that gradients are clipped to; 0: none."""

    @property
    def task(self) -> str:
        clipped = ", clipped" if self.max_norm else ""
        return f"{'LoRA' if self.lora else 'full'} A={self.micro_batches}{clipped}"

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
    held: Callable[[], int] | None = None
    """Bytes that a peer's rank holds, where it tells."""

    def settle(self) -> None:
        """Wait for what goes on when a step has ended: ours refreshes slices then."""
        if self.walker is not None:
            self.walker.flush()

    def close(self) -> None:
        if self.walker is not None:
            self.walker.close()


def open_run(arguments: argparse.Namespace, case: Case) -> Run:
    batch = global_batch(arguments, case, dist.get_world_size())
    model = make_model(arguments, case.lora)
    batches = list(own_rows(batch, case.micro_batches))
    if case.system in PEERS:
        base: Any = model.get_base_model() if case.lora else model  # type: ignore[operator]
        sharded = FullyShard(
            PEERS[case.system],
            model,
            base.model.layers,
            batches,
            ranks_per_node=arguments.ranks_per_node,
            max_norm=case.max_norm,
        )
        return Run(sharded.step, held=sharded.held)
    if case.system in DEEPSPEED:
        return Run(deepspeed_step(case.system, model, batches, arguments, case.max_norm))
    from blockwalk.plan.methods import method
    from blockwalk.walk.walker import Walker

    name = case.system.removesuffix(TOGETHER).removesuffix(PAIRS)
    mesh = {"world": dist.get_world_size(), "ranks_per_node": arguments.ranks_per_node}
    settings: dict[str, Any] = {}
    if case.system.endswith(TOGETHER):
        settings["together"] = case.micro_batches
    if case.system.endswith(PAIRS):
        mesh["groups"] = ["pair=2"]
        kinds = ("frozen", "trainable", "gradient", "optimizer_state")
        settings |= {f"{kind}.group": "pair" for kind in kinds}
    plan = method(
        name,
        mesh=mesh,
        gradient_accumulation_steps=case.micro_batches,
        recompute=arguments.recompute,
        prefetch=arguments.prefetch,
        optimizer={"max_grad_norm": case.max_norm},
        **settings,
    )
    walker = Walker(model, plan, device="cpu")
    return Run(lambda: walker.step(batch), walker)


def formula(case: Case, nodes: int, local: int, parameters: int, trained: int) -> float:
    """Bytes that a node sends by the published formulas, float32."""
    share_n = (nodes - 1) / nodes
    a = case.micro_batches
    if case.system in PEERS or case.system in DEEPSPEED:
        return sent(case.system, nodes, local, a, (parameters, trained))
    if case.system == "zero3":
        return a * share_n * 4 * (2 * parameters + trained)
    if case.system == "zeropp":
        return share_n * 4 * (trained + a * trained)
    return share_n * 4 * 2 * trained


def wire_seconds(arguments: argparse.Namespace, case: Case, rate: str | None) -> float:
    """Seconds that the bytes of a step take between two nodes at a rate."""
    hidden = arguments.hidden
    block = 4 * hidden * hidden + 3 * hidden * (hidden * 8 // 3)
    parameters = arguments.layers * block + 2 * VOCABULARY * hidden
    trained = arguments.layers * 4 * 2 * hidden * 8 if case.lora else parameters
    nbytes = formula(case, 2, arguments.ranks_per_node, parameters, trained)
    return nbytes * 8 / bits(rate or "unshaped")


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

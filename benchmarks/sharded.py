"""First-order training over two nodes: bytes between them, seconds at several rates, overlap; FSDP2 beside it.

    sudo python benchmarks/sharded.py [--check] [--json FILE] [--rates 10mbit,100mbit,200mbit,1gbit]

Nodes are network namespaces joined by a bridge (root), ranks are processes with one thread each, bytes are the kernel's on
each node's link. FSDP2 is ZeRO-3 (``reshard_after_forward``) in float32 without recomputation, as it comes; gloo's
reduce_scatter moves the bytes of an all-reduce, so its column is also given as its formula has it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, median, parser, random_batch

from tests.ranks.cluster import Cluster, cluster, sent_bytes

OURS = ("zero3", "zeropp", "mics", "fcdp", "hzp")
BOUNDED = ("fcdp", "hzp")


@dataclass(frozen=True)
class Case:
    """One system on one task."""

    system: str
    lora: bool
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.system} {'LoRA' if self.lora else 'full'} A={self.micro_batches}"


def make_model(arguments: argparse.Namespace, lora: bool) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        vocab_size=1024,
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


def our_step(arguments: argparse.Namespace, case: Case) -> tuple[Callable[[Mapping[str, torch.Tensor]], Any], Any]:
    from blockwalk.methods import method
    from blockwalk.walker import Walker

    mesh = {"world": dist.get_world_size(), "ranks_per_node": arguments.ranks_per_node}
    plan = method(
        case.system,
        mesh=mesh,
        gradient_accumulation_steps=case.micro_batches,
        recompute=arguments.recompute,
        prefetch=arguments.prefetch,
    )
    walker = Walker(make_model(arguments, case.lora), plan, device="cpu")
    return walker.step, walker


def fsdp_step(arguments: argparse.Namespace, case: Case) -> tuple[Callable[[Mapping[str, torch.Tensor]], Any], Any]:
    """ZeRO-3 by PyTorch, gradients reduced in every micro-batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(arguments, case.lora)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base: Any = model.get_base_model() if case.lora else model  # type: ignore[operator]
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0)
    world, rank = dist.get_world_size(), dist.get_rank()

    def step(batch: Mapping[str, torch.Tensor]) -> None:
        parts = [{k: part.chunk(world)[rank] for k, part in zip(batch, parts, strict=True)}
                 for parts in zip(*(batch[k].chunk(case.micro_batches) for k in batch), strict=True)]  # fmt: skip
        for part in parts:
            (model(**part, use_cache=False).loss / case.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, None


def measure(
    rank: int, arguments: argparse.Namespace, cases: list[Case], steps: int, traced: bool
) -> list[dict[str, Any]]:
    """Bytes that this rank's node sends in a steady step, seconds of each, and the lanes' own times."""
    found = []
    for case in cases:
        step, walker = (fsdp_step if case.system == "fsdp2" else our_step)(arguments, case)
        batch = random_batch(1024, arguments.batch, arguments.sequence)
        step(batch)
        step(batch)
        dist.barrier()
        before, seconds = sent_bytes(), []
        dist.barrier()
        if traced and walker is not None:
            walker.timeline = []
        for _ in range(steps):
            began = time.perf_counter()
            step(batch)
            dist.barrier()
            seconds.append(time.perf_counter() - began)
        figures: dict[str, Any] = {"bytes": (sent_bytes() - before) / steps, "seconds": seconds}
        if traced and walker is not None:
            figures["hidden"] = statistics.median(hidden_share(ops) for _, ops in walker.timeline)
        if walker is not None:
            figures["trained"] = walker.spec.numel(trainable=True)
            figures["parameters"] = walker.spec.numel()
            walker.close()
        dist.barrier()
        found.append(figures)
    return found


def hidden_share(ops: list[tuple[Any, float, float]]) -> float:
    """Of the time that the communication lanes were busy, the share in which the compute lane was busy as well."""
    busy = [(began, ended) for op, began, ended in ops if op.lane == "compute"]
    total = hidden = 0.0
    for op, began, ended in ops:
        if op.lane in ("intra-node", "inter-node"):
            total += ended - began
            hidden += sum(max(0.0, min(ended, e) - max(began, b)) for b, e in busy)
    return hidden / total if total else 1.0


def on(
    nodes: Cluster,
    arguments: argparse.Namespace,
    cases: list[Case],
    rate: str | None,
    *,
    steps: int,
    traced: bool = False,
) -> dict[Case, dict[str, Any]]:
    """The worst of all nodes: most bytes, longest steps."""
    nodes.limit(rate)
    answers = nodes.run(measure, arguments, cases, steps, traced, timeout=900)
    return {
        case: {
            **answers[0][k],
            "bytes": max(answer[k]["bytes"] for answer in answers),
            "seconds": median(
                [max(times) for times in zip(*(answer[k]["seconds"] for answer in answers), strict=True)]
            ),
        }
        for k, case in enumerate(cases)
    }


def formula(case: Case, nodes: int, local: int, parameters: int, trained: int) -> float:
    """Bytes that a node sends by the published formulas, float32."""
    share_n, world = (nodes - 1) / nodes, nodes * local
    share_g, a = (world - 1) / world, case.micro_batches
    if case.system == "fsdp2":
        return a * share_g * 4 * (2 * parameters + trained)
    if case.system == "zero3":
        return a * share_n * 4 * (2 * parameters + trained)
    if case.system == "zeropp":
        return share_n * 4 * (trained + a * trained)
    return share_n * 4 * 2 * trained


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--ranks-per-node", type=int, default=2)
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--layers", type=int, default=6)
    made.add_argument("--batch", type=int, default=16)
    made.add_argument("--sequence", type=int, default=32)
    made.add_argument("--steps", type=int, default=3)
    made.add_argument("--prefetch", type=int, default=2)
    made.add_argument("--recompute", default="none", help="none, as FSDP2 does; all trades compute for memory")
    made.add_argument("--rates", default="200mbit", help="rates at which steps are timed, besides none")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    from blockwalk.blocks import CutModel

    for lora in (False, True):
        CutModel(make_model(arguments, lora))  # certified once, before ranks are forked
    tasks = list(itertools.product((False, True), (1, 4)))
    cases = [Case(system, lora, a) for lora, a in tasks for system in (*OURS, "fsdp2")]
    figures: dict[str, Any] = {"bytes": {}, "seconds": {}, "hidden": {}}
    bounds: list[Bound] = []
    count, local = 2, arguments.ranks_per_node
    with cluster(count, local) as nodes:
        counted = on(nodes, arguments, cases, None, steps=1)
        sizes = {lora: counted[Case("fcdp", lora, 1)] for lora in (False, True)}
        print(
            f"{sizes[False]['parameters'] / 1e6:.1f}M parameters; MB sent by a node per optimizer step, {count}×{local}"
        )
        for case, each in counted.items():
            size = sizes[case.lora]
            expected = formula(case, count, local, size["parameters"], size["trained"])
            figures["bytes"][str(case)] = {"measured": each["bytes"], "formula": expected}
            print(f"  {case!s:<20} {each['bytes'] / 1e6:>9.3f}   formula {expected / 1e6:>9.3f}")
            if case.system in BOUNDED:
                least = (count - 1) / count * 8 * size["trained"]
                bounds.append(Bound(f"bytes of {case}", each["bytes"], 1.02 * least + 16_384))
        raced = [Case(system, lora, a) for lora, a in tasks for system in ("fcdp", "hzp", "fsdp2")]
        for rate in (None, *filter(None, arguments.rates.split(","))):
            timed = on(nodes, arguments, raced, rate, steps=arguments.steps, traced=True)
            print(f"seconds per step, {rate or 'unshaped'}")
            for lora, a in tasks:
                row = {system: timed[Case(system, lora, a)] for system in ("fsdp2", "fcdp", "hzp")}
                best = min(row["fcdp"]["seconds"], row["hzp"]["seconds"])
                ratio = row["fsdp2"]["seconds"] / best
                times = "  ".join(f"{name} {each['seconds']:.3f}" for name, each in row.items())
                label = f"{'LoRA' if lora else 'full'} A={a}"
                print(f"  {label}: {times}  ratio {ratio:.2f}  hidden {row['hzp']['hidden']:.2f}")
                figures["seconds"][f"{label} {rate}"] = {name: each["seconds"] for name, each in row.items()}
                figures["hidden"][f"{label} {rate}"] = row["hzp"]["hidden"]
                if rate is None:
                    bounds.append(Bound(f"FSDP2 / ours, unshaped, {label}", ratio, 0.95, at_most=False))
                elif rate == "200mbit":
                    least = 8.0 if lora else 2.0 if a == 1 else 6.0
                    bounds.append(Bound(f"FSDP2 / ours at {rate}, {label}", ratio, least, at_most=False))
        nodes.limit(None)
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

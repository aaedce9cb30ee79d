"""Zeroth order over ranks: equality, bytes between two nodes, speed-up of two ranks, sliced uploads, host memory.

    sudo python benchmarks/dist_zo.py [--check] [--json FILE] [--parts equal,bytes,speed,slices,host]

Ranks are processes with one thread each, joined by gloo; nodes are network namespaces joined by a bridge (root), and bytes
are the kernel's on each node's link. Speed is the median of interleaved steps; it needs cores that nobody else uses.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, median, parser, random_batch

from blockwalk import method
from blockwalk.walker import Walker
from tests.ranks.cluster import cluster, sent_bytes
from tests.ranks.processes import run_ranks

VOCAB = 1024
PARTS = ("equal", "bytes", "speed", "slices", "host")
Mesh = dict[str, int]


def make_walker(arguments: argparse.Namespace, mesh: Mesh, **settings: Any) -> Walker:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "opt", hidden_size=arguments.hidden, word_embed_proj_dim=arguments.hidden, ffn_dim=4 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=4, vocab_size=VOCAB, max_position_embeddings=512,
        dropout=0.0, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    return Walker(model, method("distzo2", mesh=mesh, seed=1, **settings), device="cpu")


def digest(walker: Walker) -> str:
    """Of the weights, and of every scalar that led to them."""
    walker.flush()
    seen = hashlib.sha256(repr(walker.estimator.entries).encode())  # type: ignore[union-attr]
    for name, weight in walker.engine.buckets.weights().items():
        assert isinstance(weight, torch.Tensor)
        seen.update(name.encode() + weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def steps(rank: int, arguments: argparse.Namespace, mesh: Mesh, settings: dict[str, Any]) -> dict[str, Any]:
    """A few steps: seconds of each, bytes that this rank's node sent in each, memory, and what came of them."""
    with make_walker(arguments, mesh, **settings) as walker:
        batches = [random_batch(VOCAB, arguments.batch, arguments.sequence, seed=step) for step in range(arguments.steps + 1)]
        walker.step(batches[0])
        if mesh:
            dist.barrier()
        cluster_node = arguments.counts
        seconds, began = [], sent_bytes() if cluster_node else 0
        for batch in batches[1:]:
            start = time.perf_counter()
            walker.step(batch)
            seconds.append(time.perf_counter() - start)
        sent = (sent_bytes() - began) / arguments.steps if cluster_node else 0.0
        held = sum(len(walker.engine.buckets.tier.bucket(u)) for u in walker.engine.buckets.streamed)  # type: ignore[union-attr]
        return {"seconds": median(seconds), "sent": sent, "digest": digest(walker), "held": held, "pss": pss()}


def pss() -> int:
    """The kernel's proportional set size of this process, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def uploads(rank: int, arguments: argparse.Namespace, mesh: Mesh, settings: dict[str, Any]) -> tuple[float, float]:
    """Parameters a second that come to the device (gather included), and that go back to the host."""
    with make_walker(arguments, mesh, **settings) as walker:
        buckets = walker.engine.buckets
        units = sorted(buckets.streamed)
        numel = sum(walker.spec.units[unit].numel() for unit in units)
        up, down = [], []
        for _ in range(arguments.steps + 1):
            dist.barrier()
            start = time.perf_counter()
            for unit in units:
                buckets.fetch(unit, 0)
                if buckets.sliced(unit):
                    buckets.gather(unit)
            dist.barrier()
            middle = time.perf_counter()
            for unit in units:
                buckets.store(unit)
            dist.barrier()
            up.append(middle - start)
            down.append(time.perf_counter() - middle)
        return numel / median(up[1:]), numel / median(down[1:])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", default=",".join(PARTS))
    for name, default in (("hidden", 256), ("layers", 4), ("batch", 8), ("sequence", 64), ("steps", 5), ("rounds", 3)):
        options.add_argument(f"--{name}", type=int, default=default)
    arguments = options.parse_args()
    arguments.counts = False
    torch.set_num_threads(1)
    parts = arguments.parts.split(",")
    figures: dict[str, Any] = {}
    bounds: list[Bound] = []

    def run(world: int, mesh: Mesh, **settings: Any) -> list[Any]:
        return run_ranks(world, steps, arguments, {"world": world, **mesh}, settings, timeout=600)

    if "equal" in parts:
        cases: list[tuple[str, int, Mesh, dict[str, Any]]] = [
            ("2 perturb", 2, {"perturb": 2}, {}),
            ("2 data", 2, {"data": 2}, {"gradient_accumulation_steps": 1}),
            ("4: 2 × 2", 4, {"data": 2, "perturb": 2, "slice": 1}, {}),
            ("4: slice 2, 2 × 2", 4, {"data": 2, "perturb": 2, "slice": 2}, {}),
            ("8: perturb 8, q = 4", 8, {"perturb": 8}, {"zo.queries": 4}),
        ]
        for name, world, mesh, settings in cases:
            alone = steps(0, arguments, {}, {**settings, "gradient_accumulation_steps": mesh.get("data", 1)})["digest"]
            same = sum(found["digest"] == alone for found in run(world, mesh, **settings))
            figures[f"equal {name}"] = same
            bounds.append(Bound(f"{name}: ranks equal to one process", same, world, at_most=False))
    if "bytes" in parts:
        arguments.counts = True
        rates: dict[str, float] = {}
        with cluster(2, 1) as nodes:
            for rate in (None, "1mbit"):
                nodes.limit(rate)
                answers = nodes.run(steps, arguments, {"world": 2, "ranks_per_node": 1}, {}, timeout=600)
                sent = max(found["sent"] for found in answers)
                rates[str(rate)] = answers[0]["seconds"]
                figures[f"bytes a step and rank, {rate or 'unshaped'}"] = sent
                bounds.append(Bound(f"bytes a step and rank between nodes, {rate or 'unshaped'}", sent, 1024))
        bounds.append(Bound("throughput at 1 Mbit/s / unshaped", rates["None"] / rates["1mbit"], 0.95, at_most=False))
        arguments.counts = False
    if "speed" in parts:
        found: dict[str, list[float]] = {"1": [], "perturb 2": [], "data 2": []}
        for _ in range(arguments.rounds):
            found["1"].append(run_ranks(1, steps, arguments, {}, {})[0]["seconds"])
            found["perturb 2"].append(run(2, {"perturb": 2})[0]["seconds"])
            found["data 2"].append(run(2, {"data": 2})[0]["seconds"])
        for name in ("perturb 2", "data 2"):
            figures[f"speed-up {name}"] = median(found["1"]) / median(found[name])
            bounds.append(Bound(f"speed-up of {name}", figures[f"speed-up {name}"], 1.9, at_most=False))
    if "slices" in parts:
        for name, slices in (("whole", 1), ("sliced", 4)):
            answers = run_ranks(4, uploads, arguments, {"world": 4, "slice": slices}, {}, timeout=600)
            up, down = answers[0]
            figures[f"{name}, parameters a second"] = {"upload": up, "offload": down}
            print(f"{name:7} upload {up / 1e6:8.0f} M parameters/s   offload {down / 1e6:8.0f} M parameters/s")
    if "host" in parts:
        held = {slices: run(4, {"slice": slices}) for slices in (1, 4)}
        whole, quarter = held[1][0], held[4][0]
        figures["host bytes"] = {"whole": whole["held"], "quarter": quarter["held"], "pss": [whole["pss"], quarter["pss"]]}
        bounds.append(Bound("host bytes of a slice / a copy", quarter["held"] / whole["held"], 0.26))
        saved = (whole["pss"] - quarter["pss"]) / whole["held"]
        bounds.append(Bound("PSS saved / bytes of a copy (0.75 less noise)", saved, 0.6, at_most=False))
    for name, figure in figures.items():
        print(f"{name:42} {figure}")
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

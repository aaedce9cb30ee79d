"""Predicted against published: the rows of benchmarks/data, and rows that are not in it, by the simulator alone.

One efficiency constant a table is fitted, on one row, and printed. No weight is made and no torch needed.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockwalk.compile import Costs, Pending, compile
from blockwalk.methods import method
from blockwalk.plan import Plan
from blockwalk.program import Lane, OpKind, Pool, Shape, StepKind
from blockwalk.simulate import analytic, hardware
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.simulator import Simulation, simulate

DATA = Path(__file__).parent / "data"
NOISE_RATE = 2.5e11
"""Elements a second of the published programs' ``torch.normal`` and in-place addition: the memory's bandwidth, 6 bytes each."""

CONTEXT_MB = 450.0
"""What a CUDA context and its libraries hold, which published memory figures (nvidia-smi) count and programs do not."""

OPT = {"1.3B": (24, 32, 2048), "2.7B": (32, 32, 2560), "6.7B": (32, 32, 4096), "13B": (40, 40, 5120),
       "30B": (48, 56, 7168), "66B": (64, 72, 9216), "175B": (96, 96, 12288)}  # fmt: skip
SEED_OSS = {"Seed-OSS-9B": (36, 4096, 12288), "Seed-OSS-36B": (64, 5120, 27648)}
"""Layers, hidden and feed-forward sizes; the 9B is not published in detail and taken to scale."""


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def opt(size: str, dtype: str) -> dict[str, Any]:
    layers, heads, dim = OPT[size]
    return {"model_type": "opt", "hidden_size": dim, "ffn_dim": 4 * dim, "num_hidden_layers": layers, "dtype": dtype,
            "num_attention_heads": heads, "vocab_size": 50272, "max_position_embeddings": 2048}  # fmt: skip


def run(config: dict[str, Any], plan: Plan, shape: Shape, machine: Hardware, *, lora_rank: int | None = None) -> Simulation:
    model = analytic.model_spec(config, lora_rank=lora_rank)
    costs: Costs = analytic.costs(config, plan, shape, lora_rank=lora_rank, device="cuda")
    program = compile(plan, model, StepKind.TRAIN, shape, costs=costs, pending=steady(plan), device="cuda")
    return simulate(program, plan, model, machine, costs)


def steady(plan: Plan) -> Pending:
    """The updates that a step of a long run finds."""
    return Pending(1, flush=True) if plan.update.timing == "deferred" else Pending()


def megabytes(found: Simulation) -> float:
    return found.peaks.get(Pool.DEVICE, 0) / 1e6 + CONTEXT_MB


def line(what: str, predicted: float, published: float | None, unit: str) -> dict[str, Any]:
    error = None if not published else predicted / published - 1
    shown = "" if error is None else f"{published:>12,.4g} published  {100 * error:+6.1f}%"
    print(f"  {what:<34} {predicted:>12,.4g} {unit:<6}{shown}")
    return {"what": what, "predicted": predicted, "published": published, "unit": unit, "error": error}


def zo2_plans(dtype: str) -> dict[str, Plan]:
    """The published programs: the original's in-place noise, and the models' own loss."""
    return {"mezo": method("mezo", loss="model", zo={"noise": "mezo"}), "zo2": method("zo2", loss="model")}


def fitted(machine: Hardware, dtype: str, config: dict[str, Any], shape: Shape, published: float) -> Hardware:
    """The machine with the matrix throughput at which resident MeZO runs as published."""
    low, high = 0.05, 3.0
    for _ in range(30):
        middle = (low + high) / 2
        speed = run(config, zo2_plans(dtype)["mezo"], shape, machine.with_efficiency(middle)).tokens_per_second
        low, high = (middle, high) if speed < published else (low, middle)
    reached = machine.with_efficiency(low).flops_of(dtype)
    share = 100 * reached / machine.peak_of(dtype)
    print(f"  fitted on MeZO OPT-6.7B: {reached / 1e12:.1f} TFLOP/s in {dtype}, {share:.0f}% of the peak")
    return machine.with_efficiency(low)


def besides(size: str, dtype: str, shape: Shape, copies: float) -> float:
    """MB that the published ZO2 must hold beside what our program does: two further blocks, and so many float32 tensors
    of logits. The number is what would have to be true of its row OPT-6.7B; the other rows test it."""
    block = 12 * OPT[size][2] ** 2 * (4 if dtype == "float32" else 2) / 1e6
    return 2 * block + copies * shape.tokens * 50272 * 4 / 1e6


def zo2_table() -> Iterator[dict[str, Any]]:
    shape, base = Shape(1, 2048), dataclasses.replace(hardware.load("a100-80gb"), noise_rate=NOISE_RATE)
    published = {row["model"].removeprefix("OPT-"): row for row in rows("zo2_table1_a100_bs1_seq2048")}
    for dtype, short in (("float32", "fp32"), ("float16", "fp16")):
        print(f"ZO2 table 1, {dtype}, one A100, 1 × 2048 tokens")
        machine = fitted(base, dtype, opt("6.7B", dtype), shape, float(published["6.7B"][f"mezo_{short}_tok_s"]))
        middle = run(opt("6.7B", dtype), zo2_plans(dtype)["zo2"], shape, machine)
        over = float(published["6.7B"][f"zo2_{short}_MB"]) - megabytes(middle) - besides("6.7B", dtype, shape, 0)
        copies = over / (shape.tokens * 50272 * 4 / 1e6)
        print(f"  the published ZO2 would hold two further blocks and {copies:.1f} float32 tensors of logits (from OPT-6.7B)")
        for size in OPT:
            for name, plan in zo2_plans(dtype).items():
                row = published.get(size, {})
                found = run(opt(size, dtype), plan, shape, machine)
                if found.peaks.get(Pool.DEVICE, 0) > machine.device_bytes:
                    print(f"  OPT-{size} {name:<27} does not fit: {megabytes(found):,.0f} MB")
                    continue
                memory, speed = (float(row[key]) if row else None for key in (f"{name}_{short}_MB", f"{name}_{short}_tok_s"))
                if name == "mezo":
                    yield line(f"OPT-{size} {name} memory", megabytes(found), memory, "MB")
                else:
                    line(f"OPT-{size} {name} memory, ours", megabytes(found), memory, "MB")
                    whole = megabytes(found) + besides(size, dtype, shape, copies)
                    yield line(f"OPT-{size} {name} memory, theirs", whole, memory, "MB")
                yield line(f"OPT-{size} {name} speed", found.tokens_per_second, speed, "tok/s")


def distzo2_table() -> Iterator[dict[str, Any]]:
    print("DistZO2 table 1, float16, H20, 4 × 2048 tokens in all")
    base = dataclasses.replace(hardware.load("h20-96gb-x4"), devices_per_node=1, noise_rate=2 * NOISE_RATE)
    dtype = "float16"
    published = {row["model"].removeprefix("OPT-"): row for row in rows("distzo2_table1_h20_fp16_bs4_seq2048")}
    machine = fitted(base, dtype, opt("6.7B", dtype), Shape(4, 2048), float(published["6.7B"]["mezo_tok_s"]))
    for size in OPT:
        row = published.get(size, {})
        plan = zo2_plans(dtype)
        for name, batch, ranks, mesh in (
            ("zo2", 4, 1, {}),
            ("zo2_pertp2", 4, 2, {"world": 2, "ranks_per_node": 2, "perturb": 2, "data": 1}),
            ("zo2_ddp2", 2, 2, {"world": 2, "ranks_per_node": 2, "data": 2, "perturb": 1}),
            ("zo2_2d4", 2, 4, {"world": 4, "ranks_per_node": 4, "data": 2, "perturb": 2}),
        ):
            several = dataclasses.replace(machine, devices_per_node=ranks, intra=hardware.load("h20-96gb-x4").intra)
            chosen = plan["zo2"] if ranks == 1 else method("distzo2", loss="model", mesh=mesh)
            found = run(opt(size, dtype), chosen, Shape(batch, 2048), several)
            speed = float(row[f"{name}_tok_s"]) if row else None
            key = {"zo2": "zo2_MB", "zo2_pertp2": "zo2_pertp_MB", "zo2_ddp2": "zo2_ddp_MB", "zo2_2d4": "zo2_2d_MB"}[name]
            yield line(f"OPT-{size} {name} memory", megabytes(found), float(row[key]) if row else None, "MB")
            yield line(f"OPT-{size} {name} speed", found.tokens_per_second, speed, "tok/s")


def fcdp_table() -> Iterator[dict[str, Any]]:
    print("FCDP table 7: bytes between nodes, LoRA, two nodes of 8 (the published model has 54 GB of 16-bit parameters)")
    published = {row["system"]: row for row in rows("fcdp_table7_lora_2x8_gb")}
    config = {"model_type": "llama", "hidden_size": 6144, "intermediate_size": 22016, "num_hidden_layers": 47,
              "num_attention_heads": 48, "vocab_size": 50432, "dtype": "bfloat16"}  # fmt: skip
    mesh, forwards = {"world": 16, "ranks_per_node": 8}, 0.0
    for name, system in (("zero3", "zero3"), ("zeropp", "zeropp_as_published"), ("fcdp", "fcdp_comm")):
        model = analytic.model_spec(config, lora_rank=8)
        plan = method(name, mesh=mesh)
        program = compile(plan, model, StepKind.TRAIN, Shape(1, 512), device="cuda")
        crossing = 8 * program.bytes_by_lane().get(Lane.INTER, 0) / 1e9
        weights = 8 * sum(op.nbytes for op in program.ops if op.lane is Lane.INTER and op.kind is OpKind.GATHER) / 1e9
        print(f"    {name}: {model.numel() * 2 / 1e9:.1f} GB of parameters; one node sends {weights:.2f} GB of them")
        if name == "zeropp":  # ours knows that frozen parameters stay clean; the published one gathers them every forward
            crossing = forwards
        forwards = crossing / 2
        # the published figures are reached where what two nodes send and what they receive is all added up
        yield line(f"{name} bytes a step", 4 * crossing, float(published[system]["total_GB"]), "GB")
    for net in ("ib100", "eth10", "eth1"):
        machine = hardware.load(f"a40-48gb-x8-{net}")
        found = {name: run(config, method(name, mesh=mesh), Shape(1, 512), machine, lora_rank=8) for name in ("zero3", "fcdp")}
        ratio = found["fcdp"].tokens_per_second / found["zero3"].tokens_per_second
        print(f"    {net}: zero3 {found['zero3'].bottleneck()}; fcdp {found['fcdp'].bottleneck()}")
        yield line(f"FCDP over ZeRO-3, LoRA, {net}", ratio, None, "times")


def asynchzp_table() -> Iterator[dict[str, Any]]:
    print("AsyncHZP table 2 and its scaling: analytic, since no program has context or pipeline parallelism yet")
    machine, context = hardware.load("asynchzp-64gb"), 32768
    published = {(row["model"], row["strategy"]): row for row in rows("asynchzp_table2")}
    efficiency: float | None = None
    scales = [("Seed-OSS-9B", 256, 1), *(("Seed-OSS-36B", cards, 4) for cards in (256, 512, 1024))]
    for model, cards, pipeline in scales:
        layers, dim, forward = SEED_OSS[model]
        queries, keys = 80 * 128 if dim == 5120 else dim, 8 * 128
        params = layers * (dim * (2 * queries + 2 * keys) + 3 * dim * forward) + 2 * 155136 * dim
        flops = 6 * params * context + 6 * layers * 2 * queries * context**2 // 2
        ranks, micro = 8 * pipeline, 32  # micro-batches a step: assumed, for the paper does not say
        useful = flops * micro / ranks
        z1, z3 = 64, 8
        recompute = useful * 8 / 6 / machine.peak_of("bfloat16")
        bubble = (pipeline - 1) / micro
        crossing = params / pipeline * 6 * (1 / z3 - 1 / z1) * machine.devices_per_node / machine.inter.bandwidth
        if efficiency is None:
            target = float(published[model, "Z1=64 Z2=Z3=8 CP=8"]["mfu"])
            efficiency = recompute / (useful / machine.peak_of("bfloat16") / target - crossing)
            print(f"  fitted on Seed-OSS-9B: products at {100 * efficiency:.0f}% of the peak (recomputation counted)")
        seconds = recompute / efficiency * (1 + bubble) + crossing * (cards / 256) ** 0.1
        row = published.get((model, f"Z1=64 Z2=Z3=8 {'PP=4 ' if pipeline > 1 else ''}CP=8")) if cards == 256 else None
        mfu = useful / (seconds * machine.peak_of("bfloat16"))
        yield line(f"{model} on {cards}, MFU (analytic)", mfu, float(row["mfu"]) if row else None, "")


TABLES = {"zo2": zo2_table, "distzo2": distzo2_table, "fcdp": fcdp_table, "asynchzp": asynchzp_table}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all unless given")
    arguments.add_argument("--json", metavar="FILE")
    arguments.add_argument("--check", action="store_true", help="exit 1 where memory is off by 15% or speed by 25%")
    given = arguments.parse_args()
    found = {name: list(TABLES[name]()) for name in given.tables or TABLES}
    missed = [
        f"{table}: {row['what']} {100 * row['error']:+.0f}%"
        for table, lines in found.items()
        for row in lines
        if row["error"] is not None and abs(row["error"]) > (0.15 if "memory" in row["what"] else 0.25)
    ]
    print(f"{len(missed)} of {sum(r['error'] is not None for t in found.values() for r in t)} published figures missed")
    print("\n".join(f"  {each}" for each in missed))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()

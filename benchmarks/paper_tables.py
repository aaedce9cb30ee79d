"""Predicted against published: the rows of benchmarks/data, and rows that are not in it, by the
simulator alone.

One efficiency constant a table is fitted, on one row, and printed. Where our program holds or does
less than the published one, what would have to be true of that is printed, term by term
(``published.py``), and the sum is held against the published figure; ours stands beside it. No
weight is made: costs are measured on tensors without data."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import distzo2_tables, zo2_tables
from benchmarks.asynchzp import asynchzp_tables, state_table
from benchmarks.fcdp import batch_table, bytes_table, figures, link_table, transfer_table
from benchmarks.misses import BOUND, FAR, MEDIAN, broken_bounds, described
from benchmarks.phone_tables import decompression_table, mebp_table
from benchmarks.published import line, megabytes, rows, terms
from benchmarks.zeroth_order_runs import (
    NOISE_PASSES,
    NOISE_RATE,
    OPT,
    fitted,
    measured,
    opt,
    ours,
    run,
    zo2_plans,
)

from blockwalk.plan.choices import AUTO
from blockwalk.plan.methods import method
from blockwalk.plan.placement import DTYPE_BYTES
from blockwalk.program.program import Lane, Pool, Shape
from blockwalk.simulate import hardware
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.planner import Task, hides_link, look_at


def explain(
    config: dict[str, Any], shape: Shape, *, streams: bool, fused: bool, both: bool = True
) -> None:
    """Print what would have to be true, on one row."""
    tensors = terms(config, shape, streams=streams, fused=fused, both=both)
    print(
        "  their memory would be: "
        + ", ".join(f"{name} {value:,.0f}" for name, value in tensors.items())
        + " MB"
    )


def unfitted(name: str, config: dict[str, Any]) -> Hardware:
    """The machine that ships, with the noise of the published programs as fast as its memory: no
    published speed in it."""
    machine = hardware.load(name).without_host()  # what was published ran by other programs
    size = DTYPE_BYTES[config["dtype"]]
    flops = machine.flops_of(config["dtype"])
    print(
        f"  {name} as it ships: products at {flops / 1e12:.0f} TFLOP/s, of its peak"
        f" {100 * flops / machine.peak_of(config['dtype']):.0f}%"
    )
    return dataclasses.replace(machine, noise_rate=machine.memory_bandwidth / (NOISE_PASSES * size))


def zo2_table(*, fit: bool = True) -> Iterator[dict[str, Any]]:
    shape = Shape(1, 2048)
    base = dataclasses.replace(hardware.load("a100-80gb").without_host(), noise_rate=NOISE_RATE)
    published = {
        row["model"].removeprefix("OPT-"): row for row in rows("zo2_table1_a100_bs1_seq2048")
    }
    for dtype, short in (("float32", "fp32"), ("float16", "fp16")):
        print(
            f"ZO2 table 1, {dtype}, one A100, 1 × 2048 tokens; attention taken as not fused"
            " (scores in memory)"
        )
        target = float(published["6.7B"][f"mezo_{short}_tok_s"])
        given = opt("6.7B", dtype)
        machine = (
            fitted(base, given, shape, target, fused=False) if fit else unfitted("a100-80gb", given)
        )
        explain(opt("6.7B", dtype), shape, streams=True, fused=False)
        for size in OPT:
            for name, plan in zo2_plans(dtype).items():
                row = published.get(size, {})
                config = opt(size, dtype)
                found = run(config, plan, shape, machine, fused=False)
                held = megabytes(config, shape, streams=name == "zo2", fused=False)
                if found.peaks.get(Pool.DEVICE, 0) > machine.device_bytes:
                    print(
                        f"  OPT-{size} {name:<27} does not fit: {held:,.0f} MB, ours"
                        f" {ours(found):,.0f}"
                    )
                    continue
                memory, speed = (
                    float(row[key]) if row else None
                    for key in (f"{name}_{short}_MB", f"{name}_{short}_tok_s")
                )
                yield line(
                    f"OPT-{size} {name} memory (ours {ours(found):,.0f})", held, memory, "MB"
                )
                yield line(f"OPT-{size} {name} speed", found.tokens_per_second, speed, "tok/s")


def ablation_table() -> Iterator[dict[str, Any]]:
    print("ZO2 table 3, float32: what each part is worth")
    shape = Shape(1, 2048)
    dtype = "float32"
    base = dataclasses.replace(hardware.load("a100-80gb").without_host(), noise_rate=NOISE_RATE)
    published = {row["model"].removeprefix("OPT-"): row for row in rows("zo2_table3_ablation_fp32")}
    machine = fitted(base, opt("6.7B", dtype), shape, float(published["6.7B"]["mezo"]), fused=False)
    plan = zo2_plans(dtype)["zo2"]
    moved = {size: run(opt(size, dtype), plan, shape, machine, fused=False) for size in published}
    # without overlap a step is the sum of its lanes; at which rate the copies ran is taken from
    # OPT-1.3B
    rates = {}
    for key, words in (
        ("zo2_no_overlap", "copies without overlap"),
        ("zo2_no_reusable_memory", "memory made anew for each block"),
    ):
        smallest = moved["1.3B"]
        extra = 2048 / float(published["1.3B"][key]) - smallest.seconds
        rates[key] = sum(smallest.bytes_by_lane.values()) / extra
        print(
            f"  {words} would cost what moving every block at {rates[key] / 1e9:.1f} GB/s does"
            " (from OPT-1.3B)"
        )
    for size, found in moved.items():
        for key, rate in rates.items():
            seconds = found.seconds + sum(found.bytes_by_lane.values()) / rate
            yield line(
                f"OPT-{size} {key} speed",
                found.tokens / seconds,
                float(published[size][key]),
                "tok/s",
            )
        late = (
            sum(found.bytes_by_lane.values()) / 2 / machine.host_to_device.bandwidth
        )  # up and down at once
        speed = found.tokens / (found.seconds + late)
        yield line(
            f"OPT-{size} zo2_no_efficient_update speed",
            speed,
            float(published[size]["zo2_no_efficient_update"]),
            "tok/s",
        )
        yield line(
            f"OPT-{size} zo2 speed", found.tokens_per_second, float(published[size]["zo2"]), "tok/s"
        )


RANKS: tuple[tuple[str, int, dict[str, int], bool], ...] = (
    ("zo2", 4, {}, True),
    ("zo2_pertp2", 4, {"world": 2, "ranks_per_node": 2, "perturb": 2, "data": 1}, False),
    ("zo2_ddp2", 2, {"world": 2, "ranks_per_node": 2, "data": 2, "perturb": 1}, True),
    ("zo2_2d4", 2, {"world": 4, "ranks_per_node": 4, "data": 2, "perturb": 2}, False),
)
"""Strategy, sequences of a rank, mesh, and whether a rank runs both forwards."""

COMMUNICATORS = {"zo2": 0, "zo2_pertp2": 2, "zo2_ddp2": 2, "zo2_2d4": 4}
"""Groups of ranks that each strategy talks in: perturbation and/or data, and those that gather
uploaded slices; in two dimensions the world as well."""


def distzo2_table(*, fit: bool = True) -> Iterator[dict[str, Any]]:
    print("DistZO2 table 1, float16, H20, 4 × 2048 tokens in all; attention taken as fused")
    base = dataclasses.replace(
        hardware.load("h20-96gb-x4").without_host(), devices_per_node=1, noise_rate=2 * NOISE_RATE
    )
    dtype = "float16"
    published = {
        row["model"].removeprefix("OPT-"): row
        for row in rows("distzo2_table1_h20_fp16_bs4_seq2048")
    }
    given = opt("6.7B", dtype)
    target = float(published["6.7B"]["mezo_tok_s"])
    machine = (
        fitted(base, given, Shape(4, 2048), target, fused=True)
        if fit
        else unfitted("h20-96gb-x4", given)
    )
    machine = dataclasses.replace(machine, devices_per_node=1)
    explain(opt("6.7B", dtype), Shape(4, 2048), streams=True, fused=True)
    alone = megabytes(opt("6.7B", dtype), Shape(4, 2048), streams=True, fused=True, both=False)
    each = (float(published["6.7B"]["zo2_pertp_MB"]) - alone) / COMMUNICATORS["zo2_pertp2"]
    print(
        f"  and {each:,.0f} MB for each group of ranks that it talks in (from OPT-6.7B, zo2_pertp2)"
    )
    for size in OPT:
        row = published.get(size, {})
        config = opt(size, dtype)
        resident = megabytes(config, Shape(4, 2048), streams=False, fused=True)
        found = run(config, zo2_plans(dtype)["mezo"], Shape(4, 2048), machine)
        if found.peaks.get(Pool.DEVICE, 0) < machine.device_bytes:
            yield line(
                f"OPT-{size} mezo memory (ours {ours(found):,.0f})",
                resident,
                float(row["mezo_MB"]) if row else None,
                "MB",
            )
            yield line(
                f"OPT-{size} mezo speed",
                found.tokens_per_second,
                float(row["mezo_tok_s"]) if row else None,
                "tok/s",
            )
        for name, batch, mesh, both in RANKS:
            ranks = int(mesh.get("world", 1))
            several = dataclasses.replace(
                machine, devices_per_node=ranks, intra=hardware.load("h20-96gb-x4").intra
            )
            chosen = (
                zo2_plans(dtype)["zo2"]
                if ranks == 1
                else method("distzo2", loss="model", mesh=mesh)
            )
            found = run(config, chosen, Shape(batch, 2048), several)
            held = (
                megabytes(config, Shape(batch, 2048), streams=True, fused=True, both=both)
                + each * COMMUNICATORS[name]
            )
            key = {
                "zo2": "zo2_MB",
                "zo2_pertp2": "zo2_pertp_MB",
                "zo2_ddp2": "zo2_ddp_MB",
                "zo2_2d4": "zo2_2d_MB",
            }[name]
            yield line(
                f"OPT-{size} {name} memory (ours {ours(found):,.0f})",
                held,
                float(row[key]) if row else None,
                "MB",
            )
            yield line(
                f"OPT-{size} {name} speed",
                found.tokens_per_second,
                float(row[f"{name}_tok_s"]) if row else None,
                "tok/s",
            )


def communication_table() -> Iterator[dict[str, Any]]:
    print(
        "DistZO2 table 3, 4 GPUs: billions of float16 parameters a second; sliced copies use the"
        " links of all four"
    )
    for row in rows("distzo2_table3_comm_4gpu"):
        for way in ("upload", "offload"):
            whole = float(row[f"{way}_Bparam_s"])
            sliced = float(row[f"{way}_opt_Bparam_s"])
            yield line(
                f"{row['model']} {way} in slices, four times one's", 4 * whole, sliced, "G/s"
            )
    print(
        "  where it is missed the four links would have to share something: 67 to 80% of four"
        " times one link's rate"
    )


def forecast_table(
    tables: Sequence[Callable[..., Iterator[dict[str, Any]]]] = (zo2_table, distzo2_table),
) -> Iterator[dict[str, Any]]:
    """Both tables again, with nothing fitted on the row that it predicts: speeds from the machines
    as they ship, memory without the row that a group of ranks' bytes are taken from."""
    for table in tables:
        errors = [row for row in table(fit=False) if row["error"] is not None]
        yield from (
            row for row in errors if not row["what"].startswith("OPT-6.7B zo2_pertp2 memory")
        )


def residency_table() -> Iterator[dict[str, Any]]:
    print(
        "OPT-175B in float16 on one H200: zo2 with every block streamed, and with as many that"
        " stay as there is room for"
    )
    units = measured(opt("175B", "float16"), None, "cuda")
    machine = hardware.load("h200").without_host()  # its lanes are compared
    for batch in (1, 4, 16):
        task = Task(units.spec(), units, machine, Shape(batch, 2048))
        streamed, kept = (
            look_at(task, "zo2", method("zo2", resident=resident)) for resident in (0, AUTO)
        )
        assert streamed.simulation is not None
        assert kept.simulation is not None
        computes, link = (
            sum(span.seconds for span in kept.simulation.spans if span.op.lane is lane)
            for lane in (Lane.COMPUTE, Lane.FETCH)
        )
        case = f"{batch} × 2048, {kept.plan.resident} blocks stay"
        seconds = kept.simulation.seconds
        print(
            f"  {batch} × 2048: {streamed.simulation.seconds:.2f} s, {kept.plan.resident} blocks"
            f" stay: {seconds:.2f}"
        )
        yield line(f"{case}: faster", streamed.simulation.seconds / seconds, None, "times")
        yield line(f"{case}: of max(compute, link)", seconds / max(computes, link), None, "times")
        if (larger := hides_link(task, streamed)) is not None:
            print(
                f"  nothing stays: {larger.plan.gradient_accumulation_steps} micro-batches a"
                " fetch hide the link"
            )


TABLES = {
    "forecast": forecast_table,
    "residency": residency_table,
    "zo2": zo2_table,
    "zo2_accuracy": zo2_tables.accuracy_table,
    "ablation": ablation_table,
    "zo2_autocast": zo2_tables.autocast_table,
    "zo2_batches": zo2_tables.float32_batch_table,
    "zo2_lengths": zo2_tables.length_table,
    "zo2_qwen3": zo2_tables.qwen3_table,
    "distzo2": distzo2_table,
    "distzo2_batches": distzo2_tables.batch_table,
    "communication": communication_table,
    "distzo2_cards": distzo2_tables.card_table,
    "distzo2_lengths": distzo2_tables.length_table,
    "mebp": mebp_table,
    "decompression": decompression_table,
    "links": link_table,
    "transfer": transfer_table,
    "fcdp": bytes_table,
    "batches": batch_table,
    "figures": figures,
    "states": state_table,
    "asynchzp": asynchzp_tables,
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all unless given"
    )
    arguments.add_argument("--json", metavar="FILE")
    arguments.add_argument(
        "--check",
        action="store_true",
        help=f"exit 1 if the median of all cells is off by more than {100 * MEDIAN:.0f}%%, more"
        f" than {100 * FAR:.0f}%% of them by more than {100 * BOUND:.0f}%%, or a miss has no term",
    )
    chosen_tables = arguments.parse_args()
    before = time.process_time()
    tables = {name: list(TABLES[name]()) for name in chosen_tables.tables or TABLES}
    misses = list(described(tables))
    published = sum(row["error"] is not None for lines in tables.values() for row in lines)
    print(f"{len(misses)} of {published} published figures missed")
    for words, term in misses:
        print(f"  {words}\n    {term or 'no term is named'}")
    for table, lines in tables.items():
        if errors := [abs(row["error"]) for row in lines if row["error"] is not None]:
            middle = statistics.median(errors)
            print(f"{table}: {len(errors)} rows, median {middle:.0%}, worst {max(errors):.0%}")
    broken = broken_bounds(tables)
    print(f"{time.process_time() - before:.0f} processor seconds")
    print("\n".join(broken))
    if chosen_tables.json:
        dated = {"date": f"{datetime.now(UTC):%Y-%m-%d}"} | tables
        Path(chosen_tables.json).write_text(json.dumps(dated, indent=1) + "\n", encoding="utf-8")
    if chosen_tables.check and broken:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""MeBP's tables 1 to 3 by the simulator: a phone whose products' rate is fitted on one row of table
1, and whose rate of decoding on one of table 2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from benchmarks.common_models import MODELS
from benchmarks.published import line, phone_terms, rows
from benchmarks.zeroth_order_runs import multiplied, run

from blockwalk.plan.methods import method
from blockwalk.program.program import OpKind, Pool, Shape
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.simulator import Simulation

PHONE = Hardware(
    name="phone",
    device="cpu",
    device_bytes=8 * 10**9,
    flops={"bfloat16": 1e12},
    memory_bandwidth=50e9,
)
"""An iPhone 15 Pro Max, about; its rate is fitted."""


FITTED = "Qwen2.5-1.5B"
"""The model whose seconds and whose share of decompression the rates are fitted on."""

PLANS = {
    "mebp": method("mebp", frozen="disk × int4a", recompute="all"),
    "mezo": method("mezo", frozen="disk × int4"),
}


def simulated(name: str, model: str, sequence: int, machine: Hardware) -> Simulation:
    """Return a step of a row of so many tokens."""
    config = {**MODELS[model], "dtype": "bfloat16"}
    return run(config, PLANS[name], Shape(1, sequence), machine, lora_rank=8, device="cpu")


def seconds_of(simulation: Simulation, kind: OpKind) -> float:
    """Return the seconds of a step's ops of a kind."""
    return sum(span.seconds for span in simulation.spans if span.op.kind is kind)


SEQUENCE = 256
"""Tokens of a row, unless a table says otherwise."""


@functools.cache
def phone() -> Hardware:
    """Return the phone with products as fast as MeBP's published Qwen2.5-1.5B."""
    table = rows("mebp_table1_iphone15promax")
    target = next(float(row["mebp_s"]) for row in table if row["model"] == FITTED)
    low = 0.01
    high = 10.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        seconds = simulated("mebp", FITTED, SEQUENCE, multiplied(PHONE, middle)).seconds
        low, high = (middle, high) if seconds > target else (low, middle)
    return multiplied(PHONE, low)


def mebp_table() -> Iterator[dict[str, Any]]:
    """Yield tables 1 and 3: memory and seconds by model, and by length."""
    print("MeBP tables 1 and 3, iPhone 15 Pro Max, LoRA, 1 × 256 tokens unless said")
    published = {row["model"]: row for row in rows("mebp_table1_iphone15promax")}
    machine = phone()
    small = published["Qwen2.5-0.5B"]
    base = float(small["mebp_MB"]) - sum(
        phone_terms(MODELS["Qwen2.5-0.5B"], 256, checkpoints=True).values()
    )
    print(f"  fitted on MeBP {FITTED}: {machine.flops_of('bfloat16') / 1e9:.0f} GFLOP/s")
    phone_tensors = phone_terms(MODELS["Qwen2.5-1.5B"], 256, checkpoints=True)
    terms = ", ".join(f"{name} {value:.0f}" for name, value in phone_tensors.items())
    print(
        f"  their memory would be {base:.0f} MB (from MeBP Qwen2.5-0.5B) and what ours never holds,"
        f" of Qwen2.5-1.5B: {terms}"
    )
    table = [(model, 256, row) for model, row in published.items()]
    table += [
        ("Qwen2.5-1.5B", int(row["seq"]), row)
        for row in rows("mebp_table3_seqlen_qwen2.5-1.5b")
        if row["seq"] != "256"
    ]
    for model, sequence, row in table:
        for name in PLANS:
            simulation = simulated(name, model, sequence, machine)
            case = f"{model} {name}" + ("" if sequence == 256 else f", {sequence} tokens")
            memory = base + sum(
                phone_terms(MODELS[model], sequence, checkpoints=name == "mebp").values()
            )
            device_megabytes = simulation.peaks[Pool.DEVICE] / 1e6
            yield line(
                f"{case} memory (ours {device_megabytes:,.0f})",
                memory,
                float(row[f"{name}_MB"]),
                "MB",
            )
            yield line(f"{case} seconds", simulation.seconds, float(row[f"{name}_s"]), "s")
    print(
        "  the seconds that are missed would have to hold a part that does not grow with tokens"
        " (2.2 of 6.9 at 128),"
    )
    print(
        "  and Gemma's head, 262,144 rows, would have to run at a third of the rate of the other"
        " products"
    )


# ---- table 2: decompression ----------------------------------------------------------------------

PASSES = {"forward": (OpKind.FORWARD, 1), "backward": (OpKind.BACKWARD, 2)}
"""The ops of a pass through the blocks, and how often ours decodes a weight in one: the published
program keeps a decoded block for its backward, and decodes it once."""

REFERENCE_RATE = 1e9
"""Weights decoded a second in the simulation that seconds of decoding are scaled from."""


def computing_and_decoding(model: str, name: str) -> tuple[float, float]:
    """Return seconds of a pass through the blocks without decoding, and those of decoding every
    block once at :data:`REFERENCE_RATE`."""
    kind, readings = PASSES[name]
    by_rate = [
        seconds_of(
            simulated("mebp", model, SEQUENCE, dataclasses.replace(phone(), decode_rate=rate)), kind
        )
        for rate in (REFERENCE_RATE, 1e9 * REFERENCE_RATE)
    ]
    decoding, computing = by_rate
    return computing, (decoding - computing) / readings


def decompression_table() -> Iterator[dict[str, Any]]:
    """Yield table 2: the share of passes through blocks that decompression takes."""
    print("MeBP table 2: percent of the forward and of the backward spent on decompression")
    published = {row["model"]: row for row in rows("mebp_table2_decompression")}
    share = float(published[FITTED]["forward_percent"]) / 100
    computing, decoding = computing_and_decoding(FITTED, "forward")
    slower = computing * share / (1 - share) / decoding
    print(f"  fitted on {FITTED}'s forward: {REFERENCE_RATE / slower / 1e9:.2f} G weights/s")
    for model, row in published.items():
        for name in PASSES:
            computing, decoding = computing_and_decoding(model, name)
            percent = 100 * slower * decoding / (computing + slower * decoding)
            words = f"{model} {name}, decompression"
            yield line(words, percent, float(row[f"{name}_percent"]), "%")

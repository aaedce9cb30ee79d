"""ZO2's tables 5 to 8 by the simulator: autocast and compressed transfers, batches, lengths, and
Qwen3; of table 2, what would show it here.

A row is predicted for every size, batch and length, whether a published one is at hand or not. One
constant a table is fitted, on one row, and printed. Draws take as long as the published programs'
(:func:`benchmarks.zeroth_order_runs.published_noise`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from benchmarks.published import line, megabytes, megabytes_of_float32_loss, number, rows
from benchmarks.zeroth_order_runs import (
    fitted,
    measured,
    opt,
    ours,
    published_noise,
    run,
    with_draws_of_published,
    with_positions,
    zo2_plans,
)

from blockwalk.plan.methods import method
from blockwalk.program.program import Shape
from blockwalk.simulate import hardware
from blockwalk.simulate.hardware import Hardware, Link
from blockwalk.simulate.simulator import Simulation

SEQUENCE = 2048
"""Tokens of a row, unless a table says otherwise."""

FITTED = "6.7B"
"""The size of OPT whose published speed a table's constant is fitted on."""

SIZES = ("1.3B", "2.7B", "6.7B", "13B")
"""Sizes of OPT in tables 6 and 7."""

BATCHES = (1, 2, 4, 8)
LENGTHS = (1024, 2048, 4096, 8192)

QWEN3 = {
    "1.7B": (28, 2048, 16, 6144, True),
    "4B": (36, 2560, 32, 9728, True),
    "8B": (36, 4096, 32, 12288, False),
    "14B": (40, 5120, 40, 17408, False),
    "32B": (64, 5120, 64, 25600, False),
}
"""Layers, width, heads, feed-forward width, and whether the head is the embedding: the models' own
configurations. Each has eight heads of keys, of 128."""

QWEN3_FITTED = "4B"
"""The size of Qwen3 whose published speed of MeZO the rate of products is fitted on."""


def a100() -> Hardware:
    """Return the machine of the tables; what was published ran by other programs than ours."""
    return hardware.load("a100-80gb").without_host()


def speed_of_mezo(table: str, model: str, column: str) -> float:
    """Return a published speed of MeZO at one row of 2,048 tokens, tokens a second."""
    speeds = (
        float(row[column])
        for row in rows(table)
        if row["model"] == model
        and row.get("batch", "1") == "1"
        and row.get("seq", str(SEQUENCE)) == str(SEQUENCE)
    )
    return next(speeds)


def both_methods(
    config: dict[str, Any], shape: Shape, machine: Hardware, *, fused: bool
) -> Iterator[tuple[str, Simulation]]:
    """Yield MeZO's step and ZO2's, with as many draws as the published programs make."""
    for name, plan in zo2_plans(config["dtype"]).items():
        drawing = with_draws_of_published(machine) if name == "zo2" else machine
        yield name, run(config, plan, shape, drawing, fused=fused)


# ---- tables 6 and 7: batches and lengths ---------------------------------------------------------


@functools.cache
def float32_machine() -> Hardware:
    """Return the A100 with products as fast as MeZO's published OPT-6.7B in float32."""
    target = speed_of_mezo("zo2_table6_batch_fp32", f"OPT-{FITTED}", "mezo_tok_s")
    machine = published_noise(a100(), "float32")
    return fitted(machine, opt(FITTED, "float32"), Shape(1, SEQUENCE), target, fused=False)


def float32_rows(table: str, key: str, shapes: dict[str, Shape]) -> Iterator[dict[str, Any]]:
    """Yield memory and speed of every size at every shape, beside those of a published table."""
    machine = float32_machine()
    published = {(row["model"], row[key]): row for row in rows(table)}
    for size in SIZES:
        for value, shape in shapes.items():
            config = with_positions(opt(size, "float32"), shape.sequence)
            row = published.get((f"OPT-{size}", value), {})
            for name, simulation in both_methods(config, shape, machine, fused=False):
                case = f"OPT-{size} {key} {value} {name}"
                held = megabytes(config, shape, streams=name == "zo2", fused=False)
                if held * 1e6 > machine.device_bytes:
                    print(f"  {case:<44} does not fit: {held:,.0f} MB")
                    continue
                words = f"{case} memory (ours {ours(simulation):,.0f})"
                yield line(words, held, number(row, f"{name}_MB"), "MB")
                speed = simulation.tokens_per_second
                yield line(f"{case} speed", speed, number(row, f"{name}_tok_s"), "tok/s")


def float32_batch_table() -> Iterator[dict[str, Any]]:
    """Yield table 6: batches of 1 to 8 rows in float32."""
    print("ZO2 table 6, float32: batches of rows of 2,048 tokens; attention taken as not fused")
    shapes = {str(batch): Shape(batch, SEQUENCE) for batch in BATCHES}
    yield from float32_rows("zo2_table6_batch_fp32", "batch", shapes)


def length_table() -> Iterator[dict[str, Any]]:
    """Yield table 7: rows of 1,024 to 8,192 tokens in float32."""
    print("ZO2 table 7, float32: one row of so many tokens; attention taken as not fused")
    shapes = {str(length): Shape(1, length) for length in LENGTHS}
    yield from float32_rows("zo2_table7_seqlen_fp32", "seq", shapes)


# ---- table 5: autocast, and transfers in fewer bits ----------------------------------------------

AUTOCAST = {"fp16": "float16", "bf16": "bfloat16"}
"""The compute dtype of each autocast type: as fast as one another."""

TRANSFERS = {"noncompress": "raw", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
"""The codec of a block in host memory, by the paper's word for its transfer."""

AUTOCAST_SIZES = ("1.3B", "2.7B", "6.7B", "13B", "30B", "66B", "175B")


@functools.cache
def autocast_machine() -> Hardware:
    """Return the A100 with 16-bit products as fast as in table 1, draws in float32, and a link to
    the host as fast as table 5's own OPT-6.7B in float16 without compression needs."""
    row = next(row for row in rows("zo2_table1_a100_bs1_seq2048") if row["model"] == "OPT-6.7B")
    by_table_1 = fitted(
        published_noise(a100(), "float16"),
        opt(FITTED, "float16"),
        Shape(1, SEQUENCE),
        float(row["mezo_fp16_tok_s"]),
        fused=False,
    )
    rate = by_table_1.flops_of("float16")
    machine = published_noise(a100(), "float32")
    machine = dataclasses.replace(machine, flops={**machine.flops, **dict.fromkeys(
        AUTOCAST.values(), rate)})  # fmt: skip
    column = "zo2_noncompress_tok_s"
    target = next(
        float(row[column])
        for row in rows("zo2_table5_amp")
        if (row["model"], row["autocast"]) == (f"OPT-{FITTED}", "fp16")
    )
    low = 1e9
    high = machine.host_to_device.bandwidth
    for _ in range(20):
        middle = (low + high) / 2
        speed = autocast(FITTED, "fp16", "raw", linked(machine, middle)).tokens_per_second
        low, high = (middle, high) if speed < target else (low, middle)
    print(f"  fitted on OPT-{FITTED}, fp16, not compressed: {low / 1e9:.1f} GB/s each way at once")
    return linked(machine, low)


def linked(machine: Hardware, bandwidth: float) -> Hardware:
    """Return the machine with so many bytes a second between host and device, each way."""
    link = Link(bandwidth, machine.host_to_device.latency)
    return dataclasses.replace(machine, host_to_device=link, device_to_host=link)


def autocast(size: str, autocast_type: str, codec: str, machine: Hardware) -> Simulation:
    """Return a step of ZO2 with float32 weights that compute in 16 bits, their transfers coded."""
    plan = method(
        "zo2",
        loss="model",
        trainable=f"host × {codec}",
        compute_dtype=AUTOCAST[autocast_type],
    )
    drawing = with_draws_of_published(machine)
    return run(opt(size, "float32"), plan, Shape(1, SEQUENCE), drawing, fused=False)


def autocast_table() -> Iterator[dict[str, Any]]:
    """Yield table 5: speeds under autocast, by the codec of transfers."""
    print("ZO2 table 5: float32 weights, products in 16 bits; transfers as they are and coded")
    machine = autocast_machine()
    published = {(row["model"], row["autocast"]): row for row in rows("zo2_table5_amp")}
    for autocast_type in AUTOCAST:
        for size in AUTOCAST_SIZES:
            row = published.get((f"OPT-{size}", autocast_type), {})
            for transfer, codec in TRANSFERS.items():
                speed = autocast(size, autocast_type, codec, machine).tokens_per_second
                words = f"OPT-{size} autocast {autocast_type}, {transfer} speed"
                yield line(words, speed, number(row, f"zo2_{transfer}_tok_s"), "tok/s")


# ---- table 8: Qwen3 ------------------------------------------------------------------------------


def qwen3(size: str) -> dict[str, Any]:
    """Return the configuration of a size of Qwen3 in float16."""
    layers, width, heads, feed_forward, tied = QWEN3[size]
    return {"model_type": "qwen3", "hidden_size": width, "intermediate_size": feed_forward,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": tied,
            "max_position_embeddings": 40960, "dtype": "float16"}  # fmt: skip


def qwen3_table() -> Iterator[dict[str, Any]]:
    """Yield table 8: memory and speed of Qwen3 in float16."""
    print("ZO2 table 8: Qwen3 in float16, 1 × 2048 tokens; attention taken as fused")
    shape = Shape(1, SEQUENCE)
    published = {row["model"]: row for row in rows("zo2_table8_qwen3_fp16")}
    model = f"Qwen3-{QWEN3_FITTED}"
    target = speed_of_mezo("zo2_table8_qwen3_fp16", model, "mezo_fp16_tok_s")
    machine = published_noise(a100(), "float16")
    machine = fitted(machine, qwen3(QWEN3_FITTED), shape, target, fused=True, model=model)
    for size in QWEN3:
        config = qwen3(size)
        row = published.get(f"Qwen3-{size}", {})
        spec = measured(config, None, "cuda").spec()
        for name, simulation in both_methods(config, shape, machine, fused=True):
            case = f"Qwen3-{size} {name}"
            held = megabytes_of_float32_loss(spec, shape, streams=name == "zo2")
            if held * 1e6 > machine.device_bytes:
                print(f"  {case:<44} does not fit: {held:,.0f} MB")
                continue
            words = f"{case} memory (ours {ours(simulation):,.0f})"
            yield line(words, held, number(row, f"{name}_fp16_MB"), "MB")
            speed = simulation.tokens_per_second
            yield line(f"{case} speed", speed, number(row, f"{name}_fp16_tok_s"), "tok/s")


# ---- table 2: accuracy ---------------------------------------------------------------------------

EQUALITY = "tests/reference/test_zeroth_order_tiers.py"
"""The tests that show that streaming changes no bit of MeZO's weights and losses."""


def accuracy_table() -> Iterator[dict[str, Any]]:
    """Yield table 2's cells, none of them predicted: a simulator has no accuracy. That both methods
    have the same one follows from equal weights, which a test shows."""
    print("ZO2 table 2: accuracies of OPT-13B, equal because weights are, bit for bit:")
    print(f"  {EQUALITY}")
    methods = {row["method"]: row for row in rows("zo2_table2_accuracy_opt13b")}
    for task, text in methods["ZO2"].items():
        if task != "method":
            words = f"{task.removesuffix('_percent')}, ZO2 less MeZO"
            yield line(words, float(text) - float(methods["MeZO"][task]), None, "points")

"""Runs of one row of a zeroth-order paper's table by the simulator: OPT models, MeZO and ZO2 as
published, and the rate that a table fits.

No weight is made: costs are measured on tensors without data."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from benchmarks.published import CONTEXT_MB, with_eager_attention

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import DTYPE_BYTES
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs
from blockwalk.program.program import Pool, Program, Shape, StepKind
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.planner import steady
from blockwalk.simulate.simulator import Simulation, simulate
from blockwalk.walk.unit_costs import UnitCosts

NOISE_RATE = 2.5e11
"""Elements a second of the published programs' ``torch.normal`` and in-place addition: the memory's
bandwidth, 6 bytes each."""

NOISE_PASSES = 8
"""Times that the published MeZO and ZO2 read or write a tensor of a parameter's size to perturb it
or to update it: the draw, two products with scalars, a sum, each out of place."""

OPT = {"1.3B": (24, 32, 2048), "2.7B": (32, 32, 2560), "6.7B": (32, 32, 4096),
       "13B": (40, 40, 5120), "30B": (48, 56, 7168), "66B": (64, 72, 9216),
       "175B": (96, 96, 12288)}  # fmt: skip


def with_positions(config: dict[str, Any], sequence: int) -> dict[str, Any]:
    """Return a configuration whose rows may have so many tokens."""
    return config | {"max_position_embeddings": max(config["max_position_embeddings"], sequence)}


def opt(size: str, dtype: str) -> dict[str, Any]:
    layers, heads, dim = OPT[size]
    return {"model_type": "opt", "hidden_size": dim, "ffn_dim": 4 * dim,
            "num_hidden_layers": layers, "dtype": dtype, "word_embed_proj_dim": dim,
            "num_attention_heads": heads, "vocab_size": 50272,
            "max_position_embeddings": 2048}  # fmt: skip


def measured(config: dict[str, Any], lora_rank: int | None, device: str) -> UnitCosts:
    """The costs of a model of these dimensions, and its description."""
    return _measured(json.dumps(config), lora_rank, device)


@functools.cache
def _measured(config: str, lora_rank: int | None, device: str) -> UnitCosts:
    from transformers import AutoConfig

    lora = None if lora_rank is None else LoraSettings(rank=lora_rank)
    return UnitCosts(AutoConfig.for_model(**json.loads(config)), lora=lora, device=device)


def run(
    config: dict[str, Any],
    plan: Plan,
    shape: Shape,
    machine: Hardware,
    *,
    lora_rank: int | None = None,
    fused: bool = True,
    device: str = "cuda",
) -> Simulation:
    program, model, costs = _compiled(json.dumps(config), plan, shape, lora_rank, fused, device)
    return simulate((program,), plan, model, machine, costs)


def compiled(config: dict[str, Any], plan: Plan, shape: Shape) -> Program:
    """Return the steady step's program on an accelerator."""
    program, _, _ = _compiled(json.dumps(config), plan, shape, None, True, "cuda")
    return program


@functools.cache
def _compiled(
    config: str, plan: Plan, shape: Shape, lora_rank: int | None, fused: bool, device: str
) -> tuple[Program, ModelSpec, Costs]:
    """The steady step's program, which is the same on any machine, and what it is simulated
    with."""
    units = _measured(config, lora_rank, device)
    model = units.spec()
    costs = units(plan, shape)
    if not fused:
        costs = with_eager_attention(costs, json.loads(config), shape)
    program = compile(
        plan, model, StepKind.TRAIN, shape, costs=costs, pending=steady(plan, model), device=device
    )
    return program, model, costs


def ours(found: Simulation) -> float:
    """MB of our own program."""
    return found.peaks.get(Pool.DEVICE, 0) / 1e6 + CONTEXT_MB


def zo2_plans(dtype: str) -> dict[str, Plan]:
    """The published programs: the original's in-place noise, and the models' own loss."""
    return {
        "mezo": method("mezo", loss="model", zo={"noise": "mezo"}),
        "zo2": method("zo2", loss="model"),
    }


def multiplied(machine: Hardware, factor: float) -> Hardware:
    """The machine with every matrix product ``factor`` times as fast."""
    flops = {dtype: value * factor for dtype, value in machine.flops.items()}
    return dataclasses.replace(machine, flops=flops)


def fitted(
    machine: Hardware,
    config: dict[str, Any],
    shape: Shape,
    published: float,
    *,
    fused: bool,
    model: str = "OPT-6.7B",
) -> Hardware:
    """Return the machine with the matrix throughput at which resident MeZO runs as published."""
    low = 0.05
    high = 3.0
    dtype = str(config["dtype"])
    for _ in range(30):
        middle = (low + high) / 2
        faster = multiplied(machine, middle)
        speed = run(config, zo2_plans(dtype)["mezo"], shape, faster, fused=fused).tokens_per_second
        low, high = (middle, high) if speed < published else (low, middle)
    reached = multiplied(machine, low).flops_of(dtype)
    share = 100 * reached / machine.peak_of(dtype)
    print(
        f"  fitted on MeZO {model}: products at {reached / 1e12:.1f} TFLOP/s in {dtype},"
        f" {share:.0f}% of the peak"
    )
    return multiplied(machine, low)


def published_noise(machine: Hardware, dtype: str) -> Hardware:
    """Return the machine with the seconds of a published draw: a kernel makes the numbers, as fast
    as ours does, and :data:`NOISE_PASSES` go through the memory."""
    passes = NOISE_PASSES * DTYPE_BYTES[dtype] / machine.memory_bandwidth
    return dataclasses.replace(machine, noise_rate=1 / (1 / machine.noise_rate + passes))


def with_draws_of_published(machine: Hardware, *, both: bool = True, ranks: int = 1) -> Hardware:
    """Return the machine on which our program's draws take as long as those of the published ZO2.

    Ours draws once for each forward, and for the update of a rank's slice. The published one
    restores the weights, too, and each rank updates whole blocks.

    Args:
        both: whether a rank runs both perturbed forwards.
        ranks: ranks that a block is sliced over.
    """
    forwards = 2 if both else 1
    draws = forwards + 1 / ranks
    return dataclasses.replace(machine, noise_rate=machine.noise_rate * draws / (forwards + 2))

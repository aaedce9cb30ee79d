"""The table: every published system that Blockwalk implements is a row of it, and a row is a Plan.

| method  | estimator      | parameters: tier × codec × group    | activations | update         |
|---------|----------------|-------------------------------------|-------------|----------------|
| plain   | backprop       | device × raw × nobody               | device      | at step end    |
| mebp    | backprop, LoRA | disk × int4a × nobody (frozen)      | disk        | at its turn    |
| mezo    | zeroth-order   | device × raw × nobody               | –           | at step end    |
| zo2     | zeroth-order   | host or disk × any × nobody         | –           | at next fetch  |
| distzo2 | zeroth-order   | host slice M/n × any × node         | –           | at next fetch  |
| zero3   | backprop       | device slice 1/G × raw × world      | device      | over the world |
| zeropp  | backprop       | the same, node slices on the device | device      | over the world |
| mics    | backprop       | device slice 1/g × raw × node       | device      | in the node    |
| fcdp    | backprop       | slice 1/G, node slices on the host  | device      | over the world |
| hzp     | backprop       | device slice × raw × any group      | device      | over any group |

Each function below returns a Plan and does nothing else. A setting given to :func:`method` wins
over the row's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from blockwalk.plan.choices import (
    CacheSettings,
    OptimizerSettings,
    Timing,
    UpdateSettings,
    ZerothOrderSettings,
)
from blockwalk.plan.estimators import Estimator
from blockwalk.plan.parsing import coerce, flat, hints_of
from blockwalk.plan.placement import NOBODY, NODE, WORLD, Codec, Placement, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.settings import override
from blockwalk.plan.table import Table


def plain() -> Plan:
    """Everything resident, gradients by backpropagation: what a plain training loop does."""
    return Plan(method="plain", recompute="none", prefetch=0)


def mebp() -> Plan:
    """Exact gradients with frozen 4-bit weights mapped from disk and one block's activations in
    memory at a time. A run on an accelerator begins from the host instead, where it has room
    (:mod:`blockwalk.program.settling`).

    Source: Song and Tang, "Memory-Efficient Backpropagation for Fine-Tuning LLMs on
    Resource-Constrained Mobile Devices" (2025)."""
    return Plan(
        method="mebp",
        frozen=Placement(Tier.DISK, Codec.INT4A),
        trainable=Placement(Tier.DISK, Codec.FP32),
        optimizer_state=Placement(Tier.DISK, Codec.FP32),
        activation=Placement(Tier.DISK),
        update=UpdateSettings(timing=Timing.BLOCK),
        recompute="auto",
    )


def mezo() -> Plan:
    """Two forward passes a step and no gradients, everything resident.

    Source: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (NeurIPS 2023),
    algorithm 1."""
    return Plan(
        method="mezo",
        estimator=Estimator.ZEROTH_ORDER,
        optimizer=OptimizerSettings(name="sgd", learning_rate=1e-6),
        zo=ZerothOrderSettings(),
        prefetch=0,
    )


def zo2() -> Plan:
    """MeZO with the blocks on the host or on disk, the update of a step applied when its block is
    fetched in the next.

    Source: Wang et al., "ZO2: Scalable Zeroth-Order Fine-Tuning for Extremely Large Language Models
    with Limited GPU Memory" (2025)."""
    return Plan(
        method="zo2",
        estimator=Estimator.ZEROTH_ORDER,
        frozen=Placement(Tier.HOST),
        trainable=Placement(Tier.HOST),
        optimizer=OptimizerSettings(name="sgd", learning_rate=1e-6),
        update=UpdateSettings(timing=Timing.DEFERRED),
        prefetch=1,
    )


def distzo2() -> Plan:
    """ZO2 over ranks that exchange scalars: forwards shared inside, the batch outside, one copy of
    the blocks a node.

    Source: Wang et al., "DistZO2: High-Throughput and Memory-Efficient Zeroth-Order Fine-tuning
    LLMs with Distributed Parallel Computing" (2025)."""
    shared = Placement(Tier.HOST, group=NODE)
    return replace(zo2(), method="distzo2", frozen=shared, trainable=shared)


def zero3() -> Plan:
    """Parameters, gradients and optimizer states over all ranks: gathered before every use, reduced
    after every backward.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2020), stage 3."""
    return _sharded("zero3", parameters=WORLD, gradients=WORLD, optimizer=WORLD)


def zeropp() -> Plan:
    """ZeRO-3 whose parameters are also kept as a slice over the node, from which the backward walk
    gathers.

    Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
    Training" (2023), hpZ."""
    plan = _sharded("zeropp", parameters=NODE, gradients=WORLD, optimizer=WORLD)
    return replace(plan, cache=CacheSettings(tier="device"))


def mics() -> Plan:
    """Everything over the ranks of one node, replicated between nodes; gradients cross nodes once
    per optimizer step.

    Source: Zhang et al., "MiCS: Near-Linear Scaling for Training Gigantic Model on Public Cloud"
    (2022)."""
    return _sharded("mics", parameters=NODE, gradients=NODE, optimizer=NODE)


def fcdp() -> Plan:
    """ZeRO-3's device memory, with a cache of the node's slices in host memory: parameters cross
    nodes once per optimizer step, frozen ones never after start; gradients add up inside the node
    and cross nodes once."""
    plan = _sharded("fcdp", parameters=NODE, gradients=NODE, optimizer=WORLD)
    return replace(
        plan, cache=CacheSettings(tier="host"), gradient=replace(plan.gradient, tier=Tier.HOST)
    )


def hzp() -> Plan:
    """Parameters, gradients and optimizer states over groups of their own, chosen freely: node,
    node and world unless ``trainable``, ``frozen``, ``gradient`` and ``optimizer_state`` name
    others."""
    return _sharded("hzp", parameters=NODE, gradients=NODE, optimizer=WORLD)


def _sharded(name: str, *, parameters: str, gradients: str, optimizer: str) -> Plan:
    return Plan(
        method=name,
        frozen=Placement(group=parameters),
        trainable=Placement(group=parameters),
        gradient=Placement(codec=Codec.FP32, group=gradients),
        optimizer_state=Placement(codec=Codec.FP32, group=optimizer),
    )


_ROWS = (plain, mebp, mezo, zo2, distzo2, zero3, zeropp, mics, fcdp, hzp)
METHODS: Table[Callable[[], Plan]] = Table("method", {row.__name__: row for row in _ROWS})
"""The rows by name, in the order of the table."""


def method(name: str, **settings: Any) -> Plan:
    """Return the plan of a named method, with settings changed.

    Settings are the plan's fields, nested as mappings or dotted.

    Raises:
        ValueError: an unknown method or setting, or a plan that makes no sense.

    Examples:
        >>> method("mebp", optimizer={"learning_rate": 2e-4}).optimizer.learning_rate
        0.0002
        >>> method("mebp", **{"optimizer.learning_rate": 2e-4, "prefetch": 2}).prefetch
        2
    """
    name = METHODS.choice(name)
    row, meshed = _on_mesh(replace(METHODS[name](), method=name), settings)
    plan = override(row, _timed(row, meshed))
    if set(plan.sharded_kinds) - set(row.sharded_kinds):
        raise ValueError(
            f"trainable is {plan.trainable}, and method {name!r} does not spread parameters over"
            f" ranks; choose hzp, or set trainable: {plan.trainable.tier} ×"
            f" {plan.trainable.codec}"
        )
    if plan.slice_group and row.cache.keeps and not plan.cache.keeps:
        raise ValueError(
            f"cache.tier is none, and method {name!r} keeps slices of parameters over a group of"
            f" ranks (trainable: {plan.trainable}) from one use to the next: set cache.tier: host"
            " or device, or use zero3, which gathers them anew each time"
        )
    return plan


def _on_mesh(row: Plan, settings: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """Return the row and the settings, once the world is known. All of it is one node unless the
    settings say otherwise, a zeroth-order mesh has both its axes, and buckets that cannot be sliced
    stay whole where the row alone would slice them."""
    dotted = flat(settings)
    if not row.sharded_kinds or "mesh.world" not in dotted:
        return row, settings
    mesh = {
        key.removeprefix("mesh."): value for key, value in dotted.items() if key.startswith("mesh.")
    }
    mesh.setdefault("ranks_per_node", mesh["world"])
    without_mesh = {key: value for key, value in settings.items() if not key.startswith("mesh")}
    if row.estimator.facts.shares_forwards:
        unsliced = {kind: replace(getattr(row, kind), group=NOBODY) for kind in row.sharded_kinds}
        batch_alone = {**mesh, "data": mesh["world"], "perturb": 1}
        plan = override(replace(row, **unsliced), {**without_mesh, "mesh": batch_alone})
        _share_passes(plan, mesh)
        stay_whole = [kind for kind in row.sharded_kinds if not plan.sliceable(kind)]
        row = replace(row, **{kind: unsliced[kind] for kind in stay_whole})
    return row, {**without_mesh, "mesh": mesh}


def _share_passes(plan: Plan, mesh: dict[str, Any]) -> None:
    """Give a zeroth-order mesh the axes that it does not name: neighbours share the forwards as far
    as these divide evenly, the others cut the batch."""
    for axis in ("world", "ranks_per_node", "data", "perturb"):
        if axis in mesh:
            mesh[axis] = coerce(f"mesh.{axis}", mesh[axis], int)
    world = mesh["world"]
    node = mesh["ranks_per_node"]
    if "perturb" not in mesh:
        sharing = 1 if plan.noise.in_place else math.gcd(node, plan.forward_passes)
        mesh["perturb"] = world // max(mesh["data"], 1) if "data" in mesh else sharing
    mesh.setdefault("data", max(1, world // max(mesh["perturb"], 1)))


def _timed(row: Plan, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, with updates at the step's end where a row cannot update at the block's
    turn: clipping needs the norm of all gradients, and several walks complete them only in the
    last one."""
    dotted = flat(settings)
    if not row.update.at_turn or "update.timing" in dotted:
        return settings
    norm = "optimizer.max_grad_norm"
    names = ("gradient_accumulation_steps", "together")
    steps, together = (
        coerce(name, dotted.get(name, getattr(row, name)), hints_of(Plan)[name]) for name in names
    )
    accumulates = steps > (together if isinstance(together, int) else 1)
    if coerce(norm, dotted.get(norm, 0), float) > 0 or accumulates:
        return {**settings, "update.timing": Timing.STEP}
    return settings

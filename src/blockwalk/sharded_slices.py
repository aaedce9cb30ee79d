"""A rank's slices at the start of a run: read from a checkpoint folder, a block store or a module in memory.

Each rank reads its own: nothing is sent. What a rank keeps of which part is told in :mod:`blockwalk.compile.sharded`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockwalk.compile.sharded_layout import (
    accumulates,
    has_node_slice,
    hosts_node_slice,
    part_layout,
    travels_as,
)
from blockwalk.state import Codec, ParamSpec, StateKind, Tier
from blockwalk.tiers import codecs
from blockwalk.tiers.shards import Shard, read_slice
from blockwalk.tiers.weights import EncodedWeight

if TYPE_CHECKING:
    from blockwalk.sharded import ShardedEngine


def frozen_shard(engine: ShardedEngine, unit: int) -> Shard:
    """This rank's node slice of a unit's frozen parameters."""
    plan, shard = engine.plan, _shard(engine, unit, StateKind.FROZEN)
    if shard.numel:
        tier = Tier.HOST if hosts_node_slice(plan) else Tier.DEVICE
        shard.node = _slice(engine, shard, plan.mesh.z3, shard.dtype, tier)
        if not has_node_slice(plan):
            shard.source, shard.node = shard.node, None
    return shard


def trainable_shard(engine: ShardedEngine, unit: int) -> Shard:
    """Master, optimizer states, gradients and what gathers begin with, each a slice."""
    plan, mesh, shard = engine.plan, engine.plan.mesh, _shard(engine, unit, StateKind.TRAINABLE)
    if not shard.numel:
        return shard
    own = shard.numel // mesh.z1
    states: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(
        ("master", *engine.rule.states), ((own,), torch.float32)
    )
    if plan.optimizer_state.tier is Tier.DISK:  # updated there by the CPU
        held = engine.scratch.zeros(states, group=unit)
    else:
        where = torch.device("cpu") if plan.optimizer_state.tier is Tier.HOST else engine.device
        held = {name: _zeros(engine, own, torch.float32, where) for name in states}
    shard.master = held.pop("master")
    shard.moments = held
    read_slice(shard.master, shard, engine.groups.slice(shard.numel, mesh.z1).start, engine.read)
    gathers_master = engine.compute_dtype == torch.float32 and plan.optimizer_state.tier is Tier.DEVICE
    if has_node_slice(plan):
        tier = Tier.HOST if hosts_node_slice(plan) else Tier.DEVICE
        shard.node = _slice(engine, shard, mesh.z3, shard.dtype, tier)
    if has_node_slice(plan) and not hosts_node_slice(plan):
        assert shard.node is not None
        shard.source = engine.inside(shard.node, shard.numel, mesh.z3, mesh.z1)
    else:
        shard.source = shard.master if gathers_master else shard.master.to(engine.device, shard.dtype)
    if accumulates(plan):
        where = engine.device if plan.gradient.tier is Tier.DEVICE else torch.device("cpu")
        shard.accumulator = _zeros(engine, shard.numel // mesh.z2, torch.float32, where)
    if shard.accumulator is not None and plan.gradient.tier is Tier.DEVICE:
        shard.gradient = engine.inside(shard.accumulator, shard.numel, mesh.z2, mesh.z1)
    else:
        shard.gradient = _zeros(engine, own, torch.float32, engine.device)
    return shard


def _shard(engine: ShardedEngine, unit: int, part: StateKind) -> Shard:
    spec = engine.spec.units[unit]
    params = {p.name: p for p in spec.params if p.trainable == (part is StateKind.TRAINABLE)}
    return Shard(part_layout(engine.plan, engine.spec, spec, part), params, engine.compute_dtype)


def _slice(engine: ShardedEngine, shard: Shard, size: int, dtype: torch.dtype, tier: Tier) -> torch.Tensor:
    """This rank's slice over ``size`` ranks."""
    where = torch.device("cpu") if tier is Tier.HOST else engine.device
    made = _zeros(engine, shard.numel // size, dtype, where)
    encoded = shard.layout.codec is not Codec.RAW

    def read(param: ParamSpec) -> torch.Tensor:
        if encoded:
            return encode(engine, shard, param)
        if travels_as(param, "") == "float32":
            return engine.read(param).to(torch.float32).reshape(-1).view(shard.dtype)
        return engine.read(param)

    read_slice(made, shard, engine.groups.slice(shard.numel, size).start, read)
    return made


def _zeros(engine: ShardedEngine, numel: int, dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    pinned = where.type == "cpu" and engine.device.type == "cuda"
    return torch.zeros(numel, dtype=dtype, device=where, pin_memory=pinned)


def encode(engine: ShardedEngine, shard: Shard, param: ParamSpec) -> torch.Tensor:
    """A frozen parameter's bytes: as a store has them in this codec, or encoded here.

    Raises:
        ValueError: the store has them in groups of another size.
    """
    layout = shard.encoding(param)
    if layout.codec is Codec.RAW:
        dense = engine.read(param).to(getattr(torch, layout.dtype), copy=True)
        return dense.reshape(-1).view(torch.uint8)
    stored = engine.stored(param.name)
    if isinstance(stored, EncodedWeight) and stored.layout.codec is layout.codec:
        if stored.layout.nbytes != layout.nbytes:
            raise ValueError(
                f"{param.name} is packed in groups of {stored.layout.group_size}, and state over ranks has groups of"
                f" {layout.group_size}; pack the checkpoint again with --group_size {layout.group_size}"
            )
        return stored.buffer
    bytes_P = torch.empty(layout.nbytes, dtype=torch.uint8)
    rows_RD = engine.read(param).reshape(layout.rows, layout.columns)
    return codecs.encode_rows(rows_RD, bytes_P, layout, 0, name=param.name)

"""Sizes and dtypes of state under a plan: of buckets and their slices, of what the epilogue reads,
of what is computed."""

from __future__ import annotations

from dataclasses import replace

from blockwalk.plan.model_spec import ModelSpec, UnitSpec, encoded_nbytes
from blockwalk.plan.placement import Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.zeroth_order_kinds import states_beside
from blockwalk.program.program import Pool
from blockwalk.program.slicing import slice_size


def epilogue_reads(model: ModelSpec) -> UnitSpec:
    """Return the epilogue with the tied parameters that it shares with the prologue."""
    tied = {canonical for _, canonical in model.tied}
    shared = tuple(p for p in model.prologue.params if p.name in tied)
    return replace(model.epilogue, params=model.epilogue.params + shared)


def bucket_bytes(plan: Plan, unit: UnitSpec) -> int:
    """Return bytes of a unit's bucket as one process holds it: its trainables in their codec and
    the states beside them, aligned."""
    weights, states = _bucket_parts(plan, unit)
    return weights + states


def slice_bytes(plan: Plan, unit: UnitSpec) -> tuple[int, int]:
    """Return bytes of one rank's slice of a bucket that ranks hold together, and of the parameters
    in it, which are gathered: to within the padding of rows and states."""
    ranks = plan.parameter_ranks
    gathered, states = (slice_size(nbytes, ranks) for nbytes in _bucket_parts(plan, unit))
    return gathered + states, gathered


def _bucket_parts(plan: Plan, unit: UnitSpec) -> tuple[int, int]:
    """Return bytes of a unit's trainables in their codec, and of the states beside them, each
    tensor aligned."""
    codec = plan.trainable.codec
    weights = 0
    states = 0
    codecs = [state for state, _ in states_beside(plan.zo, plan.optimizer).values()]
    for p in unit.part(True):
        weights += slice_size(encoded_nbytes(p.shape, p.dtype, p.stored_in(codec)))
        states += sum(slice_size(encoded_nbytes(p.shape, "float32", state)) for state in codecs)
    return weights, states


def compute_dtype(plan: Plan, model: ModelSpec) -> str:
    """Return the dtype that a model's blocks compute in."""
    return computes_in(plan, model.dtype)


def computes_in(plan: Plan, stored: str) -> str:
    """Return the compute dtype of a checkpoint that is stored in a dtype: the plan's, or the
    checkpoint's own. Gradients of a float16 one are computed in bfloat16, which has float32's
    range: in float16 most of them lie below its smallest number."""
    if plan.compute_dtype != "auto":
        return plan.compute_dtype
    differentiates = plan.estimator.facts.walks_back
    return "bfloat16" if stored == "float16" and differentiates else stored


def pool_of(tier: Tier) -> Pool:
    """Return the pool that a tier's bytes count in, where they are not mapped."""
    return Pool(tier.facts.pool)


def pool_at(tier: Tier, device: str) -> Pool:
    """Return the pool that a tier's bytes count in where a device uses them: file maps on a
    CPU."""
    return Pool.MAPPED if tier.facts.maps(device) else pool_of(tier)


def activation_pool(plan: Plan, device: str) -> Pool:
    """Return the pool of activation checkpoints."""
    return pool_at(plan.activation.tier, device)


def stages_inputs(plan: Plan, device: str) -> bool:
    """Return whether a block's input goes to its tier, and comes back, by way of device buffers:
    ``prefetch`` + 1 for all blocks."""
    return device != "cpu" and activation_pool(plan, device) is not Pool.DEVICE

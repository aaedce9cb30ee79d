"""Launches of our own kernels on an accelerator, op by op; torch's operators are not counted.

One launch updates all plain numbers of a dtype that a unit trains, whatever their number, and one
each matrix of codes; one perturbs all plain vectors of a unit for a forward, and one a matrix, or
as much of it as is decoded at a time. Where an update is more than a sum of noise (another rule
than SGD, states beside the weights) it goes by pieces, with a launch for each query and one that
rounds."""

from __future__ import annotations

from collections.abc import Iterable

from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import DTYPE_BYTES
from blockwalk.plan.plan import Plan
from blockwalk.plan.sizes import DECODE_BYTES, UPDATE_ELEMENTS
from blockwalk.program.placements import Placements
from blockwalk.program.program import Op, OpKind, Program
from blockwalk.program.state_sizes import compute_dtype

COUNTED = (OpKind.FORWARD, OpKind.UPDATE)
"""The kinds of op whose launches are counted: a block's."""


def finds_copy(op: Op, plan: Plan) -> bool:
    """Return whether a forward finds its block, or a loss its head, perturbed already, for an
    earlier micro-batch of its pass."""
    copied = {OpKind.LOSS: plan.loss == "chunked", OpKind.FORWARD: plan.copies_blocks}
    return op.micro_batch >= plan.mesh.data and copied.get(op.kind, False)


def launches(op: Op, places: Placements) -> int:
    """Return launches of one op of a zeroth-order program; 0 for what is not counted."""
    plan = places.plan
    unit = places.reads(op.unit)
    if op.kind not in COUNTED or not plan.zeroth_order or plan.zo.noise == "mezo":
        return 0
    frozen = unit.part(False)
    trained = unit.part(True)
    codes = [p for p in trained if plan.trainable.codec.encoded and p.quantizable]
    plain = [p for p in trained if p not in codes]
    if op.kind is OpKind.UPDATE:
        if plan.update_rule.linear and not plan.kind.states:
            return len(_dtypes(places, plain)) + len(codes)
        pieces = sum(-(-p.numel // UPDATE_ELEMENTS["cuda"]) for p in trained)
        return (
            max(op.entries, 1) * pieces * (plan.zo.queries + (plan.update.rounding == "stochastic"))
        )
    decoded = [
        p for p in frozen if len(p.shape) == 2 and p.quantizable and plan.frozen.codec.encoded
    ]
    matrices = [p for p in trained if len(p.shape) == 2 and p.quantizable]
    vectors = [p for p in plain if p not in matrices]
    if finds_copy(op, plan):
        matrices = []
        vectors = []
    size = DTYPE_BYTES[compute_dtype(plan, places.model)]
    ranges = sum(-(-p.numel * size // DECODE_BYTES["cuda"]) for p in (*matrices, *decoded))
    return ranges + op.passes * len(_dtypes(places, vectors))


def _dtypes(places: Placements, params: Iterable[ParamSpec]) -> set[str]:
    codec = places.plan.trainable.codec
    return {p.dtype if codec.encoded else codec.dtype_of(p.dtype) for p in params}


def of_block(program: Program, places: Placements) -> int:
    """Return launches of a step for the block that takes the most."""
    blocks = range(1, places.last)
    return max(
        (sum(launches(op, places) for op in program.ops if op.unit == block) for block in blocks),
        default=0,
    )

"""The adaptive cache: node slices that stay on the device instead of going to host memory, as far
as the budget allows."""

from __future__ import annotations

from collections import Counter

from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.flat_layout import PARTS, hosts_node_slice, part_layout
from blockwalk.program.program import Op, OpKind, Program


def adapts(plan: Plan) -> bool:
    """Whether some node slices stay on the device instead of in host memory, as far as the budget
    allows."""
    return hosts_node_slice(plan) and plan.cache.threshold > 0 and plan.budget is not None


def kept_slices(plan: Plan, model: ModelSpec, plain: Program) -> frozenset[tuple[int, StateKind]]:
    """Return the node slices that the adaptive cache keeps on the device, as (unit, part).

    ``plain`` is the step's program with none of them kept. A slice is kept from its first use to
    its last if the device, with what is kept already and the transients of every op in between,
    stays within ``cache.threshold × budget`` all that time: so the peak is at most that, or the
    peak of ``plain`` where this is higher. First come those that save the most bytes on the host's
    link for each byte that they hold; of these the largest, and of equal ones those that are held
    the shortest."""
    room = [plan.cache.threshold * (plan.budget or 0) - held for held in plain.device_bytes()]
    first: dict[tuple[int, StateKind], Op] = {}
    saved: Counter[tuple[int, StateKind]] = Counter()
    last = {op.unit: op.index for op in plain.ops if op.kind is OpKind.EVICT}
    for op in plain.ops:
        if op.part in PARTS and op.kind in (OpKind.GATHER, OpKind.FETCH, OpKind.CACHE):
            again = (op.unit, op.part) in first
            first.setdefault((op.unit, op.part), op)
            if op.kind is not OpKind.GATHER and again:
                saved[op.unit, op.part] += op.nbytes
    size = {
        key: part_layout(plan, model, model.units[key[0]], key[1]).nbytes // plan.parameter_ranks
        for key in saved
    }
    span = {key: range(first[key].index, last[key[0]] + 1) for key in saved}
    kept = set()
    for key in sorted(saved, key=lambda key: (-saved[key] / size[key], -size[key], len(span[key]))):
        if all(room[at] >= size[key] for at in span[key]):
            kept.add(key)
            for at in span[key]:
                room[at] -= size[key]
    return frozenset(kept)

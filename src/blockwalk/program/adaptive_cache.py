"""The adaptive cache: node slices that stay on the device instead of going to host memory, as far
as the budget allows."""

from __future__ import annotations

from collections import Counter

from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.flat_layout import PARTS, hosts_node_slice, part_layout
from blockwalk.program.program import OpKind, Program


def adapts(plan: Plan) -> bool:
    """Return whether some node slices stay on the device instead of in host memory, as far as the
    budget allows."""
    return hosts_node_slice(plan) and plan.cache.threshold > 0 and plan.budget is not None


def kept_slices(plan: Plan, model: ModelSpec, plain: Program) -> frozenset[tuple[int, StateKind]]:
    """Return the node slices that the adaptive cache keeps on the device, as (unit, part).

    ``plain`` is the step's program with none of them kept. A slice is kept from its first use to
    its last where the device stays within ``cache.threshold × budget`` all that time, with what is
    kept already and the transients of every op in between. So the peak is at most that, or the
    peak of ``plain`` where this is higher. First come the slices that save the most bytes on the
    host's link for each byte of their own; of these the largest, and of equal ones those that stay
    the shortest."""
    room = [plan.cache.threshold * (plan.budget or 0) - nbytes for nbytes in plain.device_bytes()]
    starts: dict[tuple[int, StateKind], int] = {}
    saved: Counter[tuple[int, StateKind]] = Counter()
    ends = {op.unit: op.index for op in plain.ops if op.kind is OpKind.EVICT}
    for op in plain.ops:
        if op.part in PARTS and op.kind in (OpKind.GATHER, OpKind.FETCH, OpKind.CACHE):
            key = (op.unit, op.part)
            if key in starts and op.kind is not OpKind.GATHER:
                saved[key] += op.nbytes
            starts.setdefault(key, op.index)
    sizes = {
        (unit, part): part_layout(plan, model, model.units[unit], part).nbytes
        // plan.parameter_ranks
        for unit, part in saved
    }
    spans = {key: range(starts[key], ends[key[0]] + 1) for key in saved}

    def by_worth(key: tuple[int, StateKind]) -> tuple[float, int, int]:
        return -saved[key] / sizes[key], -sizes[key], len(spans[key])

    kept = set()
    for key in sorted(saved, key=by_worth):
        if all(room[place] >= sizes[key] for place in spans[key]):
            kept.add(key)
            for place in spans[key]:
                room[place] -= sizes[key]
    return frozenset(kept)

"""Oracle: the rules of a program for random sharded plans, and closed forms of the bytes that a
node sends."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.plan.mesh import make_axes, named, reach
from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, Pending, UnitCost
from blockwalk.program.flat_layout import PARTS, part_layout
from blockwalk.program.invariants import INVARIANTS, happens_before, shared_buffers, used_unfetched
from blockwalk.program.program import Lane, Op, OpKind, Pool, Program, Shape, StepKind
from blockwalk.report.forecast import DoesNotFit, Forecast
from blockwalk.train import preflight
from tests.support.messages import refused, says
from tests.support.toy_model import toy

pytestmark = pytest.mark.fast

SHARDED = ("zero3", "zeropp", "mics", "fcdp", "hzp")


def on_mesh(name: str, nodes: int, ranks_per_node: int, **changes: object) -> Plan:
    return method(
        name, mesh={"world": nodes * ranks_per_node, "ranks_per_node": ranks_per_node}, **changes
    )


def steady(plan: Plan, model: ModelSpec) -> Program:
    """A training step after another."""
    shape = Shape(1, 8)
    first = compile(plan, model, StepKind.TRAIN, shape)
    return compile(plan, model, StepKind.TRAIN, shape, pending=Pending(dirty=first.dirty))


def node_bytes(
    program: Program, plan: Plan, kinds: tuple[OpKind, ...] = (OpKind.GATHER, OpKind.REDUCE)
) -> int:
    """Bytes that one node sends to others."""
    sent = sum(op.nbytes for op in program.ops if op.lane.link is Lane.INTER and op.kind in kinds)
    return sent * plan.mesh.ranks_per_node


def padded(model: ModelSpec, plan: Plan, part: StateKind) -> int:
    return sum(part_layout(plan, model, unit, part).numel for unit in model.units)


def test_bytes_are_shown_by_axis() -> None:
    """Closed form: gathered over two axes, a rank sends twice as much over the inner as over the
    outer; and of what three blocks exchange forwards twice and backwards, with three others, two
    thirds leave the node."""
    model = toy(layers=3, lora=False, tied=False)
    shape = Shape(1, 8)
    plan = method("mics", mesh={"world": 4, "ranks_per_node": 4, "groups": ["pair=2"]})
    of_state = compile(plan, model, StepKind.TRAIN, shape)
    over = of_state.bytes_by_axis(plan.mesh)
    assert over == {"pair": 2 * over["node"], "node": over["node"]}
    assert sum(over.values()) == of_state.bytes_by_lane()[Lane.INTRA]

    plan = method("zero3", mesh={"world": 4, "ranks_per_node": 2, "context": 4})
    costs = Costs((("block", UnitCost(forward_sent=1200, backward_sent=900)),))
    program = compile(plan, model, StepKind.TRAIN, shape, costs=costs)
    without = compile(plan, model, StepKind.TRAIN, shape)
    assert program.bytes_by_axis(plan.mesh)["context"] == 3 * (2 * 1200 + 900)
    lanes = Counter(program.bytes_by_lane())
    lanes.subtract(without.bytes_by_lane())
    assert lanes == {Lane.INTRA: 3300, Lane.INTER: 6600}


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(SHARDED),
    nodes=st.integers(1, 3),
    local=st.integers(1, 3),
    layers=st.integers(1, 6),
    lora=st.booleans(),
    tied=st.booleans(),
    kind=st.sampled_from([StepKind.TRAIN, StepKind.GRADIENTS, StepKind.EVALUATE]),
    prefetch=st.integers(0, 3),
    micro_batches=st.integers(1, 3),
    together=st.integers(1, 3),
    recompute=st.sampled_from(["all", "none"]),
    timing=st.sampled_from(["step", "block"]),
    dirty=st.booleans(),
    threshold=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_every_rule_holds_for_every_sharded_plan(
    name: str,
    nodes: int,
    local: int,
    layers: int,
    lora: bool,
    tied: bool,
    kind: StepKind,
    prefetch: int,
    micro_batches: int,
    together: int,
    recompute: str,
    timing: str,
    dirty: bool,
    threshold: float,
) -> None:
    if timing == "block" and micro_batches > 1:
        together = micro_batches
    changes: dict[str, object] = {
        "prefetch": prefetch,
        "gradient_accumulation_steps": micro_batches,
        "together": min(together, micro_batches),
    }
    if name == "fcdp":
        changes |= {"cache.threshold": threshold, "budget": 3_000_000}
    plan = on_mesh(name, nodes, local, recompute=recompute, **{"update.timing": timing}, **changes)
    model = toy(layers, lora=lora, tied=tied)
    trained = {u for u, unit in enumerate(model.units) if unit.numel(trainable=True)}
    pending = Pending(
        dirty=frozenset(trained)
        if dirty and plan.parameter_ranks < plan.optimizer_ranks
        else frozenset()
    )
    program = compile(plan, model, kind, Shape(2, 16), pending=pending)
    for rule in INVARIANTS:
        assert rule(program) == []
    if kind is StepKind.TRAIN:
        assert {op.unit for op in program.ops if op.kind is OpKind.UPDATE} == trained
        trainable = [op for op in program.ops if op.part is StateKind.TRAINABLE]
        assert program.dirty == {
            op.unit for op in trainable if op.kind is OpKind.CACHE and op.device_slice
        }
        complete = [op for op in program.ops if op.kind is OpKind.REDUCE and op.last]
        assert sorted(op.unit for op in complete) == sorted(trained)
    stale(program, plan, pending.dirty)


def stale(program: Program, plan: Plan, dirty: frozenset[int]) -> None:
    """No trainable node slice is used between its update and its refreshing, nor while it is
    refreshed; and it is refreshed after its update."""
    if plan.parameter_ranks == plan.optimizer_ranks:
        return
    out_of_date = set(dirty)
    before = happens_before(program)
    refreshed: dict[int, int] = {}
    updated: dict[int, int] = {}
    for op in program.ops:
        if op.refreshes:
            refreshed[op.unit] = op.index
            if op.unit in updated:
                assert before(updated[op.unit], op.index), "refreshed before its update"
        elif op.part is StateKind.TRAINABLE and op.slot >= 0 and op.unit in refreshed:
            assert before(refreshed[op.unit], op.index), "a node slice is read while it is written"
        if op.kind is OpKind.UPDATE:
            out_of_date.add(op.unit)
            updated[op.unit] = op.index
        _, outer = reach(named(make_axes(plan.mesh), op.axes))
        if (
            op.part is StateKind.TRAINABLE
            and op.kind is OpKind.GATHER
            and outer > plan.parameter_ranks
        ):
            out_of_date.discard(op.unit)
        if op.kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.PROLOGUE, OpKind.LOSS):
            assert op.unit not in out_of_date
    assert out_of_date <= program.dirty


@pytest.mark.parametrize("name", ["fcdp", "hzp"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 4), (3, 2), (4, 1)])
@pytest.mark.parametrize(("lora", "tied"), [(False, False), (False, True), (True, True)])
def test_the_lower_bound_whatever_the_micro_batches(
    name: str, micro_batches: int, nodes: int, local: int, lora: bool, tied: bool
) -> None:
    """Closed form: a node sends (N − 1)/N · W · (b_p + b_g) per optimizer step, W the trainable
    parameters."""
    plan = on_mesh(name, nodes, local, gradient_accumulation_steps=micro_batches)
    model = toy(5, lora=lora, tied=tied)
    trained = padded(model, plan, StateKind.TRAINABLE)
    assert node_bytes(steady(plan, model), plan) == (nodes - 1) * trained * (4 + 4) // nodes


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("group", ["solo", "pair", "node", "world"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_the_lower_bound_whatever_the_group(group: str, micro_batches: int, nodes: int) -> None:
    """Closed form: as many bytes where all state is spread over a part of a node, whose ranks sum
    between nodes together: 2 · (N − 1)/N · W · b_g, and W · b_p where parameters are gathered from
    other nodes."""
    placed = {
        f"{kind}.group": group for kind in ("frozen", "trainable", "gradient", "optimizer_state")
    }
    mesh = {"world": 4 * nodes, "ranks_per_node": 4, "groups": ["solo=1", "pair=2"]}
    changes = {
        "gradient_accumulation_steps": micro_batches,
        "together": micro_batches,
        "prefetch": 9,
    }
    plan = method("hzp", mesh=mesh, **placed, **changes)
    model = toy(5, lora=False, tied=False)
    program = steady(plan, model)
    for rule in INVARIANTS:
        assert rule(program) == []
    trained = padded(model, plan, StateKind.TRAINABLE)
    gathered = node_bytes(program, plan, (OpKind.GATHER,))
    assert node_bytes(program, plan) - gathered == (nodes - 1) * trained * 4 // nodes * (
        1 if group == "world" else 2
    )
    assert bool(gathered) == (group == "world")


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_bytes_of_the_other_rows(micro_batches: int) -> None:
    """Closed forms, A micro-batches, hierarchical collectives: the last block of a walk is gathered
    once for both its turns, and so is the head; in between micro-batches, so are the prologue and
    the first block."""
    model = toy(6, lora=False, tied=False)
    nodes = 2
    share = (nodes - 1) / nodes
    zero3, zeropp, mics = (
        on_mesh(name, nodes, 2, gradient_accumulation_steps=micro_batches, prefetch=0)
        for name in SHARDED[:3]
    )
    whole = padded(model, zero3, StateKind.TRAINABLE)
    sizes = [
        sum(part_layout(zero3, model, unit, part).numel for part in PARTS) for unit in model.units
    ]
    gathered = micro_batches * (2 * whole - sizes[6] - sizes[7]) - (micro_batches - 1) * (
        sizes[0] + sizes[1]
    )
    assert node_bytes(steady(zero3, model), zero3, (OpKind.GATHER,)) == share * 4 * gathered
    assert (
        node_bytes(steady(zero3, model), zero3, (OpKind.REDUCE,))
        == share * micro_batches * 4 * whole
    )
    assert node_bytes(steady(zeropp, model), zeropp) == share * (
        4 * whole + micro_batches * 4 * whole
    )
    assert node_bytes(steady(mics, model), mics) == share * 2 * 4 * whole


def test_frozen_parameters_never_cross_nodes_under_a_cache() -> None:
    """Closed form: zero bytes of frozen parameters between nodes, (N − 1)/N of them and more under
    ZeRO-3."""
    model = toy(4, lora=True, tied=True)
    for name, crosses in (("fcdp", False), ("hzp", False), ("zeropp", False), ("zero3", True)):
        program = steady(on_mesh(name, 2, 2), model)
        moved = [op for op in program.ops if op.lane is Lane.INTER and op.part is StateKind.FROZEN]
        assert bool(moved) == crosses


def test_host_cache_bytes_are_the_node_slices() -> None:
    """Closed form: fcdp refreshes each node slice on the host once a step, and reads it for forward
    and backward; the last block and the head once for both."""
    model = toy(5, lora=False, tied=False)
    plan = on_mesh("fcdp", 2, 2)
    program = steady(plan, model)
    whole = padded(model, plan, StateKind.TRAINABLE)
    sizes = [part_layout(plan, model, unit, StateKind.TRAINABLE).numel for unit in model.units]
    refreshed = [op for op in program.ops if op.refreshes]
    assert [op.unit for op in refreshed] == list(range(7))
    assert sum(op.nbytes for op in refreshed) == 4 * whole // 2 // 2
    fetched = sum(
        op.nbytes
        for op in program.ops
        if op.kind is OpKind.FETCH and op.part is StateKind.TRAINABLE
    )
    assert fetched == 4 * (2 * whole - sizes[5] - sizes[6]) // 2


def test_the_adaptive_cache_keeps_what_the_threshold_allows() -> None:
    """Closed form: node slices that stay on the device are neither written to the host nor read
    from it; the peak stays below threshold × budget, and without room the program is the one
    without a threshold."""
    model = toy(6, lora=False, tied=False)
    plain = on_mesh("fcdp", 2, 2, prefetch=0, activation="host")
    floor = steady(plain, model).peaks()[Pool.DEVICE]
    block = 4 * part_layout(plain, model, model.blocks[0], StateKind.TRAINABLE).numel // 2
    ends = 4 * part_layout(plain, model, model.prologue, StateKind.TRAINABLE).numel // 2
    for room, fewer in ((0, 0), (ends, 1), (ends + 3 * block, 4)):
        budget = 2 * (floor + room)
        plan = on_mesh(
            "fcdp", 2, 2, prefetch=0, activation="host", budget=budget, **{"cache.threshold": 0.5}
        )
        program = steady(plan, model)
        kept = [op for op in program.ops if op.kind is OpKind.CACHE and op.device_slice]
        refreshed = [op for op in program.ops if op.refreshes]
        assert len(kept) == fewer
        assert len(kept) + len(refreshed) == 8
        assert not {op.unit for op in kept} & {
            op.unit
            for op in program.ops
            if op.kind is OpKind.FETCH and op.part is StateKind.TRAINABLE
        }
        assert program.peaks()[Pool.DEVICE] <= budget / 2
        assert node_bytes(program, plan) == node_bytes(steady(plain, model), plain)


@settings(max_examples=100, deadline=None)
@given(
    layers=st.integers(1, 8),
    lora=st.booleans(),
    tied=st.booleans(),
    prefetch=st.integers(0, 3),
    micro_batches=st.integers(1, 3),
    together=st.integers(1, 3),
    activation=st.sampled_from(["device", "host"]),
    recompute=st.sampled_from(["all", "none", "auto"]),
    threshold=st.floats(0.05, 1.0),
    room=st.floats(0.7, 1.6),
    transients=st.tuples(*[st.integers(0, 400_000)] * 6),
    kind=st.sampled_from([StepKind.TRAIN, StepKind.GRADIENTS]),
    dirty=st.booleans(),
)
def test_a_plan_that_fits_still_fits_with_any_threshold(
    layers: int,
    lora: bool,
    tied: bool,
    prefetch: int,
    micro_batches: int,
    together: int,
    activation: str,
    recompute: str,
    threshold: float,
    room: float,
    transients: tuple[int, ...],
    kind: StepKind,
    dirty: bool,
) -> None:
    """Closed form: with the transients of every op, the peak is at most threshold × budget, or the
    peak of the plan without an adaptive cache where that is higher; and the network carries the
    same bytes."""
    changes: dict[str, object] = {
        "prefetch": prefetch,
        "gradient_accumulation_steps": micro_batches,
    }
    changes |= {
        "together": min(together, micro_batches),
        "activation": activation,
        "recompute": recompute,
    }
    model = toy(layers, lora=lora, tied=tied)
    shape = Shape(2, 16)
    costs = Costs(
        tuple(
            (name, UnitCost(forward, backward, saved=forward // 4))
            for name, forward, backward in zip(
                ("prologue", "block", "epilogue"), transients[:3], transients[3:], strict=True
            )
        )
    )
    plain = on_mesh("fcdp", 2, 2, **changes, budget=10**9)
    budget = int(room * compile(plain, model, kind, shape, costs=costs).peaks()[Pool.DEVICE])
    plain = dataclasses.replace(plain, budget=budget)
    adaptive = dataclasses.replace(
        plain, cache=dataclasses.replace(plain.cache, threshold=threshold)
    )
    trained = frozenset(u for u, unit in enumerate(model.units) if unit.numel(trainable=True))
    pending = Pending(dirty=trained if dirty else frozenset())
    without = compile(plain, model, kind, shape, costs=costs, pending=pending)
    program = compile(adaptive, model, kind, shape, costs=costs, pending=pending)
    assert program.peaks()[Pool.DEVICE] <= max(threshold * budget, without.peaks()[Pool.DEVICE])
    if kind is StepKind.TRAIN:  # what is kept was not refreshed by the step before
        again = [
            compile(plan, model, kind, shape, costs=costs, pending=Pending(dirty=of.dirty))
            for plan, of in ((adaptive, program), (plain, without))
        ]
        assert node_bytes(again[0], adaptive) == node_bytes(again[1], plain)


def test_the_adaptive_cache_counts_what_ops_hold_while_they_run() -> None:
    """Closed form: a backward that needs all of the budget leaves no room for a slice that is held
    through it; with room for both all are kept that would be fetched again."""
    model = toy(6, lora=True, tied=False)
    shape = Shape(1, 8)
    plain = on_mesh("fcdp", 2, 2, prefetch=0, activation="host")
    costs = Costs((("block", UnitCost(backward_transient=1_000_000)),))
    peak = compile(plain, model, StepKind.TRAIN, shape, costs=costs).peaks()[Pool.DEVICE]
    plan = dataclasses.replace(
        plain, budget=peak, cache=dataclasses.replace(plain.cache, threshold=1.0)
    )
    program = compile(plan, model, StepKind.TRAIN, shape, costs=costs)
    assert program.peaks()[Pool.DEVICE] == peak
    assert not [op for op in program.ops if op.device_slice]
    roomy = dataclasses.replace(plan, budget=2 * peak)
    kept = {
        op.unit
        for op in compile(roomy, model, StepKind.TRAIN, shape, costs=costs).ops
        if op.device_slice
    }
    assert kept == {1, 2, 3, 4, 5}  # the others are fetched once a step: nothing to save


def test_a_threshold_is_a_share() -> None:
    with refused(ValueError, "cache.threshold 1.5 0 1"):
        on_mesh("fcdp", 2, 2, budget=10**6, **{"cache.threshold": 1.5})
    with refused(ValueError, "cache.threshold 0.5 cache.tier device host"):
        on_mesh("zeropp", 2, 2, budget=10**6, **{"cache.threshold": 0.5})


def _without(program: Program, dep: int) -> Program:
    ops = tuple(
        dataclasses.replace(op, deps=tuple(d for d in op.deps if d != dep)) for op in program.ops
    )
    return dataclasses.replace(program, ops=ops, _peaks={})


def test_broken_programs_are_found() -> None:
    program = steady(on_mesh("fcdp", 2, 2, prefetch=0), toy(6, lora=False, tied=False))

    def first(wanted: OpKind, lane: Lane) -> Op:
        return next(op for op in program.ops if op.kind is wanted and op.lane is lane)

    assert any(
        "not brought" in line
        for line in used_unfetched(_without(program, first(OpKind.FETCH, Lane.FETCH).index))
    )
    assert any(
        "does not wait" in line
        for line in used_unfetched(_without(program, first(OpKind.GATHER, Lane.INTRA).index))
    )
    last = next(op for op in program.ops if op.kind is OpKind.REDUCE and op.buffer == 0)
    final = max(op.index for op in program.ops if op.kind is OpKind.REDUCE and op.unit == last.unit)
    assert any("before op" in line for line in shared_buffers(_without(program, final)))


def test_the_printed_schedule_names_axes_and_buffers() -> None:
    text = str(steady(on_mesh("fcdp", 2, 2), toy(3, lora=True, tied=True)))
    assert "over world" in text
    assert "buffer" in text


def test_a_block_too_large_for_its_slots_is_refused() -> None:
    """Closed form: the budget of the forecast's own peak is enough, a byte less is not; slots and
    prefetch are named."""
    model = toy(6, lora=False, tied=False)
    plan = on_mesh("fcdp", 2, 2)
    peak = steady(plan, model).peaks()[Pool.DEVICE]
    Forecast(dataclasses.replace(plan, budget=peak), model, (steady(plan, model),)).check()
    slot = 4 * part_layout(plan, model, model.blocks[0], StateKind.TRAINABLE).numel
    assert steady(plan, model).slot_bytes >= slot
    with refused(DoesNotFit, "prefetch slots"):
        Forecast(dataclasses.replace(plan, budget=peak - 1), model, (steady(plan, model),)).check()


def test_ranks_that_a_method_has_no_use_for_are_refused() -> None:
    with refused(ValueError, "4 fcdp hzp"):
        method("plain", mesh={"world": 4, "ranks_per_node": 2})
    with refused(ValueError, "cache.tier host frozen device int4 node"):
        method("hzp", mesh={"world": 4, "ranks_per_node": 2}, frozen="disk × int4 × node")


def test_updates_at_the_blocks_turn_run_behind_the_next_backward() -> None:
    """Closed form: no compute op waits for an update, in a program whose updates begin before its
    backward walk ends."""
    program = steady(
        on_mesh("fcdp", 2, 2, **{"update.timing": "block"}), toy(6, lora=False, tied=False)
    )
    updates = [op for op in program.ops if op.kind is OpKind.UPDATE]
    backward = [op for op in program.ops if op.kind is OpKind.BACKWARD]
    assert len(updates) == 8
    assert updates[0].index < backward[1].index
    before = happens_before(program)
    assert not any(before(update.index, op.index) for update in updates for op in backward)


@pytest.mark.parametrize(
    ("name", "given_settings", "said"),
    [
        ("mics", {"trainable": "device × raw × world"}, "frozen device raw node 2 trainable"),
        ("zero3", {"gradient": "device × fp32 × node"}, "trainable device raw world 4 gradient"),
        (
            "mics",
            {"gradient": "device × fp32 × world"},
            "4 optimizer_state device fp32 node 2 gradient",
        ),
        ("fcdp", {"frozen": "device × raw × nobody"}, "1 trainable device raw node 2 frozen"),
        ("fcdp", {"trainable": "device × raw × half"}, "nobody 1 node 2 world 4"),
        ("fcdp", {"mesh.groups": "three=3"}, "node 2 3 three"),
        ("fcdp", {"activation": "host × raw × node"}, "group"),
        ("distzo2", {"trainable": "host × raw × world"}, "mesh.ranks_per_node=2"),
        (
            "distzo2",
            {"trainable": "host × raw × node", "zo.kind": "hizoo"},
            "trainable host raw node 2",
        ),
        ("distzo2", {"frozen": "host × raw × world"}, "frozen host raw world 4"),
        ("distzo2", {"frozen": "device × raw × node"}, "frozen: host raw node"),
        (
            "zero3",
            {"trainable": "host × raw × world"},
            "trainable.tier host cache.tier fcdp device",
        ),
        ("fcdp", {"gradient": "disk × fp32 × node"}, "gradient.tier disk"),
        ("plain", {"optimizer_state": "host × fp32 × node", "mesh": {}}, "plain"),
        ("plain", {"frozen": "device × raw × node", "mesh": {}}, "group"),
        ("plain", {"trainable": "device × raw × node", "mesh": {}}, "plain"),
    ],
)
def test_a_group_that_is_not_the_meshs_is_refused(
    name: str, given_settings: dict[str, Any], said: str
) -> None:
    """Closed form: the sizes of the groups of two nodes of two ranks."""
    with refused(ValueError, said):
        method(name, **{"mesh": {"world": 4, "ranks_per_node": 2}, **given_settings})


def test_a_group_that_is_left_out_is_the_rows() -> None:
    """Closed form: pair | node | world, each where a placement names it."""
    mesh = {"world": 8, "ranks_per_node": 4, "groups": "pair=2"}
    pair = dict.fromkeys(("frozen", "trainable"), "device × raw × pair")
    plan = method("hzp", mesh=mesh, optimizer_state="disk × fp32", **pair)
    groups = [
        placement.group
        for placement in (plan.optimizer_state, plan.gradient, plan.trainable, plan.frozen)
    ]
    assert groups == ["world", "node", "pair", "pair"]
    assert (plan.optimizer_ranks, plan.gradient_ranks, plan.parameter_ranks) == (8, 4, 2)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("zero3", {"cache.tier": "host"},
         "cache.tier host trainable device raw world optimizer_state"),
        ("zero3", {"cache.tier": "device"}, "cache.tier slice"),
        ("mics", {"cache.tier": "host", "cache.threshold": 0.8, "budget": 10**9},
         "cache.tier slice"),
        ("mics", {"cache.tier": "device", "mesh": {"world": 4}}, "cache.tier slice"),
        ("fcdp", {"optimizer_state": "device × fp32 × node"}, "cache.tier slice"),
        ("hzp", {"cache.tier": "host", "mesh.groups": "all=4", "trainable": "device × raw × all",
                 "frozen": "device × raw × all", "gradient": "device × fp32 × all"},
         "cache.tier slice"),
        ("zeropp", {"cache.tier": "none"}, "cache.tier none zeropp"),
        ("fcdp", {"cache.tier": "none"}, "cache.tier host device zero3"),
        ("plain", {"cache.tier": "host", "mesh": {}}, "process|rank"),
        ("mebp", {"cache.tier": "device", "mesh": {}}, "cache.tier none"),
    ],
)  # fmt: skip
def test_a_cache_that_would_keep_nothing_is_refused(
    name: str, settings: dict[str, Any], said: str
) -> None:
    """Closed form: the groups between which a slice lies."""
    mesh = {} if "mesh" in settings else {"mesh.world": 4, "mesh.ranks_per_node": 2}
    with refused(ValueError, said):
        method(name, **{**mesh, **settings})


@pytest.mark.parametrize(
    ("rows", "facts"), [(8, ()), (5, ("batch_size 5 4 3 8", "38%")), (2, ("2 4", "50%"))]
)
def test_rows_that_are_copies_are_said_with_their_share(
    rows: int, facts: tuple[str, ...], tmp_path: Path
) -> None:
    """Closed form: four ranks walk four rows or eight, of which so many were given."""
    (tmp_path / "config.json").write_text("{}")
    data = DataSettings(train="data.jsonl")
    run = RunConfig(model=str(tmp_path), plan=on_mesh("zero3", 2, 2), data=data, batch_size=rows)
    lines = [line for line in preflight.notes(run, 8) if "copies" in line]
    assert len(lines) == bool(facts)
    for line in lines:
        says(line, *facts)


@pytest.mark.parametrize(("nodes", "noted"), [(1, True), (2, False)])
def test_a_cache_on_one_node_is_allowed_and_said_to_be_none(
    nodes: int, noted: bool, tmp_path: Path
) -> None:
    """Closed form: the program has an op of a cache, or the notes before a run say that it has
    none."""
    model = toy(4, lora=False, tied=False)
    for name in ("fcdp", "zeropp"):
        plan = on_mesh(name, nodes, 2)
        run = RunConfig(model=str(tmp_path), plan=plan, data=DataSettings(train="data.jsonl"))
        (tmp_path / "config.json").write_text("{}")
        lines = [
            line
            for line in preflight.notes(run, 8)
            if "nothing is cached, parameters are gathered as under zero3" in line
        ]
        assert bool(lines) == noted
        keeps = [
            op
            for op in steady(plan, model).ops
            if op.kind is OpKind.CACHE or (op.kind is OpKind.GATHER and op.slot < 0)
        ]
        assert bool(keeps) != noted
    assert not any(
        "cached" in line
        for line in preflight.notes(dataclasses.replace(run, plan=on_mesh("zero3", 1, 2)), 8)
    )


def test_a_step_of_a_405b_with_64_micro_batches_is_compiled_in_little_memory() -> None:
    """Operating system: what a process of its own adds to its resident bytes, one rank of 1,024;
    89,415 ops took 550 MB when the order of ops was a bit mask for each."""
    code = """
import resource
from blockwalk.plan.methods import method
from blockwalk.program.compile import compile
from blockwalk.program.program import Shape, StepKind
from tests.closed_form.test_planner import LLAMA_405B

mesh = {"world": 1024, "ranks_per_node": 8}
plan = method("fcdp", mesh=mesh, gradient_accumulation_steps=64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
program = compile(plan, LLAMA_405B, StepKind.TRAIN, Shape(1, 4096), device="cuda")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(program.ops), after - before)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    ops, kilobytes = map(int, answer.stdout.split())
    assert ops > 64 * 126 * 6
    assert kilobytes < 200_000

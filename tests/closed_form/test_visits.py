"""Micro-batches that visit a block together. Oracle: the simulator on the same plan with other
numbers of them or other budgets, bytes counted by hand, and what was refused before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, UnitCost
from blockwalk.program.program import Lane, OpKind, Pool, Program, Shape, StepKind
from blockwalk.program.settling import PINNED, Room, settle
from blockwalk.simulate import hardware
from blockwalk.simulate.planner import Task, candidates, look_at, programs_of, rank
from blockwalk.simulate.seconds import CostModel
from blockwalk.train import config
from tests.given import costs, decoder
from tests.support.messages import refused
from tests.support.toy_model import toy

pytestmark = pytest.mark.fast

MESH = {"world": 16, "ranks_per_node": 8}
A40S = dataclasses.replace(hardware.load("a40-48gb-x8-ib100"), nodes=2)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Models, machines and shapes as they come."""
    model = toy(draw(st.integers(1, 4)), lora=draw(st.booleans()), tied=draw(st.booleans()))
    sizes = [draw(st.integers(0, 400_000)) for _ in range(6)]
    flops = draw(st.integers(0, 10**9))
    units = {
        kind: UnitCost(forward, backward + forward // 4, forward // 4, flops, 2 * flops)
        for kind, forward, backward in zip(
            ("prologue", "block", "epilogue"), sizes[:3], sizes[3:], strict=True
        )
    }
    known = Costs(tuple(units.items()))
    name = draw(st.sampled_from(["a40-48gb-x8-eth1", "a40-48gb-x8-ib100", "rtx-4090", "laptop"]))
    machine = hardware.load(name)
    if name.startswith("a40"):
        machine = dataclasses.replace(
            machine, devices_per_node=draw(st.integers(1, 2)), nodes=draw(st.integers(1, 2))
        )
    return Task(
        model, lambda plan, shape: known, machine, Shape(2, 16), None, draw(st.integers(2, 5))
    )


@settings(max_examples=60, deadline=None)
@given(task=tasks(), place=st.integers(0, 10**6), room=st.floats(0.6, 4.0))
def test_as_many_as_fit_are_never_slower_than_one(task: Task, place: int, room: float) -> None:
    """Oracle: the same plan with ``together: 1``, simulated."""
    first_order = [(label, plan) for label, plan in candidates(task) if plan.together == "auto"]
    label, plan = first_order[place % len(first_order)]
    alone = dataclasses.replace(plan, together=1)
    (program, *_), _ = programs_of(task, alone)
    peak = (
        program.peaks()[Pool.DEVICE] + (task.hardware.device == "cpu") * program.peaks()[Pool.HOST]
    )
    task = dataclasses.replace(task, budget=max(int(room * peak), 1))
    one = look_at(task, label, alone)
    several = look_at(task, label, plan)
    if one.simulation is not None:  # else more together may still fit: they add up nothing
        assert several.simulation is not None
        assert several.simulation.seconds <= one.simulation.seconds * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(task=tasks(), budgets=st.tuples(*[st.floats(4.5, 7.5)] * 3))
def test_more_budget_is_never_slower_on_paper(task: Task, budgets: tuple[float, ...]) -> None:
    """Oracle: the best of each budget, one after the other."""
    last = float("inf")
    for power in sorted(budgets):
        ranking = rank(dataclasses.replace(task, budget=int(10**power)))
        fastest = min(
            (
                c.simulation.seconds / c.simulation.tokens
                for c in ranking.first_order
                if c.simulation
            ),
            default=float("inf"),
        )
        assert fastest <= last * (1 + 1e-9)
        last = fastest


def gpt_30b() -> ModelSpec:
    """GPT-30B as FCDP's table IV has it, near enough: 40 blocks of width 7,936."""
    wide = 7936
    return decoder(layers=40, hidden=wide, wide=8 * wide // 3, keys=wide, vocab=50257, tied=False)


def test_gpt_30b_has_a_first_order_plan_on_two_nodes_of_eight_a40s() -> None:
    """Oracle: nothing fits while states stay on the device and a block is fetched ahead: FCDP's
    model on its machine, four micro-batches."""
    model = gpt_30b()
    task = Task(model, costs(model), A40S, Shape(4, 512), micro_batches=4)
    of_row = [(label, plan) for label, plan in candidates(task) if plan.method == "fcdp"]
    found = {label: look_at(task, label, plan) for label, plan in of_row}
    assert look_at(task, "fcdp", method("fcdp", mesh=MESH, gradient_accumulation_steps=4)).refused
    on_host = found["fcdp, states on the host, 4 micro-batches together"]
    assert on_host.simulation is not None
    assert on_host.plan.together == 4
    assert on_host.label.endswith("4 micro-batches together")


def charged(kind: OpKind, part: StateKind | None, **changes: Any) -> float:
    """Seconds that a step of FCDP's model spends on one kind of op."""
    model = gpt_30b()
    task = Task(model, costs(model), A40S, Shape(1, 512), micro_batches=3)
    plan = method("fcdp", mesh=MESH, gradient_accumulation_steps=3, **changes)
    programs, known = programs_of(task, plan)
    model_of = CostModel(plan, model, A40S, known, programs[0])
    ops = [op for op in programs[0].ops if op.kind is kind and op.part is part]
    return sum(model_of.seconds(op) for op in ops if op.lane is not Lane.INTER)


def test_what_is_off_the_device_is_charged() -> None:
    """Closed form: an update in host memory reads and writes master, two moments and a gradient, 28
    bytes a parameter, at 20 GB/s, its gradient comes down and its weights go up. Accumulators on
    the host go down twice and up twice in three walks, and never with one walk."""
    numel = gpt_30b().numel(trainable=True)
    device = charged(OpKind.UPDATE, StateKind.TRAINABLE)
    host = charged(OpKind.UPDATE, StateKind.TRAINABLE, optimizer_state="host × fp32 × world")
    down, up = A40S.device_to_host.bandwidth, A40S.host_to_device.bandwidth
    expected = numel / 16 * (28 / 2e10 + 4 / down + 2 / up)
    assert host == pytest.approx(expected, rel=0.05)
    assert host > 5 * device
    gradient = StateKind.GRADIENT
    on_device = charged(OpKind.REDUCE, gradient, gradient="device × fp32 × node")
    on_host = charged(OpKind.REDUCE, gradient)
    moved = 2 * 4 * numel / 8 * (1 / down + 1 / up)
    assert on_host - on_device == pytest.approx(moved, rel=0.05)
    together = {"together": 3}
    assert charged(OpKind.REDUCE, gradient, **together) == pytest.approx(
        charged(OpKind.REDUCE, gradient, gradient="device × fp32 × node", **together)
    )


def test_a_block_is_fetched_once_a_visit() -> None:
    """Closed form: ⌈A/k⌉ walks fetch what ⌈A/k⌉ steps do, but for the blocks that stay where a walk
    turns."""
    model = toy(6, lora=True, tied=False)

    def fetched(**changes: Any) -> int:
        plan = method("mebp", frozen="host × raw", prefetch=0, **changes)
        task = Task(model, lambda plan, shape: Costs(), A40S, Shape(1, 8))
        program: Program = programs_of(task, plan)[0][0]
        return sum(
            op.unit == 3 and op.part is StateKind.FROZEN
            for op in program.ops
            if op.kind is OpKind.FETCH
        )

    assert fetched() == 2
    for micro_batches, together, walks in ((4, 1, 4), (4, 2, 2), (5, 2, 3), (4, 4, 1), (5, 4, 2)):
        changes = {"gradient_accumulation_steps": micro_batches, "together": together}
        assert fetched(**changes) == 2 * walks


@pytest.mark.parametrize(
    ("name", "changes", "facts"),
    [
        ("fcdp", {"gradient_accumulation_steps": 4, "together": 5}, "together 5 4 auto"),
        ("plain", {"together": 0}, "together 0 1"),
        ("plain", {"together": "all"}, "together all auto"),
        ("zo2", {"gradient_accumulation_steps": 2, "together": 2}, "together 2 1 visit"),
        (
            "plain",
            {"gradient_accumulation_steps": 4, "together": 2, "update.timing": "block"},
            "gradient_accumulation_steps 4 together 2 update.timing",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, changes: dict[str, Any], facts: str) -> None:
    """Oracle: the number, what it may be, and the setting to change."""
    with refused(ValueError, *facts.split()):
        method(name, **changes)


def test_the_old_name_leads_to_the_number() -> None:
    """Oracle: the meaning of ``accumulation_order`` in versions that had it."""
    given = {"gradient_accumulation_steps": 4, "batch_size": 8}
    for order, line in (("block", "together: 4"), ("micro_batch", "together: 1")):
        with refused(ValueError, "accumulation_order", line):
            config.from_mapping({**given, "accumulation_order": order})


def test_a_plan_says_its_walks() -> None:
    """Closed form: consecutive micro-batches, all of them, each once."""
    plan = method("plain", gradient_accumulation_steps=7, together=3)
    assert [list(walk) for walk in plan.walks] == [[0, 1, 2], [3, 4, 5], [6]]
    assert Plan(gradient_accumulation_steps=4, together="auto").visit == 1


def test_a_run_settles_on_as_many_as_its_budget_holds() -> None:
    """Oracle: the peak of the step's program with each number. Ranks have a budget or count on
    nothing; one process with inputs on the host counts what is free there."""
    model = toy(4, lora=False, tied=False)
    shape = Shape(64, 64)
    accumulates = {"gradient_accumulation_steps": 4, "mesh": MESH}

    def number(room: Room, plan: Plan) -> int | str:
        return settle(plan, model, shape, Costs(), device="cuda", room=room).plan.together

    def peak(pool: Pool, plan: Plan) -> int:
        return compile(plan, model, StepKind.TRAIN, shape, device="cuda").peaks()[pool]

    two = peak(Pool.DEVICE, method("zero3", together=2, **accumulates))
    plan = method("zero3", together="auto", **accumulates)
    assert number(Room(), plan) == 1
    assert number(Room(), dataclasses.replace(plan, budget=10**12)) == 4
    assert number(Room(), dataclasses.replace(plan, budget=two)) == 2
    assert number(Room(), dataclasses.replace(plan, budget=two - 1)) == 1
    streams = {"frozen": "host × raw", "activation": "host", "gradient_accumulation_steps": 4}
    plan = method("mebp", together="auto", budget=10**12, resident=0, **streams)
    all_four = peak(Pool.HOST, dataclasses.replace(plan, together=4))
    assert number(Room(host_free=int(all_four / PINNED) + 2), plan) == 4
    assert number(Room(host_free=int(all_four / PINNED) - 2), plan) == 2

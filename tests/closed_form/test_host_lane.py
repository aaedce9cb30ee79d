"""Oracle: closed forms. A host that takes so many seconds for each op queues them one after the
other; the steps of an H200 as a profiler counted and timed them."""

from __future__ import annotations

import dataclasses

import pytest

from blockwalk.plan.methods import method
from blockwalk.plan.work import Work
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, UnitCost
from blockwalk.program.program import Lane, Op, OpKind, Program, Shape, StepKind
from blockwalk.simulate import hardware, simulator, timeline
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.seconds import LAZY_STARTS, UPDATE_STARTS, CostModel
from tests.support.messages import refused
from tests.support.toy_model import toy

pytestmark = pytest.mark.fast

SHAPE = Shape(1, 4)
CARD = Hardware(
    "toy", device_bytes=10**9, host_bytes=10**9, flops={"float32": 1e12}, op_seconds=7.0,
    host_start_seconds=0.25, host_turn_seconds=2.0,
)  # fmt: skip
BLOCK = UnitCost(
    forward=Work(products=10**12, starts=3), backward=Work(starts=5), again=Work(starts=2)
)
COSTS = Costs((("block", BLOCK), ("prologue", UnitCost(forward=Work(touched=4, starts=1)))))


def ops_of(*kinds: tuple[OpKind, Lane]) -> Program:
    ops = tuple(Op(index, kind, 1, lane) for index, (kind, lane) in enumerate(kinds))
    return Program("toy", StepKind.TRAIN, SHAPE, ("a", "b"), frozenset(), frozenset(), ops)


def test_an_op_begins_when_the_host_has_queued_it() -> None:
    """Three forwards of 2 s that a host queues in 3 s each end at 5, 8 and 11; a fetch, which the
    host does not queue, waits for none of them."""
    program = ops_of(
        (OpKind.FORWARD, Lane.COMPUTE),
        (OpKind.FETCH, Lane.FETCH),
        (OpKind.FORWARD, Lane.COMPUTE),
        (OpKind.FORWARD, Lane.COMPUTE),
    )
    queued = [simulator.queue_times(program, lambda op: 3.0 * (op.kind is OpKind.FORWARD))]
    spans = simulator.schedule((program,), lambda op: 2.0, queued)
    assert [(span.began, span.ended) for span in spans[0]] == [(3, 5), (0, 2), (6, 8), (9, 11)]
    path = simulator.critical_path((program,), spans, lambda op: str(op.lane), queued)
    assert path == {simulator.STARTING: 9.0, "compute": 2.0}


def test_the_slower_of_host_and_lane_bounds_a_step() -> None:
    """Forwards of 3 s behind a host of 2: the first waits for it, and the lane is never idle
    again."""
    program = ops_of(*[(OpKind.FORWARD, Lane.COMPUTE)] * 3)
    queued = [simulator.queue_times(program, lambda op: 2.0)]
    spans = simulator.schedule((program,), lambda op: 3.0, queued)
    assert [span.ended for span in spans[0]] == [5, 8, 11]
    path = simulator.critical_path((program,), spans, lambda op: str(op.lane), queued)
    assert path == {simulator.STARTING: 2.0, "compute": 9.0}


def test_seconds_of_the_host_are_a_turn_and_its_starts() -> None:
    """2 s a turn and 0.25 s a start; a matrix that is decoded or perturbed when it is read counts
    for more."""
    model = toy(2, lora=False, tied=False)
    matrices = sum(param.quantizable for param in model.blocks[0].params)
    params = len(model.blocks[0].params)
    turns = {
        ("mezo", OpKind.FORWARD): 3 + LAZY_STARTS * matrices + params - matrices,
        ("mezo", OpKind.UPDATE): params,
        ("plain", OpKind.FORWARD): 3,
        ("plain", OpKind.BACKWARD): 5 + 2,
        ("plain", OpKind.UPDATE): UPDATE_STARTS * params,
    }
    for (name, kind), starts in turns.items():
        costs = CostModel(method(name), model, CARD, COSTS)
        assert costs.host_seconds(Op(0, kind, 1, Lane.COMPUTE)) == 2 + starts / 4, (name, kind)
        assert costs.host_seconds(Op(0, OpKind.FETCH, 1, Lane.FETCH)) == 0


def test_the_host_takes_the_place_of_the_start_of_an_op() -> None:
    """A second of products, after the 7 s of an op's start where no host is described."""
    model = toy(2, lora=False, tied=False)
    op = Op(0, OpKind.FORWARD, 1, Lane.COMPUTE)
    weights = model.blocks[0].numel() * 4 / CARD.memory_bandwidth
    for machine, start in ((CARD, 0.0), (CARD.without_host(), 7.0)):
        seconds = CostModel(method("plain"), model, machine, COSTS).seconds(op)
        assert seconds == pytest.approx(1 + start + weights, abs=1e-6)


def test_a_step_and_its_timeline_have_the_host() -> None:
    plan = method("plain")
    model = toy(2, lora=False, tied=False)
    program = compile(plan, model, StepKind.TRAIN, SHAPE, costs=COSTS, device="cuda")
    step = simulator.simulate((program,), plan, model, CARD, COSTS)
    expected = sum(CostModel(plan, model, CARD, COSTS).host_seconds(op) for op in program.ops)
    assert step.host[-1].ended == expected > 0.9 * step.seconds
    assert step.bottleneck().endswith(simulator.STARTING)
    trace = timeline.events(program, [], process="p", host=step.host_times())
    assert {event["args"]["name"] for event in trace if event["ph"] == "M"} == {"p", "host"}
    assert sum(event["dur"] for event in trace if event["ph"] == "X") == 1e6 * expected
    no_host = simulator.simulate((program,), plan, model, CARD.without_host(), COSTS)
    assert (no_host.host, no_host.host_times()) == ((), [])


@pytest.mark.parametrize("key", ["host_start_seconds", "host_turn_seconds"])
@pytest.mark.parametrize("value", [-1e-6, float("inf"), float("nan")])
def test_a_host_without_sense_is_refused(key: str, value: float) -> None:
    with refused(ValueError, f"{key} {value}"):
        dataclasses.replace(CARD, **{key: value})


def test_cards_have_a_host_and_processors_have_none() -> None:
    for name in hardware.names():
        machine = hardware.load(name)
        described = machine.host_start_seconds > 0 and machine.host_turn_seconds > 0
        is_card = machine.device == "cuda" and (machine.world == 1 or machine.card != "")
        assert described == is_card, name

"""Oracle: closed forms of bytes, and the order that a program's dependencies leave: of updates by
the processor behind an accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from blockwalk.plan.methods import method
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile, resident
from blockwalk.program.invariants import happens_before
from blockwalk.program.program import Lane, OpKind, Pool, Program, Shape, StepKind
from tests.golden.specs import llama
from tests.support.messages import refused

pytestmark = pytest.mark.fast

ADAPTED = llama(4)
WHOLE = llama(4, rank=0)
TRAINED = WHOLE.numel(trainable=True)
ON_HOST = {"trainable": "host × fp32", "optimizer_state": "host × fp32", "recompute": "all"}


def step(plan: Plan, model: Any = WHOLE, device: str = "cuda") -> Program:
    return compile(plan, model, StepKind.TRAIN, Shape(2, 16), device=device)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_nothing_that_is_computed_waits_for_an_update(prefetch: int) -> None:
    program = step(method("plain", **ON_HOST, prefetch=prefetch, **{"update.timing": "block"}))
    before = happens_before(program)
    updates = [op for op in program.ops if op.kind is OpKind.UPDATE]
    assert sorted(op.unit for op in updates) == list(range(len(WHOLE.units)))
    assert {op.lane for op in updates} == {Lane.UPDATE}
    *computed, check = [op for op in program.ops if op.lane is Lane.COMPUTE]
    assert check.kind is OpKind.CHECK
    for update in updates:
        assert not any(before(update.index, op.index) for op in computed)
        assert before(update.index, check.index)
    fetches = [op for op in program.ops if op.kind is OpKind.FETCH and op.slot >= 0]
    assert not any(before(update.index, fetch.index) for fetch in fetches for update in updates)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_gradients_of_few_units_are_on_the_device_at_once(prefetch: int) -> None:
    """Those of one unit that is differentiated, and of ``prefetch`` others that are leaving."""
    plan = method("plain", **ON_HOST, prefetch=prefetch, **{"update.timing": "block"})
    program = step(plan)
    before = happens_before(program)
    leaves = {
        op.unit: op
        for op in program.ops
        if op.kind is OpKind.STORE and op.part is StateKind.GRADIENT
    }
    for op in program.ops:
        if op.kind is OpKind.BACKWARD:
            earlier = [unit for unit in leaves if unit > op.unit]
            late = [unit for unit in earlier if not before(leaves[unit].index, op.index)]
            assert len(late) <= prefetch
    assert sum(op.nbytes for op in leaves.values()) == 4 * TRAINED
    assert program.bytes_by_lane()[Lane.STORE] == 4 * TRAINED


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        # master, two moments and a gradient; a step that is refused goes back to master and moments
        (WHOLE, ON_HOST, {Pool.HOST: 16 * TRAINED}),
        (WHOLE, {**ON_HOST, "update.timing": "block"}, {Pool.HOST: 28 * TRAINED}),
        (WHOLE, {"update.timing": "block"}, {Pool.HOST: 0, Pool.DISK: 0}),
    ],
)
def test_bytes_between_steps(
    model: Any, settings: dict[str, Any], expected: dict[Pool, int]
) -> None:
    held = resident(method("plain", **settings), model, device="cuda")
    assert {pool: held[pool] for pool in expected} == expected


def test_what_updates_need_on_the_device_is_counted_there() -> None:
    """Two moments of 4 bytes, and a copy of them and of the master that a refused step goes back
    to."""
    kept, at_turn = (
        resident(method("plain", **{"update.timing": timing}), WHOLE, device="cuda")[Pool.DEVICE]
        for timing in ("step", "block")
    )
    master = sum(unit.nbytes(trainable=True) for unit in WHOLE.units)
    assert at_turn - kept == 8 * TRAINED + master


def test_adapters_are_kept_in_host_memory_and_all_parameters_on_the_disk() -> None:
    """Of adapters the device has one copy; the disk has none of their state."""
    trained = ADAPTED.numel(trainable=True)
    row = method("mebp")
    held = resident(row, ADAPTED, device="cuda")
    assert held[Pool.HOST] == 28 * trained
    assert held[Pool.DISK] == sum(
        unit.nbytes(row.frozen.codec, trainable=False) for unit in ADAPTED.units
    )
    whole = method("mebp", frozen="disk × raw")
    held = resident(whole, WHOLE, device="cuda")
    assert held[Pool.DISK] == 24 * TRAINED
    largest = max(unit.numel(trainable=True) for unit in WHOLE.units)
    assert held[Pool.HOST] == (whole.prefetch + 2) * 4 * largest
    program = step(whole)
    places = [
        op.slot for op in program.ops if op.kind is OpKind.STORE and op.part is StateKind.GRADIENT
    ]
    assert places == [number % 3 for number in range(len(WHOLE.units))]


def test_a_place_in_host_memory_is_filled_when_its_gradients_are_used_up() -> None:
    program = step(method("mebp", frozen="disk × raw"))
    before = happens_before(program)
    leaves = [op for op in program.ops if op.kind is OpKind.STORE and op.part is StateKind.GRADIENT]
    updates = [op for op in program.ops if op.kind is OpKind.UPDATE]
    for place in range(3):
        for used, filled in zip(updates[place::3], leaves[place + 3 :: 3], strict=False):
            assert used.unit == leaves[updates.index(used)].unit
            assert before(used.index, filled.index)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_update_that_would_read_two_memories_is_refused(tier: str) -> None:
    plan = method("plain", trainable=f"{tier} × fp32")
    with refused(ValueError, f"optimizer_state {tier} fp32 trainable device"):
        step(plan)
    step(plan, device="cpu")
    step(plan, ADAPTED)
    step(method("plain", trainable=f"{tier} × fp32", **{"optimizer.name": "sgd"}))

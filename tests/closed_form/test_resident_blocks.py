"""Oracle: the definition of a plan that fits, for random budgets, models and rows: the peak of its
whole program; and the closed form of what blocks that stay take and save."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.plan.methods import method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, Pending, UnitCost
from blockwalk.program.program import Lane, OpKind, Pool, Program, Shape, StepKind
from blockwalk.program.resident_blocks import settled
from blockwalk.program.unit_sizes import evenly
from tests.support.messages import refused
from tests.support.toy_model import toy

pytestmark = pytest.mark.fast
COSTS = Costs(
    (
        ("block", UnitCost(3000, 5000, 2000, 100, 200)),
        ("epilogue", UnitCost(9000, 9500, 0, 50, 100)),
    )
)
ROWS = {
    "zo2": method("zo2"),
    "zo2 on disk, 8 bits": method("zo2", trainable="disk × fp8", frozen="disk", prefetch=2),
    "distzo2": method("distzo2", mesh={"world": 2, "ranks_per_node": 2}),
    "mebp": method("mebp"),
    "mebp, nothing recomputed": method(
        "mebp", recompute="none", activation="device", frozen="host × bf16"
    ),
}


def step(plan: Plan, model: ModelSpec) -> Program:
    pending = Pending(1, flush=True) if plan.method in ("zo2", "distzo2") else Pending()
    return compile(
        plan, model, StepKind.TRAIN, Shape(1, 8), costs=COSTS, pending=pending, device="cuda"
    )


def peak(plan: Plan, model: ModelSpec) -> int:
    return step(plan, model).peaks()[Pool.DEVICE]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(ROWS)),
    layers=st.integers(1, 9),
    lora=st.booleans(),
    budgets=st.lists(st.integers(1, 900_000), min_size=2, max_size=3),
)
def test_a_plan_that_fits_never_stops_fitting(
    name: str, layers: int, lora: bool, budgets: list[int]
) -> None:
    """Neither for more memory nor for blocks that stay; more memory never keeps fewer, and one
    block more would not fit."""
    plan = ROWS[name]
    model = toy(layers, lora=lora, tied=False)
    last = 0
    least = min(
        peak(dataclasses.replace(plan, resident=0, budget=None, recompute=_least(plan)), model),
        900_000,
    )
    for budget in sorted(budgets):
        within = dataclasses.replace(plan, budget=budget)
        found = settled(within, model, Shape(1, 8), COSTS, device="cuda")
        assert found == dataclasses.replace(within, resident=found.resident)
        assert found.resident >= last
        last = found.resident
        assert (peak(found, model) <= budget) == (least <= budget)
        if 0 < found.resident < layers and plan.recompute != "none":
            more = dataclasses.replace(found, resident=found.resident + 1, recompute=_least(plan))
            assert peak(more, model) > budget


def _least(plan: Plan) -> str:
    return "all" if plan.recompute == "auto" else plan.recompute


def test_both_ends_are_the_rows_that_they_are() -> None:
    """All blocks on the device take what ``mezo`` takes and move nothing; each that stays saves its
    way there and back."""
    model = toy(6, lora=False, tied=False)
    block = sum(p.numel * 4 for p in model.blocks[0].params)
    moved = {n: step(method("zo2", resident=n), model).bytes_by_lane() for n in range(7)}
    assert [moved[n].get(Lane.FETCH, 0) for n in range(7)] == [(6 - n) * block for n in range(7)]
    assert [moved[n].get(Lane.STORE, 0) for n in range(7)] == [(6 - n) * block for n in range(7)]
    every = step(method("zo2", resident=6), model)
    mezo = step(method("mezo"), model)
    assert every.peaks() == mezo.peaks()
    assert not [op for op in every.ops if op.kind in (OpKind.FETCH, OpKind.STORE, OpKind.EVICT)]
    assert "stay on the device: prologue, block 0, block 3, epilogue" in str(
        step(method("zo2", resident=2), model)
    )


@pytest.mark.parametrize("count", [0, 1, 2, 7, 96, 126])
def test_any_beginning_of_the_order_lies_evenly(count: int) -> None:
    order = evenly(count)
    assert sorted(order) == list(range(count))
    for few in range(1, count + 1):
        kept = sorted(order[:few])
        gaps = [
            after - before for before, after in zip(kept, [*kept[1:], count + kept[0]], strict=True)
        ]
        assert max(gaps) <= 2 * count / few + 1


def test_without_a_budget_or_over_ranks_nothing_is_decided() -> None:
    model = toy(4, lora=False, tied=False)
    assert settled(method("zo2"), model, Shape(1, 8), COSTS, device="cuda").resident == 0
    sharded = method("fcdp", mesh={"world": 2, "ranks_per_node": 2}, budget=10**9)
    assert settled(sharded, model, Shape(1, 8), COSTS, device="cuda") == sharded
    with refused(ValueError, "resident 3 cache.threshold"):
        method("fcdp", mesh={"world": 2, "ranks_per_node": 2}, resident=3)

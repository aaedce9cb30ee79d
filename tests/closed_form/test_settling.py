"""Oracle: closed forms of what a machine has room for, and the peaks of the whole compiled program;
settings that somebody named, which stay as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from blockwalk.plan.choices import AUTO
from blockwalk.plan.methods import method
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile
from blockwalk.program.program import Pool, Shape, StepKind
from blockwalk.program.settling import (
    Room,
    Settled,
    begins,
    settle,
    settle_states,
    settled_before,
)
from tests.given import costs, decoder

pytestmark = pytest.mark.fast

MODEL = decoder(layers=12, hidden=512, wide=1408, keys=128, vocab=2000, tied=False, lora_rank=4)
SHAPE = Shape(1, 64)
PLENTY = Room(device_free=10**12, host_free=10**12)
NO_DEVICE = Room(host_free=10**12)
TIERS = ("frozen.tier", "activation.tier", "trainable.tier", "optimizer_state.tier")
ON_DEVICE = {"trainable": "device × fp32", "optimizer_state": "device × fp32"}


def run(
    room: Room, plan: Plan | None = None, named: frozenset[str] | None = frozenset(), **inputs: Any
) -> Settled:
    plan = plan or method("mebp")
    inputs = {"device": "cuda", **inputs}
    return settle(plan, MODEL, SHAPE, costs(MODEL)(plan, SHAPE), room=room, named=named, **inputs)


def peaks(plan: Plan) -> dict[Pool, int]:
    return compile(
        plan, MODEL, StepKind.TRAIN, SHAPE, costs=costs(MODEL)(plan, SHAPE), device="cuda"
    ).peaks()


def test_a_budget_is_nine_tenths_of_what_is_free_unless_one_is_named() -> None:
    assert run(Room(10**10, 10**12)).plan.budget == 9 * 10**9
    assert run(Room(10**10, 10**12), method("plain")).plan.budget == 9 * 10**9
    assert run(Room(10**10, 10**12), method("mebp", budget=5 * 10**9)).plan.budget == 5 * 10**9
    assert run(NO_DEVICE).plan.budget is None, "torch does not tell what is free"


def test_ranks_that_must_agree_have_no_budget_of_their_own() -> None:
    two = {"world": 2, "ranks_per_node": 2}
    assert run(PLENTY, method("fcdp", mesh=two)).plan == method("fcdp", mesh=two)
    apart = run(PLENTY, method("zo2", mesh={**two, "data": 2})).plan
    assert apart.budget == 9 * 10**11, "whose weights each has whole"


def test_a_processor_changes_nothing() -> None:
    for name in ("plain", "mebp", "mezo", "zo2"):
        plan = method(name)
        found = run(PLENTY, plan, device="cpu")
        assert found == Settled(dataclasses.replace(plan, resident=0))


def test_weights_and_activations_begin_from_the_host_where_it_has_room_for_what_is_pinned() -> None:
    """On both sides of the border: what the program of the answer pins is 0.8 of what is free, or a
    byte more."""
    every = run(NO_DEVICE)
    assert (every.plan.frozen.tier, every.plan.activation.tier, every.plan.trainable.tier) == (
        "host",
        "host",
        "device",
    )
    assert every.names == (*TIERS, "resident")
    pinned = peaks(every.plan)[Pool.HOST]
    anyway = peaks(method("mebp", resident=0, **ON_DEVICE))[Pool.HOST]
    blocks = sum(block.nbytes(every.plan.frozen.codec, trainable=False) for block in MODEL.blocks)
    assert pinned - anyway == blocks + len(MODEL.blocks) * SHAPE.tokens * MODEL.hidden_size * 2
    border = -(-pinned * 10 // 8)
    for free, tiers in (
        (border, ("host", "host")),
        (border - 2, ("disk", "host")),
        (1, ("disk", "disk")),
    ):
        found = run(Room(host_free=free))
        assert (found.plan.frozen.tier, found.plan.activation.tier) == tiers
        assert found.names == every.names, "what stays on the disk was decided as well"
        assert f"begin from the {tiers[0]}" in " ".join(found.notes)


def test_what_stays_on_the_device_is_not_pinned() -> None:
    """A card that holds the model needs no room on the host for it."""
    found = run(Room(10**12, 1))
    assert (found.plan.resident, found.plan.frozen.tier) == (len(MODEL.blocks), "host")
    disk = dataclasses.replace(
        found.plan, frozen=method("mebp").frozen, activation=method("mebp").activation
    )
    assert peaks(found.plan)[Pool.HOST] == peaks(disk)[Pool.HOST], (
        "what optimizer states take anyway"
    )
    assert peaks(found.plan)[Pool.DEVICE] < 10**12


def test_masters_and_moments_of_adapters_are_on_the_device_where_the_budget_holds_them() -> None:
    """On both sides of the border: what the program of the answer takes, or a byte less."""
    plan = method("mebp", resident=0)
    wanted = peaks(run(NO_DEVICE, plan).plan)[Pool.DEVICE]
    without = peaks(run(Room(0, 10**12), plan, named=frozenset({"trainable"})).plan)[Pool.DEVICE]
    adapters = MODEL.numel(trainable=True)
    assert wanted - without >= 8 * adapters, "their moments at least"
    for budget, tier in ((wanted, "device"), (wanted - 1, "disk")):
        settled = run(PLENTY, dataclasses.replace(plan, budget=budget))
        assert settled.plan.trainable.tier == settled.plan.optimizer_state.tier == tier
        assert settled.names == TIERS, "what stays was decided as well"
        assert peaks(settled.plan)[Pool.DEVICE] <= budget


@pytest.mark.parametrize("kind", ["trainable", "optimizer_state"])
@pytest.mark.parametrize("suffix", ["", ".tier"])
def test_adapters_states_stay_where_somebody_named_a_tier(kind: str, suffix: str) -> None:
    plan = run(PLENTY, named=frozenset({kind + suffix})).plan
    assert plan.trainable.tier == plan.optimizer_state.tier == "disk"
    assert settled_before(plan, frozenset({kind}), {"trainable.tier": "device"}) == {}


def test_parameters_that_are_no_adapters_stay_on_their_tier() -> None:
    plan = method("mebp")
    whole = decoder(layers=4, hidden=64, wide=128, keys=64, vocab=200, tied=False)
    settled = settle(
        plan,
        whole,
        SHAPE,
        costs(whole)(plan, SHAPE),
        device="cuda",
        room=PLENTY,
        named=frozenset(),
    ).plan
    assert settled.trainable.tier == settled.optimizer_state.tier == "disk"
    assert settle_states(plan, whole, "cuda") == plan


def test_a_walker_that_no_run_has_settled_keeps_adapters_states_on_the_device() -> None:
    plan = method("mebp")
    settled = settle_states(plan, MODEL, "cuda")
    assert settled == method("mebp", **ON_DEVICE)
    for other, device in ((plan, "cpu"), (dataclasses.replace(plan, budget=10**12), "cuda")):
        assert settle_states(other, MODEL, device) == other


@pytest.mark.parametrize(
    ("named", "tiers"),
    [
        ({"frozen"}, ("disk", "host")),
        ({"frozen.tier"}, ("disk", "host")),
        ({"frozen.codec", "prefetch"}, ("host", "host")),
        ({"frozen", "activation"}, ("disk", "disk")),
        (None, ("disk", "disk")),
    ],
)
def test_what_somebody_named_stays(named: set[str] | None, tiers: tuple[str, str]) -> None:
    found = run(PLENTY, named=None if named is None else frozenset(named)).plan
    assert (found.frozen.tier, found.activation.tier) == tiers


def test_other_rows_keep_their_tiers() -> None:
    for plan in (
        method("plain"),
        method("zo2", trainable="disk × raw", frozen="disk × raw"),
        method("mezo"),
    ):
        assert list(begins(plan, frozenset())) == [plan]


def test_a_resumed_run_takes_what_was_decided_and_nothing_that_was_named_since() -> None:
    before = {"frozen.tier": "disk", "activation.tier": "host", "budget": 123, "resident": 7}
    plan = method("mebp")
    assert settled_before(plan, frozenset(), before) == before
    assert settled_before(plan, frozenset({"frozen"}), before) == {
        k: v for k, v in before.items() if k[0] != "f"
    }
    given = dataclasses.replace(plan, budget=5)
    assert settled_before(given, frozenset({"budget"}), before) == {
        "frozen.tier": "disk",
        "activation.tier": "host",
    }
    assert settled_before(plan, None, before) == {"budget": 123, "resident": 7}
    assert settled_before(plan, frozenset(), {}) == {}
    assert plan.resident == AUTO

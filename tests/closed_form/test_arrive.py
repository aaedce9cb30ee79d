"""Oracle: the definition. The ops that a placement, and what is where, call for; asking changes
nothing."""

from __future__ import annotations

from typing import Any

import pytest

from blockwalk.plan.methods import method
from blockwalk.plan.placement import StateKind
from blockwalk.program.arrive import Occupant, Residency, Ways
from blockwalk.program.costs import Pending
from blockwalk.program.placements import Placements
from blockwalk.program.program import Draft, Op, Pool
from blockwalk.program.residence import resolve
from blockwalk.program.resident_bytes import resident_bytes
from blockwalk.program.unit_sizes import UnitSizes
from tests.support.toy_model import toy

pytestmark = pytest.mark.fast

FROZEN = StateKind.FROZEN
TRAINABLE = StateKind.TRAINABLE
MESH: dict[str, Any] = {"mesh": {"world": 4, "ranks_per_node": 2}}
UNIT = 2


def brought(
    ways: Ways, part: StateKind, before: Residency
) -> tuple[list[str], list[Op], Residency]:
    """The ops in words, numbered from 10, and the residency after them; asked twice."""
    here = before.takes(UNIT, 1)
    row = resolve(ways.sizes)[UNIT, part].facts
    assert row.arrive is not None
    draft = Draft(10)
    after = row.arrive(ways, UNIT, part, here, draft)
    ops = draft.ops
    again = Draft(10)
    assert (after, ops) == (row.arrive(ways, UNIT, part, here, again), again.ops)
    assert here == before.takes(UNIT, 1)
    assert [op.index for op in ops] == list(range(10, 10 + len(ops)))
    words = [
        f"{op.kind} {','.join(op.axes)}".strip() + (" on device" if op.device_slice else "")
        for op in ops
    ]
    return words, ops, after


def ways(name: str, lora: bool = False, **changes: Any) -> Ways:
    rest = {key: changes.pop(key) for key in ("pending", "gathers", "keeps") if key in changes}
    return Ways(UnitSizes(method(name, **changes), toy(4, lora=lora, tied=False), "cuda"), **rest)


def test_what_is_on_another_tier_is_fetched() -> None:
    words, (fetch,), after = brought(ways("zo2"), TRAINABLE, Residency(emptied={1: 7}))
    assert words == ["FETCH"]
    assert (fetch.deps, fetch.slot) == ((7,), 1)
    assert after.occupants == {UNIT: Occupant(1, (7,), (10,), (10,))}


@pytest.mark.parametrize(
    ("pending", "gathers", "wanted"),
    [
        (Pending(), True, ["FETCH", "GATHER node"]),
        (Pending(1), True, ["FETCH", "UPDATE", "GATHER node"]),
        (Pending(1, flush=True), True, ["FETCH", "UPDATE", "STORE", "GATHER node"]),
        (Pending(2, flush=True), False, ["FETCH", "UPDATE", "STORE"]),
    ],
)
def test_a_slice_is_brought_up_to_date_before_it_is_gathered(
    pending: Pending, gathers: bool, wanted: list[str]
) -> None:
    words, ops, after = brought(
        ways("distzo2", pending=pending, gathers=gathers, **MESH), TRAINABLE, Residency()
    )
    assert words == wanted
    ready = ops[-1] if gathers else ops[-2]
    assert after.occupants[UNIT].ready == (ready.index,)


@pytest.mark.parametrize(
    "placed", ["host × raw × node", "host × raw × nobody", "disk × raw × node"]
)
def test_frozen_slices_are_gathered_without_an_update(placed: str) -> None:
    """Two ranks of a node hold half of a block's bytes each, whatever waits for its trainables; a
    file is fetched whole."""
    here = ways("distzo2", lora=True, pending=Pending(1, flush=True), frozen=placed, **MESH)
    words, ops, _ = brought(here, FROZEN, Residency())
    whole = here.sizes.memory_bytes(here.sizes.reads(UNIT))
    half = placed == "host × raw × node"
    assert words == (["FETCH", "GATHER node"] if half else ["FETCH"])
    assert [op.nbytes for op in ops] == ([whole // 2] * 2 if half else [whole])
    held = resident_bytes(Placements(here.sizes.plan, here.sizes.model, "cuda"))[Pool.HOST]
    assert held == 0 if "disk" in placed else held == 4 * ops[0].nbytes


@pytest.mark.parametrize(
    ("name", "part", "before", "wanted"),
    [
        ("zero3", TRAINABLE, Residency(), ["GATHER world", "GATHER node"]),
        ("mics", TRAINABLE, Residency(), ["GATHER node"]),
        ("zeropp", TRAINABLE, Residency(), ["GATHER node"]),
        ("zeropp", TRAINABLE, Residency(dirty=frozenset({UNIT})), ["GATHER world", "GATHER node"]),
        ("fcdp", TRAINABLE, Residency(), ["FETCH", "GATHER node"]),
        (
            "fcdp",
            TRAINABLE,
            Residency(dirty=frozenset({UNIT})),
            ["GATHER world", "FETCH", "GATHER node"],
        ),
        ("fcdp", FROZEN, Residency(dirty=frozenset({UNIT})), ["FETCH", "GATHER node"]),
        (
            "fcdp",
            TRAINABLE,
            Residency(kept=frozenset({(UNIT, TRAINABLE)})),
            ["GATHER node on device"],
        ),
    ],
)
def test_a_gather_begins_with_the_nearest_slice_that_is_not_out_of_date(
    name: str, part: StateKind, before: Residency, wanted: list[str]
) -> None:
    words, ops, after = brought(ways(name, lora=True, **MESH), part, before)
    assert words == wanted
    assert after.occupants[UNIT].ready == (ops[-1].index,)
    assert (UNIT in after.dirty) == (UNIT in before.dirty and part is FROZEN)
    refreshed = UNIT in before.dirty and part is TRAINABLE
    assert (UNIT in after.refreshed) == refreshed
    assert [op.refreshes for op in ops] == [refreshed, *[False] * (len(ops) - 1)]


def test_a_slice_that_stays_on_the_device_is_cached_there_and_out_of_date_on_the_host() -> None:
    keeps = frozenset({(UNIT, TRAINABLE)})
    words, _, after = brought(
        ways("fcdp", keeps=keeps, **MESH), TRAINABLE, Residency(dirty=frozenset({UNIT}))
    )
    assert words == ["GATHER world", "CACHE on device", "GATHER node"]
    assert after.kept == keeps
    assert UNIT in after.dirty
    gone = after.left(UNIT, 20, [TRAINABLE])
    assert (gone.occupants, gone.kept, gone.emptied) == ({}, frozenset(), {1: 20})
    assert after.kept == keeps

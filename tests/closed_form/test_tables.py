"""Oracle: the tables themselves. A row's name stands where the row and its own arithmetic are, and
nothing hangs on it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockwalk.plan import methods
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.update_rules import RULES
from blockwalk.plan.zeroth_order_kinds import KINDS
from blockwalk.simulate import hardware
from blockwalk.simulate.planner import Task, candidates
from tests.given import costs as costs_of
from tests.given import decoder
from tests.golden.programs import CASES, MESHES, SHAPE, programs, whole
from tests.support.rows import registered

pytestmark = pytest.mark.fast

SOURCE = Path(methods.__file__).parents[1]
PAGE = SOURCE.parents[1] / "docs/how-to/what-you-own.md"

CHOSEN = {
    "plan.choices": {"adamw", "spsa"},
    "plan.methods": {"sgd"},
    "contrib.mezo_original.__init__": {"sgd", "spsa"},
    "integrations.trainer": {"adamw", "sgd"},
}
"""Values chosen: the defaults, what rows begin with, what the original MeZO's arithmetic is of, and
what transformers means."""


def named(words: Iterable[str]) -> dict[str, set[str]]:
    """The modules whose code has one of these words as a string, and which."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        constants = (
            n.value
            for n in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(n, ast.Constant)
        )
        if here := {value for value in constants if isinstance(value, str)} & set(words):
            found[module] = here - CHOSEN.get(module, set())
    return {module: here for module, here in found.items() if here}


def test_no_module_but_the_table_names_an_update_rule_or_its_states() -> None:
    found = named({*RULES, *(state for row in RULES.values() for state in row.states)})
    assert set(found) - {"numerics.updates"} == {"plan.update_rules"}


def test_no_module_but_the_table_and_its_own_names_a_zeroth_order_kind_or_its_states() -> None:
    own = {f"estimators.zeroth_order.{name}" for name in KINDS}
    assert set(named(KINDS)) == {"plan.zeroth_order_kinds"}
    assert set(named(state for row in KINDS.values() for state in row.states)) <= {
        "plan.zeroth_order_kinds",
        *own,
    }


ONE_STAGE: list[dict[str, Any]] = [mesh for mesh in MESHES.values() if "pipeline" not in mesh]
"""Meshes for zeroth order, whose ranks walk every block."""


@pytest.mark.parametrize("name", METHODS)
def test_nothing_hangs_on_a_methods_name(name: str) -> None:
    """The plans and programs of a row, in every case of it that is kept, are those of the same row
    under another name."""
    given: list[dict[str, Any]] = [
        {"mesh": m, "zo.kind": k} for m in ONE_STAGE for k in ("spsa", "hizoo")
    ]
    given = given if METHODS[name]().sharded_kinds else []
    cases = CASES[name]
    plans = [replace(case.plan(name), method="") for case in cases]
    meshed = [replace(method(name, **settings), method="") for settings in given]
    compiled = list(programs(name, cases))
    with registered(METHODS, "x", lambda: replace(METHODS[name](), method="x")):
        assert [replace(case.plan("x"), method="") for case in cases] == plans
        assert [replace(method("x", **settings), method="") for settings in given] == meshed
        for (title, one), (other_title, other) in zip(compiled, programs("x", cases), strict=True):
            assert title == other_title
            assert list(whole(one)) == list(whole(other)), title


def test_distzo2_is_zo2_whose_blocks_are_spread_over_a_node() -> None:
    for mesh in ONE_STAGE:
        row = method("zo2", mesh=mesh, trainable="host × raw × node", frozen="host × raw × node")
        assert replace(row, method="distzo2") == method("distzo2", mesh=mesh)
        assert row.parameter_ranks == row.frozen_ranks == mesh["ranks_per_node"]


def test_the_tables_of_methods_are_one() -> None:
    """Of the module's docstring, of the page for users, and of the planner: the same rows; each
    estimator is the row's."""
    assert methods.__doc__ is not None
    lines = [line.split("|") for line in methods.__doc__.splitlines() if line.startswith("| ")][1:]
    assert [line[1].strip() for line in lines] == list(METHODS)
    assert all(
        line[2].strip().partition(",")[0] == METHODS[line[1].strip()]().estimator for line in lines
    )
    table = PAGE.read_text("utf-8").partition("## Methods")[2].partition("## ")[0]
    firsts = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert [name for first in firsts for name in re.findall(r"`(\w+)`", first)] == list(METHODS)
    machine = replace(hardware.load("rtx-4090"), nodes=2, devices_per_node=2)
    model = decoder(layers=2, hidden=64, wide=64, keys=64, vocab=64, lora_rank=8)
    task = Task(model, costs_of(model), machine, SHAPE)
    labels = {plan.method: label for label, plan in candidates(task)}
    assert set(labels) == set(METHODS)
    assert all(label.startswith(name) for name, label in labels.items())

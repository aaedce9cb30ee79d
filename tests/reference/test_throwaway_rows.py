"""Oracle: the rows that they copy. A rule and a kind, each made of a row and its own code, train
and replay as those do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from blockwalk import method
from blockwalk.convert.replay import replay
from blockwalk.estimators.zeroth_order import hizoo, kind
from blockwalk.numerics import updates
from blockwalk.plan.update_rules import RULES
from blockwalk.plan.zeroth_order_kinds import KINDS
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.messages import refused
from tests.support.rows import registered
from tests.support.zeroth_order_runs import assert_same, trained


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rule "heavy", a copy of momentum, and the kind "bent", a copy of hizoo: of each a row and
    its code, no more."""
    monkeypatch.setattr(updates, "heavy", updates.momentum, raising=False)
    monkeypatch.setitem(
        sys.modules, kind.__name__.replace("kind", "bent"), SimpleNamespace(KIND=hizoo.KIND)
    )  # type: ignore[misc]
    with registered(RULES, "heavy", RULES["momentum"]), registered(KINDS, "bent", KINDS["hizoo"]):
        yield


@pytest.mark.usefixtures("copies")
def test_a_rule_is_a_row_and_its_function(tmp_path: Path) -> None:
    weights = []
    for name in ("momentum", "heavy", "sgd"):
        settings = {"name": name, "learning_rate": 1e-2, "max_grad_norm": 1.0}
        with Walker(
            tiny_model("llama"), method("plain", optimizer=settings), workdir=tmp_path, device="cpu"
        ) as walker:
            for step in range(3):
                walker.step(random_batch(seed=step))
            weights.append(
                {key: master.clone() for key, master in walker.engine.trained.masters.items()}
            )
    assert_same(weights[1], weights[0])
    with refused(AssertionError, "differ"):
        assert_same(weights[2], weights[0])


@pytest.mark.usefixtures("copies")
def test_a_kind_is_a_row_and_its_file(tmp_path: Path) -> None:
    """Under a rule with a state of its own, in 16 bits on disk; and rebuilt from the ledger."""
    base = tmp_path / "base"
    tiny_model("opt", tied=True).save_pretrained(base)
    weights = []
    lines = []
    for rule, name in (("momentum", "hizoo"), ("heavy", "bent"), ("momentum", "spsa")):
        settings: dict[str, Any] = {
            "zo": {"kind": name, "hessian_alpha": 1e-3, "hessian_codec": "bf16", "queries": 2}
        }
        plan = method(
            "zo2",
            trainable="disk × bf16",
            optimizer={"name": rule, "learning_rate": 1e-2},
            **settings,
        )
        ledger = tmp_path / name / "ledger.jsonl"
        with Walker(base, plan, workdir=ledger.parent, device="cpu", ledger=ledger) as walker:
            for step in range(3):
                walker.step(random_batch(seed=step))
            weights.append(trained(walker))
        lines.append(ledger.read_bytes().split(b"\n")[1:])
    assert_same(weights[1], weights[0])
    assert lines[1] == lines[0]
    assert lines[2] != lines[0]
    replay(base, tmp_path / "bent" / "ledger.jsonl", tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), weights[0])


@pytest.mark.parametrize("setting", ["zo.kind", "optimizer.name"])
def test_an_unknown_word_is_an_error(setting: str) -> None:
    with refused(ValueError, f"{setting} bent"):
        method("zo2", **{setting: "bent"})
    with refused(ValueError, "spsa fzoo hizoo"):
        kind.kind_of("bent")

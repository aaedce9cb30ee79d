"""Oracle: the programs of the deep model, whose every computing op must have been timed; a clock
that runs outside of the process that times."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any

import pytest

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.program.compile import compile
from blockwalk.program.program import COMPUTES, OpKind, Shape, StepKind
from blockwalk.simulate import hardware
from blockwalk.simulate.simulator import simulate
from blockwalk.walk import timed_units
from blockwalk.walk.unit_costs import UnitCosts
from tests.support.messages import refused

SHAPE = Shape(2, 24)


def config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "gemma3_text", hidden_size=64, intermediate_size=96, num_hidden_layers=13, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=300, dtype="bfloat16",
    )  # fmt: skip


def test_every_op_that_computes_is_timed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Thirteen layers of two kinds, of which every sixth has the other, by four. A step on paper
    takes what was timed; asked again, nothing is timed. A timing that took too long is not kept."""
    machine = str(uuid.uuid4())  # what earlier tests left in the cache is of others
    plan = method("mebp", frozen="disk × raw")
    lora = LoraSettings(rank=4)
    with monkeypatch.context() as impatient:
        impatient.setattr(timed_units, "LIMIT", 0.01)
        hurried = UnitCosts(config(), lora=lora)
        assert hurried.timed(plan, SHAPE, machine) == hurried.timed(plan, SHAPE, machine) == ()
    begins, fails = (record.message for record in caplog.records)
    assert "timing a few steps of a shallow gemma3_text at 2 × 24" in begins
    assert "by doctor's rates alone" in fails
    costs = UnitCosts(config(), lora=lora)
    began = time.perf_counter()
    timed = dict(costs.timed(plan, SHAPE, machine))
    clock = time.perf_counter() - began
    model = costs.spec()
    known = replace(costs(plan, SHAPE), timed=tuple(timed.items()))
    room = {"device": "cpu", "page_cache": 1 << 40}
    program = compile(plan, model, StepKind.TRAIN, SHAPE, costs=known, **room)  # type: ignore[arg-type]
    computing = [op for op in program.ops if op.kind in COMPUTES or op.kind is OpKind.UPDATE]
    keys = [(op.kind, model.units[op.unit].kind, op.keep_graph) for op in computing]
    assert set(keys) == set(timed)
    assert 0 < min(timed.values()) <= max(timed.values()) < clock
    slow = replace(hardware.load("laptop"), op_seconds=1e6, flops={"float32": 1e-6})
    simulated = simulate((program,), plan, model, slow, known)
    spent = sum(span.seconds for span in simulated.spans if span.op.kind in COMPUTES)
    expected = sum(timed[key] for key in keys if key[0] in COMPUTES)
    assert spent == pytest.approx(expected)
    monkeypatch.setattr(timed_units, "measure", lambda _: pytest.fail("timed again"))
    again = UnitCosts(config(), lora=lora).timed(replace(plan, seed=7), SHAPE, machine)
    assert dict(again) == timed
    assert UnitCosts(config(), lora=lora, device="cuda").timed(plan, SHAPE, machine) == ()


def test_a_model_whose_kinds_are_not_all_there_is_refused() -> None:
    """The reason comes from the process that times."""
    request = timed_units.Request(
        config(), "bfloat16", frozenset({"block-of-none"}), None, method("mezo"), SHAPE, 1.0
    )
    with refused(ValueError, "block-of-none"):
        timed_units.measure(request)

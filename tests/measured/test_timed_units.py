"""Oracle: the programs of the deep model, whose every computing op must have been timed; a clock
that runs outside of the process that times; the kernel's count of threads that run, and a load that
is put on by hand."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.program.compile import compile
from blockwalk.program.program import COMPUTES, OpKind, Shape, StepKind
from blockwalk.simulate import hardware
from blockwalk.simulate.simulator import simulate
from blockwalk.system import load
from blockwalk.system.load import OtherLoad
from blockwalk.walk import timed_units, timed_walk, unit_costs
from blockwalk.walk.unit_costs import UnitCosts
from tests.support.messages import refused

SHAPE = Shape(2, 24)


def config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "gemma3_text", hidden_size=64, intermediate_size=96, num_hidden_layers=13, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=300, dtype="bfloat16",
    )  # fmt: skip


PLAN = method("mebp", frozen="disk × raw")
LORA = LoraSettings(rank=4)


def others(monkeypatch: pytest.MonkeyPatch, threads: Callable[[], float]) -> None:
    """Let other processes compute with so many threads."""
    monkeypatch.setattr(load, "computing", lambda own: threads())


@pytest.mark.parametrize("learnt", [0.001, 0.02, 0.5, 1.0])
def test_a_step_that_is_timed_learns_something(learnt: float) -> None:
    """Closed form: the share, and one token of a row. Of label words 1 token in 40 is learnt, and
    none was left of a row of 16."""
    for length in (2, 16, 40):
        labels_BS = timed_walk.labels_of(torch.ones(3, length, dtype=torch.int64), learnt)
        assert (labels_BS == 1).sum(1).tolist() == [max(round(learnt * length), 1)] * 3


def test_every_op_that_computes_is_timed_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Thirteen layers of two kinds, of which every sixth has the other, by four. A step on paper
    takes what was timed; asked again, nothing is timed. A timing that took too long is not kept."""
    others(monkeypatch, lambda: 0.0)
    machine = str(uuid.uuid4())  # what earlier tests left in the cache is of others
    with monkeypatch.context() as impatient:
        impatient.setattr(timed_units, "LIMIT", 0.01)
        hurried = UnitCosts(config(), lora=LORA)
        for _ in range(2):
            with refused(ValueError, "0 s"):
                hurried.timed(PLAN, SHAPE, machine)
    (begins,) = (record.message for record in caplog.records)
    assert "timing a few steps of a shallow gemma3_text at 2 × 24" in begins
    costs = UnitCosts(config(), lora=LORA)
    began = time.perf_counter()
    timed = dict(costs.timed(PLAN, SHAPE, machine))
    clock = time.perf_counter() - began
    model = costs.spec()
    known = replace(costs(PLAN, SHAPE), timed=tuple(timed.items()))
    room = {"device": "cpu", "page_cache": 1 << 40}
    program = compile(PLAN, model, StepKind.TRAIN, SHAPE, costs=known, **room)  # type: ignore[arg-type]
    computing = [op for op in program.ops if op.kind in COMPUTES or op.kind is OpKind.UPDATE]
    keys = [(op.kind, model.units[op.unit].kind, op.keep_graph) for op in computing]
    assert set(keys) == set(timed)
    assert 0 < min(timed.values()) <= max(timed.values()) < clock
    slow = replace(hardware.load("laptop"), op_seconds=1e6, flops={"float32": 1e-6})
    simulated = simulate((program,), PLAN, model, slow, known)
    spent = sum(span.seconds for span in simulated.spans if span.op.kind in COMPUTES)
    expected = sum(timed[key] for key in keys if key[0] in COMPUTES)
    assert spent == pytest.approx(expected)
    asked: list[timed_units.Request] = []

    def noted(request: timed_units.Request) -> timed_units.Timed:
        asked.append(request)
        raise ValueError("timed again")

    monkeypatch.setattr(timed_units, "measure", noted)
    again = UnitCosts(config(), lora=LORA).timed(replace(PLAN, seed=7), SHAPE, machine)
    assert dict(again) == timed
    assert not asked
    assert UnitCosts(config(), lora=LORA, device="cuda").timed(PLAN, SHAPE, machine) == ()
    for name, fact in {
        "processor": lambda: "another processor",
        "usable_cores": lambda: 1000,
    }.items():
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(unit_costs, name, fact)
            unit_costs._speeds.cache_clear()
            with refused(ValueError, "again"):
                UnitCosts(config(), lora=LORA).timed(PLAN, SHAPE, machine)
    unit_costs._speeds.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with refused(ValueError, "again"):
            UnitCosts(config(), lora=LORA).timed(PLAN, SHAPE, machine)
    finally:
        torch.set_num_threads(threads)
    assert [request.threads for request in asked] == [threads, threads, threads + 1]
    monkeypatch.setattr(torch, "__version__", "1.0")
    with refused(ValueError, "again"):
        UnitCosts(config(), lora=LORA).timed(PLAN, SHAPE, machine)


def test_a_timing_beside_other_work_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is walked on a busy machine; where load rises, the steps before it count; where it
    rises before the first, none is kept."""
    machine = str(uuid.uuid4())
    costs = partial(UnitCosts, config(), lora=LORA)
    cores = os.cpu_count() or 1
    with monkeypatch.context() as busy:
        others(busy, lambda: cores)
        busy.setattr(timed_units, "_walked", lambda *_: pytest.fail("a walk on a busy machine"))
        with refused(ValueError, f"{cores}.0 {cores}"):
            costs().timed(PLAN, SHAPE, machine)
    ops: timed_units.Timed = (((OpKind.FORWARD, "block", False), 1.0),)
    slow: timed_units.Timed = (((OpKind.FORWARD, "block", False), 20.0),)
    quiet_until = [0.0]

    def walked(seconds: float, request: bytes, load: OtherLoad) -> Any:
        start = time.monotonic()
        quiet_until[0] = start + seconds
        time.sleep(2.4)
        return tuple(
            timed_units.TimedStep(start + at, start + at + 0.7, step)
            for at, step in ((0.0, ops), (0.8, slow), (1.6, slow))
        )

    for seconds in (0.0, 0.75):
        quiet_until[0] = math.inf
        others(monkeypatch, lambda: cores if time.monotonic() > quiet_until[0] else 0.0)
        monkeypatch.setattr(timed_units, "_walked", partial(walked, seconds))
        if seconds:
            assert costs().timed(PLAN, SHAPE, machine) == ops
        else:
            with refused(ValueError, f"{cores} each step"):
                costs().timed(PLAN, SHAPE, machine)


def test_threads_of_others_are_those_that_run() -> None:
    """The kernel's own count: a program that spins is another's until it is said to be ours; this
    process's own threads are none."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            time.sleep(0.3)
            looks = [
                (load.computing({os.getpid()}), load.computing({os.getpid(), spinning.pid}))
                for _ in range(50)
            ]
        finally:
            spinning.kill()
    assert all(with_it >= 1 for with_it, _ in looks)
    with_it, without = (statistics.fmean(column) for column in zip(*looks, strict=True))
    assert with_it - without == pytest.approx(1.0, abs=0.5)
    assert load.OtherLoad(beside=1000).busy() == ""


def test_a_model_whose_kinds_are_not_all_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason comes from the process that times."""
    others(monkeypatch, lambda: 0.0)
    request = timed_units.Request(
        config(), "bfloat16", frozenset({"block-of-none"}), None, method("mezo"), SHAPE, 1.0, 1
    )
    with refused(ValueError, "block-of-none"):
        timed_units.measure(request)

"""Oracle: the same steps on a CPU, and with masters on the device, bit for bit; and the simulated
driver's count of waits and of copies from pageable memory."""

from __future__ import annotations

import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from blockwalk.estimators.backprop import Backprop
from blockwalk.numerics.updates import Rule
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.tiers import TIERS, TierFacts
from blockwalk.program.placements import Placements
from blockwalk.walk.walker import Walker
from tests.golden.specs import MODELS
from tests.models import random_batch, tiny_model
from tests.support.rows import registered
from tests.support.simulated_device import Simulated

ON_HOST = {
    "trainable": "host × fp32",
    "optimizer_state": "host × fp32",
    "recompute": "all",
    "prefetch": 1,
}
AT_TURN = {"update.timing": "block"}
LORA = LoraSettings(rank=2, alpha=4)


def steps(
    folder: Path, device: str, row: str = "plain", count: int = 2, **settings: Any
) -> dict[str, torch.Tensor]:
    """The state after some steps."""
    lora = settings.pop("lora", None)
    if not (folder / "model").exists():
        tiny_model("llama", dropout=0.0, num_hidden_layers=4).save_pretrained(folder / "model")
    with Walker(
        folder / "model", method(row, **settings), lora=lora, workdir=folder, device=device
    ) as walker:
        for step in range(count):
            walker.step(random_batch(seed=step))
        state = walker.state_dict()
    return {
        name: value.cpu().clone()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("timing", ["step", "block"])
def test_no_master_is_copied_from_pageable_memory(
    timing: str, sim: Simulated, tmp_path: Path
) -> None:
    """The thread that issues a step waits at its end alone, for its losses and for squares of
    gradients."""
    settings: dict[str, Any] = {**ON_HOST, "update.timing": timing}
    model = tiny_model("opt", dropout=0.0, num_hidden_layers=4)
    with Walker(model, method("plain", **settings), workdir=tmp_path, device="sim:1") as walker:
        walker.step(random_batch(seed=0))
        sim.start_counting()
        walker.step(random_batch(seed=1))
        counts = sim.counts()
    assert "copy from pageable memory" not in str(counts.waits), counts
    assert counts.here <= 2, counts


def test_the_device_computes_on_while_the_processor_updates(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update is held up until the backward walk is at its end."""
    at_end = threading.Event()
    apply = Rule.apply_
    backward = Backprop._prologue_backward

    def held_up(self: Rule, *args: Any, **rest: Any) -> None:
        assert at_end.wait(60), "the walk waits for an update"
        apply(self, *args, **rest)

    def ends(self: Backprop, *args: Any) -> None:
        backward(self, *args)
        at_end.set()

    monkeypatch.setattr(Rule, "apply_", held_up)
    monkeypatch.setattr(Backprop, "_prologue_backward", ends)
    found = steps(tmp_path, "sim:1", count=1, **ON_HOST, **AT_TURN)
    monkeypatch.undo()
    expected = steps(tmp_path, "cpu", count=1, **ON_HOST, **AT_TURN)
    on_device = {"recompute": "all", **AT_TURN}
    assert same(found, expected)
    assert same(found, steps(tmp_path, "sim:1", count=1, **on_device))


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ("plain", {**ON_HOST, **AT_TURN}),
        ("mebp", {"frozen": "host × int8", "activation": "host", "lora": LORA}),
        (
            "mebp",
            {"frozen": "host × int8", "activation": "host", "budget": 10**9, "lora": LORA},
        ),
        ("mebp", {"frozen": "disk × raw"}),
    ],
    ids=["slots", "adapters", "adapters beside a budget", "disk"],
)
def test_a_step_that_is_refused_changes_nothing(
    row: str,
    settings: dict[str, Any],
    sim: Simulated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss that is not finite is known when units have been updated; the next step is the second
    of a run without it."""
    expected = steps(tmp_path, "cpu", row, **settings)
    wanted = dict(settings)
    lora = wanted.pop("lora", None)
    with Walker(
        tmp_path / "model", method(row, **wanted), lora=lora, workdir=tmp_path, device="sim:1"
    ) as walker:
        walker.step(random_batch(seed=0))
        with monkeypatch.context() as patch:
            patch.setattr("blockwalk.estimators.backprop.math.isfinite", lambda _: False)
            with pytest.raises(FloatingPointError):
                walker.step(random_batch(seed=7))
        walker.step(random_batch(seed=1))
        state = walker.state_dict()
    tensors = {name: v.cpu() for name, v in state.items() if isinstance(v, torch.Tensor)}
    assert same(tensors, expected)


def test_a_state_that_is_loaded_reaches_the_device(sim: Simulated, tmp_path: Path) -> None:
    """Oracle: the losses of a run that was not interrupted."""
    settings = {"frozen": "host × int8", "activation": "host"}
    tiny_model("llama", dropout=0.0).save_pretrained(tmp_path / "model")  # type: ignore[operator]

    def opened() -> Walker:
        return Walker(
            tmp_path / "model",
            method("mebp", **settings),
            lora=LORA,
            workdir=tmp_path,
            device="sim:1",
        )

    with opened() as walker:
        walker.step(random_batch(seed=0))
        state = walker.state_dict()
        expected = walker.step(random_batch(seed=1)).loss
    with opened() as walker:
        walker.load_state_dict(state)
        assert walker.step(random_batch(seed=1)).loss == expected


@pytest.mark.parametrize("timing", ["step", "block"])
def test_lanes_beside_the_compute_lane_multiply_nothing(
    timing: str, sim: Simulated, tmp_path: Path
) -> None:
    """By the interpreter's events of calls: for a library's product torch sets memory aside on each
    stream, 32 MiB on an H200, which no program tells."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and threading.current_thread().name.startswith("blockwalk "):
            called.add(function.__name__)

    threading.setprofile(note)
    try:
        steps(tmp_path, "sim:0", **{**ON_HOST, "update.timing": timing})
    finally:
        threading.setprofile(None)
    assert "copy_" in called, "the lanes are heard"
    assert not called & {"dot", "vdot", "inner", "mv", "mm", "addmm", "addmm_", "bmm", "matmul"}


@pytest.mark.parametrize(
    ("timing", "shares"),
    [
        ("step", (("device", 0.4), ("host", 0.6))),
        ("block", (("device", 0.3), ("host", 0.3), ("disk", 0.4))),
    ],
)
def test_states_are_on_the_device_for_some_units_and_behind_it_for_the_others(
    timing: str, shares: tuple[tuple[str, float], ...], sim: Simulated, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"trainable": "device × fp32", "update.timing": timing}
    split = TierFacts(pool="host", shares=shares)
    with registered(TIERS, "split", split):
        both = steps(tmp_path, "sim:1", optimizer_state="split × fp32", **settings)
        plan = method("plain", optimizer_state="split × fp32", **settings)
        places = Placements(plan, MODELS["opt"], "cuda")
    assert 0 < len(places.landed) < len(places.sizes.trained)
    assert same(both, steps(tmp_path, "cpu", optimizer_state="device × fp32", **settings))

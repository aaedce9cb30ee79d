"""Oracle: the same run whose step was foreseen. What a run needs of torch only to foresee may fail:
the run has the same losses, to the bit, and says what it lacks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.numerics import device
from blockwalk.train import train
from blockwalk.walk import unit_costs
from tests.conftest import TinyRun


def losses(tiny_run: TinyRun, output_dir: Path) -> list[float]:
    train(
        {
            "model": str(tiny_run.model),
            "output_dir": str(output_dir),
            "data.train": str(tiny_run.train),
            "data.template": "{text} It was {label}.",
            "data.label_words": "good,bad",
            "batch_size": 2,
            "method": "mebp",
            "max_steps": 2,
            "lora.rank": 2,
        }
    )
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_run_whose_step_cannot_be_foreseen_is_the_same_run(
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    foreseen = losses(tiny_run, tmp_path / "foreseen")

    def refuses(*_: Any) -> Any:
        raise AssertionError("a counter that knows no grouped heads")

    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(unit_costs, "measure", refuses)
    with caplog.at_level(logging.WARNING):
        unforeseen = losses(tiny_run, tmp_path / "unforeseen")
    assert unforeseen == foreseen
    assert len(foreseen) == 2
    assert "a counter that knows no grouped heads" in caplog.text


class Untimed:
    """An event of a device that tells no seconds, made as torch's is."""

    def __init__(self, _: torch.device, *, enable_timing: bool = False) -> None:
        if enable_timing:
            raise RuntimeError("events of this backend have no timing")

    def record(self, _: Any = None) -> None:
        """Nothing is queued."""

    def elapsed_time(self, _: Any) -> float:
        raise RuntimeError("Backend doesn't support elapsedTime()")


def test_a_device_that_tells_no_seconds_and_no_peak_is_not_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tells_nothing(*_: Any) -> Any:
        raise RuntimeError("this allocator keeps no statistics")

    monkeypatch.setattr(torch, "Event", Untimed)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", tells_nothing)
    accelerator = torch.device("xpu", 0)
    event = device.recorded(accelerator, timing=True)
    assert device.elapsed(event, event) is None
    assert device.peak_on(accelerator) == 0

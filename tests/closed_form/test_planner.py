"""Oracle: what must hold of any ranking, whatever the model: order, budgets, the interpreter's count of calls, its modules."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import method
from blockwalk.plan.run_config import DataSettings
from blockwalk.plan.settings import override
from blockwalk.program.program import Pool, Shape
from blockwalk.report import advice
from blockwalk.simulate import hardware
from blockwalk.simulate.planner import Task, largest_batch, look_at, program_of, rank
from blockwalk.train import config
from tests.given import costs, decoder
from tests.models import tiny_model

CALLS = 6_000_000
"""Function calls that the ranking may take: 3.5 million today, 2.5 s under the profiler."""

LLAMA_405B = decoder(layers=126, hidden=16384, wide=53248, keys=1024, vocab=128256, tied=False)
QWEN_3B = {
    lora_rank: decoder(layers=36, hidden=2048, wide=11008, keys=256, vocab=151936, lora_rank=lora_rank)
    for lora_rank in (None, 8)
}


def qwen_task(lora_rank: int | None, budget: int | None = None) -> Task:
    model = QWEN_3B[lora_rank]
    return Task(model, costs(model), hardware.load("rtx-4090"), Shape(1, 512), budget)


@pytest.mark.parametrize("rank_", [None, 8])
def test_a_larger_budget_is_never_worse(rank_: int | None) -> None:
    """The plans that fit a budget fit a larger one, so its best is at least as fast."""
    last = 0.0
    for budget in (1 * 10**9, 4 * 10**9, 10 * 10**9, 22 * 10**9):
        found = rank(qwen_task(rank_, budget))
        fits = [c for c in (*found.first_order, *found.zeroth_order) if c.simulation]
        assert all(c.peaks[Pool.DEVICE] <= budget for c in fits)
        best = max((c.simulation.tokens_per_second for c in fits if c.simulation), default=0.0)
        assert best >= last
        last = best


def test_the_largest_batch_fits_and_one_more_step_of_search_does_not() -> None:
    task = qwen_task(8)
    plan = method("plain", recompute="all")
    most = largest_batch(task, plan)
    assert most > 1
    for batch, fits in ((most, True), (most + most // 32 + 1, False)):
        program, _ = program_of(task, plan, Shape(batch, task.shape.sequence))
        assert (program.peaks()[Pool.DEVICE] <= task.room) == fits


def test_what_does_not_fit_is_left_out_with_figures() -> None:
    task = qwen_task(None)
    found = look_at(task, "plain", method("plain"))
    assert found.simulation is None
    assert "on the device, which has 23.0 GB" in found.refused


def test_405b_on_1024_devices_is_answered_in_few_calls_and_without_torch() -> None:
    """Oracle: the interpreter's count of function calls, which is the same on any machine: three seconds of a quiet one."""
    cluster = dataclasses.replace(hardware.load("a100-80gb"), devices_per_node=8, nodes=128)
    profile = cProfile.Profile()
    found = profile.runcall(rank, Task(LLAMA_405B, costs(LLAMA_405B), cluster, Shape(1, 4096)))
    assert pstats.Stats(profile).total_calls < CALLS
    assert found.best is not None
    code = "import sys, blockwalk.simulate.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_is_the_first_of_the_ranking_with_the_settings_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the ranking itself."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = {
        "model": str(tmp_path),
        "method": "auto",
        "lora.rank": 8,
        "batch_size": 1,
        "optimizer.learning_rate": 3e-4,
    }
    with pytest.raises(ValueError, match="blockwalk doctor"):
        config.from_mapping(settings)
    hardware.save(hardware.load("rtx-4090"), tmp_path / "hardware.yaml")
    shape = Shape(1, DataSettings().max_length)
    best = rank(advice.task(str(tmp_path), LoraSettings(rank=8), hardware.load("rtx-4090"), shape, budget=None)).best
    assert best is not None
    chosen = config.from_mapping(settings)
    assert chosen.plan == override(best.plan, {"optimizer.learning_rate": 3e-4})
    assert chosen.lora is not None
    assert chosen.lora.rank == 8
    assert config.from_mapping(chosen.to_mapping()) == chosen
    with pytest.raises(ValueError, match="no method fits"):
        config.from_mapping({**settings, "budget": "10kB"})

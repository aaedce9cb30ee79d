"""Oracle: a run that nobody killed. Killed ones, resumed, must end with its adapter, bit for bit, and its metrics."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockwalk import checkpoint
from tests.conftest import TinyRun

STEPS = 24


def arguments(tiny_run: TinyRun, output_dir: Path) -> list[str]:
    """AdamW on a cosine with dropout: moments, schedule, data order and random state must all be restored."""
    settings = "--method mebp --save_every 5 --eval_every 8 --lora.rank 4 --lora.dropout 0.1"
    settings += (
        f" --max_steps {STEPS} --optimizer.schedule cosine --optimizer.warmup_steps 3 --optimizer.learning_rate 1e-2"
    )
    resume = "--resume_from_checkpoint latest --log_every 100"
    return [
        sys.executable,
        "-m",
        "blockwalk",
        "train",
        *tiny_run.arguments(output_dir),
        *settings.split(),
        *resume.split(),
    ]


def start(tiny_run: TinyRun, output_dir: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments(tiny_run, output_dir), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def signal_when(process: subprocess.Popen[str], number: signal.Signals, ready: Callable[[], bool]) -> str:
    """Send a signal as soon as ``ready`` holds, and wait for the end."""
    while not ready() and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    return out


def steps(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / "metrics.jsonl"
    whole = (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    )
    return [json.loads(line) for line in whole]


def result(output_dir: Path) -> tuple[str, list[tuple[int, float, float]], list[tuple[int, float, float]]]:
    """What a run leaves: the adapter's digest, the losses and learning rates by step, the evaluations."""
    adapter = (output_dir / "adapter" / "adapter_model.safetensors").read_bytes()
    evaluations = [json.loads(line) for line in (output_dir / "evaluations.jsonl").read_text().splitlines()]
    return (
        hashlib.sha256(adapter).hexdigest(),
        [(line["step"], line["loss"], line["learning_rate"]) for line in steps(output_dir)],
        [(line["step"], line["loss"], line["accuracy"]) for line in evaluations],
    )


def test_a_killed_run_ends_as_if_it_had_not_been(tiny_run: TinyRun, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(tiny_run, whole)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    expected = result(whole)
    assert [step for step, _, _ in expected[1]] == list(range(1, STEPS + 1))

    def beyond(step: int) -> Callable[[], bool]:
        return lambda: len(steps(killed)) >= step

    def writing_a_checkpoint() -> bool:
        return any(killed.glob(".checkpoint*")) or len(steps(killed)) >= 14

    for ready in (beyond(3), writing_a_checkpoint, beyond(17)):
        process = start(tiny_run, killed)
        out = signal_when(process, signal.SIGKILL, ready)
        assert process.returncode == -signal.SIGKILL, out
        left = checkpoint.latest(killed)
        assert left is None or checkpoint.step_of(left) <= len(steps(killed)), "no checkpoint without its metrics"
    assert checkpoint.latest(killed) is not None, "the last resume is from a checkpoint"

    process = start(tiny_run, killed)
    out = signal_when(process, signal.SIGTERM, beyond(19))
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "stopped by SIGTERM" in out
    stopped_at = checkpoint.latest(killed)
    assert stopped_at is not None
    assert checkpoint.step_of(stopped_at) == len(steps(killed)) < STEPS, "SIGTERM saves what was done"

    process = start(tiny_run, killed)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert f"resumed at step {checkpoint.step_of(stopped_at)}" in out
    assert result(killed) == expected

"""Oracle: a run that nobody killed. Killed ones, resumed, must end with its weights, bit for bit,
and its metrics."""

import hashlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import run_checkpoint
from tests.conftest import TinyRun
from tests.forked import Forked

STEPS = 24
COMMON = (
    f"--max_steps {STEPS} --save_every 5 --eval_every 8 --resume_from_checkpoint latest"
    " --log_every 100"
)
SCHEDULE = "--optimizer.schedule cosine --optimizer.warmup_steps 3"
MEBP = f"--method mebp --lora.rank 4 --lora.dropout 0.1 --optimizer.learning_rate 1e-2 {SCHEDULE}"
ZO2 = (
    "--method zo2 --trainable disk --update.flush_every 3 --optimizer.learning_rate 1e-5"
    f" {SCHEDULE}"
)


def start(tiny_run: TinyRun, output_dir: Path, settings: str) -> Forked:
    return Forked("train", *tiny_run.arguments(output_dir), *COMMON.split(), *settings.split())


def finish(process: Forked) -> str:
    out = "".join(process.communicate(timeout=300))
    assert process.returncode == 0, out
    return out


def signal_when(process: Forked, number: signal.Signals, ready: Callable[[], bool]) -> str:
    """Send a signal as soon as ``ready`` holds, and wait for the end."""
    while not ready() and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(number)
    return "".join(process.communicate(timeout=300))


def steps(output_dir: Path) -> list[dict[str, Any]]:
    path = output_dir / "metrics.jsonl"
    whole = (
        [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )
    return [json.loads(line) for line in whole]


def result(
    output_dir: Path,
) -> tuple[str, list[tuple[int, float, float]], list[tuple[int, float, float]]]:
    """What a run leaves: the weights' digest, losses and learning rates by step, evaluations."""
    (weights,) = [
        p for p in output_dir.glob("*/*model.safetensors") if p.parent.name in ("adapter", "model")
    ]
    evaluations = [
        json.loads(line) for line in (output_dir / "evaluations.jsonl").read_text().splitlines()
    ]
    return (
        hashlib.sha256(weights.read_bytes()).hexdigest(),
        [(line["step"], line["loss"], line["learning_rate"]) for line in steps(output_dir)],
        [(line["step"], line["loss"], line["accuracy"]) for line in evaluations],
    )


def test_a_killed_run_ends_as_if_it_had_not_been(tiny_run: TinyRun, tmp_path: Path) -> None:
    """AdamW on a cosine with dropout: moments, schedule, data order and random state must all be
    restored."""
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    finish(start(tiny_run, whole, MEBP))
    expected = result(whole)
    assert [step for step, _, _ in expected[1]] == list(range(1, STEPS + 1))

    def beyond(step: int) -> Callable[[], bool]:
        return lambda: len(steps(killed)) >= step

    def writing_a_checkpoint() -> bool:
        return any(killed.glob(".checkpoint*")) or len(steps(killed)) >= 14

    for ready in (beyond(3), writing_a_checkpoint, beyond(12)):
        process = start(tiny_run, killed, MEBP)
        out = signal_when(process, signal.SIGKILL, ready)
        assert process.returncode == -signal.SIGKILL, out
        left = run_checkpoint.latest(killed)
        assert left is None or run_checkpoint.step_of(left) <= len(steps(killed)), (
            "no checkpoint without its metrics"
        )
    assert run_checkpoint.latest(killed) is not None, "the last resume is from a checkpoint"

    process = start(tiny_run, killed, MEBP)
    out = signal_when(process, signal.SIGTERM, beyond(19))
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "stopped by SIGTERM" in out
    stopped_at = run_checkpoint.latest(killed)
    assert stopped_at is not None
    assert run_checkpoint.step_of(stopped_at) == len(steps(killed)) < STEPS, (
        "SIGTERM saves what was done"
    )

    out = finish(start(tiny_run, killed, MEBP))
    assert f"resumed at step {run_checkpoint.step_of(stopped_at)}" in out
    assert result(killed) == expected


def test_a_killed_zeroth_order_run_loses_no_step_that_its_ledger_has(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    finish(start(tiny_run, whole, ZO2))
    for step in (2, 13):
        process = start(tiny_run, killed, ZO2)
        out = signal_when(process, signal.SIGKILL, lambda step=step: len(steps(killed)) >= step)  # type: ignore[misc]
        assert process.returncode == -signal.SIGKILL, out
        done = len(steps(killed))
    out = finish(start(tiny_run, killed, ZO2))
    resumed_at = int(out.split("resumed at step ")[1].split()[0])
    assert done <= resumed_at <= done + 1, "one that the ledger had and metrics.jsonl not yet"
    assert result(killed) == result(whole)

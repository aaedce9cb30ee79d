"""Oracle: the files of a run that nobody killed. Killed ones, at chosen places, and resumed, must
leave every line of their logs once, all fields that no clock decides alike; signals are answered
with what the operating system's exit codes say."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from blockwalk.checkpoints import ledger, run_checkpoint
from blockwalk.checkpoints import run_checkpoint as checkpoint
from blockwalk.cli import main
from blockwalk.data import encode
from blockwalk.simulate import timeline
from blockwalk.tiers import scratch_maps
from blockwalk.tiers.block_store import writer as store_writer
from blockwalk.tiers.model_folder import folder as disk_folder
from blockwalk.train import evaluation
from blockwalk.train.metrics_log import MetricsLog
from blockwalk.walk import walker as training_walker
from tests.conftest import TinyRun
from tests.support.kills import before, child, kill
from tests.support.messages import says

MEASURED = ("seconds", "tokens_per_second", "peak_bytes", "bytes_moved", "digest")


ZO2 = ["--method", "zo2", "--trainable", "disk", "--optimizer.learning_rate", "1e-5"]


MEBP = [
    "--method",
    "mebp",
    "--frozen",
    "disk",
    "--lora.dropout",
    "0.1",
    "--optimizer.learning_rate",
    "1e-2",
]


INT8 = ["--method", "mebp", "--frozen", "disk × int8"]


def train(tiny_run: TinyRun, folder: Path, *settings: str) -> int:
    common = [
        "--max_steps",
        "6",
        "--eval_every",
        "2",
        "--save_every",
        "3",
        "--resume_from_checkpoint",
        "latest",
    ]
    return main.main(["train", *tiny_run.arguments(folder), *common, *settings])


def files(folder: Path) -> dict[str, Any]:
    """Names, and what must be alike of a run's files."""
    found: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes() if path.suffix == ".safetensors" else None
        for path in folder.rglob("*")
        if path.is_file() and "weights-" not in str(path)
    }
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        found[name] = [
            {key: value for key, value in line.items() if key not in MEASURED} for line in lines
        ]
    return found


@pytest.mark.parametrize("settings", [ZO2, MEBP], ids=["zo2", "mebp"])
def test_logs_are_those_of_an_undisturbed_run(
    settings: list[str], tiny_run: TinyRun, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    assert train(tiny_run, whole, *settings) == 0

    def evaluates(step: int) -> Callable[..., bool]:
        return lambda _, walker, *__: walker.steps_done == step

    def on_line(step: int, name: str) -> Callable[..., bool]:
        return lambda log, line: line["step"] == step and log.path.name == name

    places: list[tuple[Any, str, Callable[..., bool]]] = [
        (MetricsLog, "write", on_line(0, "evaluations.jsonl")),
        (MetricsLog, "write", on_line(1, "metrics.jsonl")),  # zeroth order: the ledger has the step
        (evaluation.HeldOut, "evaluate", evaluates(2)),
        (
            timeline,
            "write",
            lambda _, events: "measured" in str(events),
        ),  # the ledger has the traced step
        (checkpoint, "prune", lambda *_: True),  # a checkpoint was just written
        (MetricsLog, "write", on_line(4, "evaluations.jsonl")),
        (checkpoint, "prune", lambda path, *_: (path / "checkpoint-000006").exists()),
        (evaluation.HeldOut, "evaluate", evaluates(6)),
        (training_walker.Walker, "save_pretrained", lambda *_: True),
    ]
    if settings is MEBP:
        places.insert(2, (scratch_maps.os, "unlink", lambda path, *_: "scratch-" in str(path)))
    else:
        places.append((ledger.Ledger, "rename", lambda *_: True))
        places.insert(4, (checkpoint, "save", lambda _, made: made.step == 3))  # the ledger has it
    for place, name, when in places:

        def work(place: Any = place, name: str = name, when: Callable[..., bool] = when) -> int:
            before(place, name, kill, when)
            return train(tiny_run, killed, *settings)

        assert child(work) == -signal.SIGKILL, name
        assert main.main(["report", str(killed)]) in (0, 2), "2: there is no step yet"
    assert train(tiny_run, killed, *settings) == 0
    assert main.main(["report", str(killed)]) == 0
    (killed / "report.html").unlink()
    (killed / "loss.svg").unlink()
    found = files(killed)
    expected = files(whole)
    assert found["metrics.jsonl"] == expected["metrics.jsonl"]
    assert found["evaluations.jsonl"] == expected["evaluations.jsonl"]
    assert [line["step"] for line in found["evaluations.jsonl"]] == [0, 2, 4, 6]
    assert found == expected


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("settings", [ZO2, MEBP], ids=["zo2", "mebp"])
def test_a_signal_ends_an_evaluation_which_the_resumed_run_makes(
    settings: list[str], tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    assert train(tiny_run, whole, *settings) == 0
    for step in (0, 2, 6):
        batches: list[int] = []

        def work(step: int = step, batches: list[int] = batches) -> int:
            call = "label_losses"
            before(training_walker.Walker, call, stop, lambda walker, _: walker.steps_done == step)
            before(
                training_walker.Walker,
                call,
                lambda: batches.append(1),
                lambda walker, _: walker.steps_done == step,
            )
            code = train(tiny_run, stopped, *settings)
            assert len(batches) == 1, "no other batch was begun"
            return code

        assert child(work) == 128 + signal.SIGTERM
        assert "stopping after this step" in capfd.readouterr().err
        left = run_checkpoint.latest(stopped)
        assert left is not None
        assert run_checkpoint.step_of(left) == step, "what was done is saved"
    assert train(tiny_run, stopped, *settings) == 0
    found = files(stopped)
    expected = files(whole)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert found[name] == expected[name]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (encode.RowWriter, "finish"),
        (store_writer, "encode"),
        (disk_folder.CheckpointFolder, "__init__"),
    ],
)
def test_a_signal_before_the_run_began_leaves_nothing(
    place: Any, name: str, tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While records are tokenised, weights packed, the model opened: answered where the process
    stands."""
    folder = tmp_path / "run"

    def work() -> int:
        before(place, name, stop)
        return train(tiny_run, folder, *INT8)

    assert child(work) == 128 + signal.SIGTERM
    says(capfd.readouterr().err, "SIGTERM nothing")
    assert not folder.exists(), sorted(folder.rglob("*"))


def test_a_signal_within_a_call_of_the_tokenizer(
    tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the exit code of a process whose tokenizer never comes back from its library, which
    waits for a mutex that is locked: no signal ends such a call, and none was answered before it
    ended."""
    folder = tmp_path / "run"

    def waits(*_: Any, **__: Any) -> None:
        library = ctypes.CDLL(None)  # a normal mutex, all zeros
        mutex = ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        Timer(0.5, stop).start()
        library.pthread_mutex_lock(mutex)

    def work() -> int:
        signal.alarm(20)  # ends a process that does not answer: nobody in it handles this signal
        before(encode, "_chunks", lambda: setattr(PreTrainedTokenizerFast, "__call__", waits))
        return train(tiny_run, folder, *INT8)

    assert child(work) == 128 + signal.SIGTERM
    says(capfd.readouterr().err, "SIGTERM nothing")
    assert not folder.exists(), sorted(folder.rglob("*"))

"""Oracle: the names and digests of a folder's files before a run that is refused, or killed, and
after it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from blockwalk.cli import main
from blockwalk.report import step_forecast
from blockwalk.system import atomic_files
from blockwalk.train import loop
from blockwalk.walk import walker as training_walker
from tests.conftest import TinyRun
from tests.support.messages import refused, says

ZO2 = ["--method", "zo2", "--trainable", "disk", "--optimizer.learning_rate", "1e-5"]
PLAIN = ["--method", "plain", "--optimizer.learning_rate", "1e-3"]
OVER = ["--overwrite_output_dir", "true"]


def train(tiny_run: TinyRun, folder: Path, *settings: str) -> int:
    return main.main(
        ["train", *tiny_run.arguments(folder), "--max_steps", "4", "--save_every", "2", *settings]
    )


def contents(folder: Path) -> dict[str, str]:
    """Every file and folder below, with its digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def refuse(*_: object, **__: object) -> None:
    raise ValueError("refused")


@pytest.mark.parametrize("earlier", [ZO2, PLAIN], ids=["zo2", "plain"])
def test_a_refused_run_changes_nothing(
    earlier: list[str],
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    assert train(tiny_run, folder, *earlier) == 0
    before = contents(folder)
    (tmp_path / "no weights").mkdir()
    for file in tiny_run.model.iterdir():
        if file.suffix == ".json":
            (tmp_path / "no weights" / file.name).write_bytes(file.read_bytes())
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "no label"}\n')
    wanted = {
        "does not fit": (3, ["--budget", "10kB"]),
        "no weights": (2, ["--model", str(tmp_path / "no weights")]),
        "no label": (2, ["--data.train", str(broken)]),
        "no setting to overwrite": (2, ["--overwrite_output_dir", "false"]),
    }
    if earlier is PLAIN:
        wanted["another seed"] = (
            2,
            ["--resume_from_checkpoint", str(folder / "checkpoint-000002"), "--seed", "1"],
        )
    for reason, (code, settings) in wanted.items():
        assert train(tiny_run, folder, *earlier, *OVER, *settings) == code, capsys.readouterr().err
        assert contents(folder) == before, reason
    monkeypatch.setattr(
        step_forecast.StepForecast, "of", refuse
    )  # when the walker has opened everything, the new ledger too
    assert train(tiny_run, folder, *ZO2, *OVER) == 2
    assert contents(folder) == before


def test_the_run_before_stays_until_the_first_checkpoint_is_whole(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert train(tiny_run, folder, *ZO2) == 0
    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "_evaluate", refuse)
        assert train(tiny_run, folder, *PLAIN, *OVER) == 2
    moved = contents(folder / "replaced")
    kept = (
        "ledger.jsonl",
        "checkpoint-000002/state.json",
        "checkpoint-000004/state.json",
        "metrics.jsonl",
        "config.yaml",
    )
    assert {name: moved[name] for name in kept} == {name: before[name] for name in kept}
    assert train(tiny_run, folder, *PLAIN, *OVER) == 0, (
        "a run without a checkpoint stands in nobody's way"
    )
    assert not (folder / "replaced").exists()
    assert not (folder / "ledger.jsonl").exists()
    assert not list(folder.glob("scratch/weights-*")), "weights that no ledger tells of"
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]


def test_two_runs_in_one_folder(
    tiny_run: TinyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second is refused, and says who is there; the first ends as it does alone."""
    alone = tmp_path / "alone"
    shared = tmp_path / "shared"
    assert train(tiny_run, alone, *ZO2) == 0
    step = training_walker.Walker.step
    codes = []

    def with_a_second_run(walker: Any, *arguments: Any, **options: Any) -> Any:
        if walker.steps_done == 2:
            codes.append(train(tiny_run, shared, *ZO2, *OVER))
        return step(walker, *arguments, **options)

    monkeypatch.setattr(training_walker.Walker, "step", with_a_second_run)
    capsys.readouterr()
    assert train(tiny_run, shared, *ZO2) == 0
    assert codes == [2]
    says(capsys.readouterr().err, shared, f"process {os.getpid()}")
    for name in ("model/model.safetensors", "evaluations.jsonl", "metrics.jsonl", "ledger.jsonl"):
        if name.endswith("model.safetensors"):
            assert (shared / name).read_bytes() == (alone / name).read_bytes()
        else:
            assert len(lines(shared / name)) == len(lines(alone / name)), name


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Oracle: the kernel, which lets go of a dead process's locks."""
    with atomic_files.locked(tmp_path / "runs" / "first"):
        assert (tmp_path / "runs" / "first").is_dir()
    assert not (tmp_path / "runs").exists(), "what was made for a run that came to nothing"
    folder = tmp_path / "new"
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        with atomic_files.locked(folder):
            os.write(write, b"held")
            os.read(read, 0)
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert (folder / atomic_files.LOCK).exists(), "a killed process removes nothing"
    with (
        atomic_files.locked(folder),
        refused(ValueError, f"process {os.getpid()}"),
        atomic_files.locked(folder),
    ):
        pass
    assert not folder.exists() or not list(folder.iterdir())
    (tmp_path / "file").write_text("")
    with refused(ValueError, "file"), atomic_files.locked(tmp_path / "file"):
        pass

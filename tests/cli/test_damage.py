"""Oracle: the bytes that were written. Files of a checkpoint that are not those are named, and
nothing in them is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from blockwalk.checkpoints import run_checkpoint
from blockwalk.checkpoints.ledger import LedgerPosition
from blockwalk.cli import main
from blockwalk.plan.methods import method
from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import Damaged
from blockwalk.walk.walker import Walker
from tests.conftest import TinyRun
from tests.models import random_batch, tiny_model
from tests.support.bomb import Bomb
from tests.support.messages import refused, says


@pytest.fixture(scope="module")
def walkers() -> Any:
    """A walker of each kind of state, by the estimator's name, after a step."""
    made = {
        name: Walker(tiny_model("llama"), method(name), device="cpu") for name in ("plain", "mezo")
    }
    for walker in made.values():
        walker.step(random_batch())
    yield made
    for walker in made.values():
        walker.close()


def save(walker: Walker, output_dir: Path) -> Path:
    """A checkpoint as a run saves it."""
    if walker.plan.method == "mezo":
        made = run_checkpoint.Checkpoint(
            1, walker.state_dict(), {}, {}, ledger=LedgerPosition(1, "")
        )
        return run_checkpoint.save(output_dir, made)
    path = run_checkpoint.path_of(output_dir, 1)
    made = run_checkpoint.Checkpoint(1, {}, {}, {})
    walker.save_state(path, beside={run_checkpoint.SCALARS: run_checkpoint.scalars_text(made)})
    return path


def resume(walker: Walker, path: Path) -> None:
    """Take over what :func:`save` saved."""
    saved = run_checkpoint.load(path)
    if saved.slices is None:
        walker.load_state_dict(saved.walker)
    else:
        walker.load_state(saved.slices)


FILES = (run_checkpoint.SCALARS, "rank-00000.json", "rank-00000.safetensors")


@pytest.mark.parametrize("file", [*FILES, ".metadata", "state.safetensors", "__0_0.distcp"])
@pytest.mark.parametrize("name", ["plain", "mezo"])
def test_a_pickle_in_a_checkpoint_is_not_opened(
    name: str, file: str, walkers: dict[str, Walker], tmp_path: Path
) -> None:
    """Oracle: what the pickle does when it is opened."""
    path = save(walkers[name], tmp_path)
    (path / file).write_bytes(pickle.dumps(Bomb(tmp_path / "run")))
    if file == "__0_0.distcp":
        resume(walkers[name], path)
    else:
        with refused(ValueError, "checkpoint-000001"):
            resume(walkers[name], path)
    assert not (tmp_path / "run").exists()
    with pytest.raises(FileNotFoundError):
        pickle.loads(pickle.dumps(Bomb(tmp_path / "none" / "run")))


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "missing"])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", ["plain", "mezo"])
def test_a_damaged_file_is_named(
    name: str, file: str, damage: str, walkers: dict[str, Walker], tmp_path: Path
) -> None:
    """Oracle: one bit in the middle of a file, its end, all of it."""
    path = save(walkers[name], tmp_path)
    resume(walkers[name], path)
    data = bytearray((path / file).read_bytes())
    data[len(data) * 2 // 3] ^= 1 << 4
    if damage == "missing":
        (path / file).unlink()
    else:
        (path / file).write_bytes({"bit": bytes(data), "cut": data[:-9], "empty": b""}[damage])
    with refused(Damaged, f"{path.name}/{file} damaged|missing"):
        resume(walkers[name], path)


@pytest.mark.parametrize("log", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_log_with_a_flipped_bit_is_named(
    log: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the file's name, in one line, for a bit of every byte but the last newline: names,
    values, steps, digests and borders of lines. A changed "step" dropped the lines after it without
    a word."""
    run = tmp_path / "run"
    settings = [
        "train",
        *tiny_run.arguments(run),
        "--method",
        "plain",
        "--save_every",
        "2",
        "--eval_every",
        "1",
    ]
    assert main.main([*settings, "--max_steps", "2"]) == 0
    before = (run / log).read_bytes()
    lines = atomic_files.whole_lines(run / log)
    assert [line["step"] for line in lines] == ([1, 2] if log == "metrics.jsonl" else [0, 1, 2])
    for at in range(len(before)):
        (run / log).write_bytes(
            before[:at] + bytes([before[at] ^ (1 << at % 8)]) + before[at + 1 :]
        )
        if at == len(before) - 1:
            assert atomic_files.whole_lines(run / log) == lines
        else:
            with refused(Damaged, f"{log} damaged"):
                atomic_files.whole_lines(run / log)
    (run / log).write_bytes(before.replace(b'"step"', b'"stex"', 1))
    capsys.readouterr()
    assert main.main([*settings, "--max_steps", "3", "--resume_from_checkpoint", "latest"]) != 0
    says(capsys.readouterr().err, f"{log} damaged 1 digest")
    for at in range(len(before) + 1):
        (run / log).write_bytes(before[:at])  # torn by a kill
        assert atomic_files.whole_lines(run / log) == lines[: before[: at + 1].count(b"\n")]

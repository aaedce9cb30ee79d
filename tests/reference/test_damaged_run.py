"""Oracle: the weights of a run that nobody disturbed, bit for bit. A damaged file is named; what
cannot go on is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from blockwalk.checkpoints import ledger
from blockwalk.cli import main
from blockwalk.tiers.block_store.store import read_index, read_unit_headers
from blockwalk.tiers.disk import MappedFile
from tests.conftest import TinyRun
from tests.support.messages import says

COMMON = "--optimizer.schedule constant --save_every 2 --log_every 100 --data.eval "
RUNS = {
    "plain": "--method plain --optimizer.learning_rate 1e-3",
    "mebp": "--method mebp --frozen disk×int4a --lora.rank 4 --optimizer.learning_rate 1e-2",
    "mezo": "--method mezo --optimizer.learning_rate 1e-5",
    "zo2 host": "--method zo2 --optimizer.learning_rate 1e-5",
    "zo2 disk": "--method zo2 --trainable disk --optimizer.learning_rate 1e-5",
}
Train = Callable[..., int]


@pytest.fixture(scope="module")
def train(tiny_run: TinyRun) -> Train:
    def run(folder: Path, name: str, steps: int, *settings: str) -> int:
        flags = [*COMMON.split(" "), *RUNS[name].split(), "--max_steps", str(steps), *settings]
        return main.main(["train", *tiny_run.arguments(folder), *flags])

    return run


@pytest.fixture(scope="module")
def halves(train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes]]:
    """Of each kind of run: its folder after four steps of six, and the weights after the sixth."""
    found = {}
    for name in RUNS:
        folder = tmp_path_factory.mktemp("half") / "run"
        assert train(folder, name, 4) == 0
        whole = folder.with_name("whole")
        shutil.copytree(folder, whole)
        assert train(whole, name, 6, "--resume_from_checkpoint", "latest") == 0
        found[name] = folder, weights(whole)
    return found


@pytest.fixture
def half(
    halves: dict[str, tuple[Path, bytes]], tmp_path: Path
) -> Callable[[str], tuple[Path, bytes]]:
    def copy(name: str) -> tuple[Path, bytes]:
        shutil.copytree(halves[name][0], tmp_path / "run")
        return tmp_path / "run", halves[name][1]

    return copy


def weights(folder: Path) -> bytes:
    (file,) = [
        p for p in folder.glob("*/*model.safetensors") if p.parent.name in ("model", "adapter")
    ]
    return file.read_bytes()


def flip(path: Path, at: int | None = None) -> None:
    """One bit in the middle of a file, or where it is wanted."""
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3 if at is None else at] ^= 1
    path.write_bytes(data)


def test_a_run_taken_up_is_the_run_that_was_never_stopped(
    train: Train, halves: dict[str, tuple[Path, bytes]]
) -> None:
    """Oracle: six steps in one go; what the other tests compare with."""
    for name, (folder, expected) in halves.items():
        whole = folder.with_name("at once")
        assert train(whole, name, 6) == 0
        assert weights(whole) == expected, name


FILES = ("state.json", "rank-00000.json", "rank-00000.safetensors")
CASES = [(name, file) for name in RUNS for file in FILES if (name, file) != ("zo2 disk", FILES[2])]
"""The weights of zo2 on disk are in its working folder."""


@pytest.mark.parametrize(("name", "file"), CASES)
def test_the_checkpoint_before_a_damaged_one(
    name: str,
    file: str,
    train: Train,
    half: Callable[[str], tuple[Path, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, expected = half(name)
    newest = folder / "checkpoint-000004"
    flip(newest / file)
    assert train(folder, name, 6, "--resume_from_checkpoint", str(newest)) == 2
    assert train(folder, name, 6, "--resume_from_checkpoint", "latest") == 0
    said = capsys.readouterr()
    says(said.out, newest / file, "damaged")
    says(said.out, "checkpoint-000002")
    assert weights(folder) == expected
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == [
        "checkpoint-000004",
        "checkpoint-000006",
    ]


def test_no_checkpoint_is_left(
    train: Train, half: Callable[[str], tuple[Path, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the folder's files, all still there."""
    folder, _ = half("plain")
    for path in folder.glob("checkpoint-*"):
        flip(path / "state.json")
    before = sorted(folder.rglob("*"))
    assert train(folder, "plain", 6, "--resume_from_checkpoint", "latest") == 2
    says(capsys.readouterr().err, "checkpoint|checkpoints")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("damage", ["missing", "behind", "digit", "another run's"])
@pytest.mark.parametrize("name", ["mezo", "zo2 disk"])
def test_a_ledger_that_is_not_the_checkpoints(
    name: str,
    damage: str,
    train: Train,
    half: Callable[[str], tuple[Path, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the run with its ledger put back."""
    folder, expected = half(name)
    path = folder / ledger.NAME
    data = path.read_bytes()
    header, *lines = data.splitlines(keepends=True)
    if damage == "missing":
        path.unlink()
    elif damage == "behind":
        path.write_bytes(b"".join([header, *lines[:3]]))
    elif damage == "digit":
        flip(path, len(header) + lines[0].index(b'"learning_rate": 1e-05') + 17)
    else:
        found, entries = ledger.read_ledger(path)
        path.unlink()
        other = ledger.Ledger(path, {**found, "run": "other"})
        for entry in entries:
            other.append(replace(entry, epsilon=2 * entry.epsilon))
        other.close()
    before = sorted(folder.glob("*/*"))
    assert train(folder, name, 6, "--resume_from_checkpoint", "latest") == 2
    said = capsys.readouterr().err
    wanted = {
        "missing": "missing",
        "behind": "3 steps",
        "digit": "damaged 2",
        "another run's": "ledger",
    }
    says(said, path, wanted[damage])
    assert said.count("\n") == 1
    if damage != "another run's":  # whose weights are not these
        assert sorted(folder.glob("*/*")) == before
    path.write_bytes(data)
    assert train(folder, name, 6, "--resume_from_checkpoint", "latest") == 0
    assert weights(folder) == expected


def test_a_ledger_without_its_checkpoints(
    train: Train, half: Callable[[str], tuple[Path, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the ledger's own bytes, which a run that began anew would replace."""
    folder, _ = half("mezo")
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    before = (folder / ledger.NAME).read_bytes()
    assert train(folder, "mezo", 6, "--resume_from_checkpoint", "latest") == 2
    says(capsys.readouterr().err, "4 steps checkpoint")
    assert (folder / ledger.NAME).read_bytes() == before


def test_a_damaged_pack_is_made_again(
    train: Train, half: Callable[[str], tuple[Path, bytes]]
) -> None:
    """Oracle: also the bytes of the pack before."""
    folder, expected = half("mebp")
    (unit,) = folder.glob("scratch/*-int4a-*/unit-00002.bin")
    before = unit.read_bytes()
    for file, at in ((unit, None), (unit, 9), (unit.with_name("store.json"), None)):
        flip(file, at)
        assert train(folder, "mebp", 6, "--resume_from_checkpoint", "latest") == 0
        assert unit.read_bytes() == before
        assert weights(folder) == expected


@pytest.mark.parametrize("unit", range(5))
def test_damaged_weights_on_disk_are_those_before_and_the_ledger(
    unit: int, train: Train, half: Callable[[str], tuple[Path, bytes]]
) -> None:
    folder, expected = half("zo2 disk")
    (store,) = folder.glob("scratch/weights-*")
    file = store / f"unit-{unit:05d}.bin"
    index = read_index(store)
    with MappedFile(file) as opened:
        (newest, *_) = read_unit_headers(opened, unit, index.units[unit], 2)
    flip(file, index.units[unit].area_offset(newest.area) + index.units[unit].nbytes // 2)
    assert train(folder, "zo2 disk", 6, "--resume_from_checkpoint", "latest") == 0
    assert weights(folder) == expected

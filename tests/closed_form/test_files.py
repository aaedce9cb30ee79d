"""Oracle: what a folder lists and a file holds, after writers that finish, fail and are killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from benchmarks.recorded_disk import recorded, survivors, volume_of

from blockwalk.checkpoints import run_checkpoint, sweeping
from blockwalk.system import atomic_files
from tests.support.messages import refused


def test_a_file_is_replaced_whole_or_left_alone(tmp_path: Path) -> None:
    """Oracle: the file's bytes and the folder's listing."""
    path = tmp_path / "value.json"
    atomic_files.write_json(path, {"ε": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ε": 1}
    with pytest.raises(ZeroDivisionError), atomic_files.atomic_open(path) as file:
        file.write(b"half of" * (1 // 0))
    with pytest.raises(ValueError):
        atomic_files.write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ε": 1}
    atomic_files.write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """Oracle: the folders' listings."""
    with atomic_files.atomic_folder(tmp_path / "deep" / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / "inner" / "file").read_text() == "x"
    with refused(ValueError, "exists"), atomic_files.atomic_folder(tmp_path / "deep" / "out"):
        pass
    with (
        pytest.raises(ZeroDivisionError),
        atomic_files.atomic_folder(tmp_path / "deep" / "other") as folder,
    ):
        (folder / "file").write_text("x" * (1 // 0))
    with refused(ValueError, "exists"), atomic_files.atomic_folder(tmp_path / "deep" / "late"):
        (tmp_path / "deep" / "late").mkdir()  # somebody else was faster
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["late", "out"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_folder_is_replaced_by_one_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").write_text("old")

    def build(fails: bool) -> None:
        with atomic_files.atomic_folder(path, replace=True) as folder:
            (folder / "new").write_text("new")
            assert [p.name for p in path.iterdir()] == ["old"]
            if fails:
                raise RuntimeError("stop")

    with refused(RuntimeError, "stop"):
        build(fails=True)
    assert [p.name for p in path.iterdir()] == ["old"]
    build(fails=False)
    assert [p.name for p in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_another_rank_makes_meanwhile_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a second maker of the folder, between the first one's look at it and its call."""
    look = Path.is_symlink

    def another_makes_it(path: Path) -> bool:
        linked = look(path)
        path.mkdir(parents=True, exist_ok=True)
        return linked

    monkeypatch.setattr(Path, "is_symlink", another_makes_it)
    atomic_files.make_folder(tmp_path / "run" / "scratch")
    assert (tmp_path / "run" / "scratch").is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(ValueError, "folder"):
            atomic_files.make_folder(path)


def test_a_killed_writer_leaves_only_what_is_swept(tmp_path: Path) -> None:
    """Oracle: the folder's listing after SIGKILL in the middle of a file and of a folder."""
    (tmp_path / "metrics.jsonl").write_text("old")
    for kill_inside in (atomic_files.atomic_open, atomic_files.atomic_folder):
        child = os.fork()
        if child == 0:
            try:
                name = "metrics.jsonl" if kill_inside is atomic_files.atomic_open else "model"
                with kill_inside(tmp_path / name):
                    os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert (tmp_path / "metrics.jsonl").read_text() == "old"
    assert not (tmp_path / "model").exists()
    assert len(list(tmp_path.iterdir())) == 3
    assert len(sweeping.leftovers(tmp_path)) == 2
    sweeping.sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_sweep_beside_processes_that_remove_their_own(tmp_path: Path) -> None:
    """Oracle: no error, with a process that makes and removes folders of ranks and checkpoints all
    the time. A run's host swept at its end while a rank that had joined removed its folder, and
    ended with ``No such file or directory``."""
    folders = [tmp_path / run_checkpoint.SCRATCH / f"{run_checkpoint.JOINED}{n * 8}" for n in "12"]
    folders.append(tmp_path / "checkpoint-000001")
    child = os.fork()
    if child == 0:
        while True:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "settings.json").write_text("{}")
                shutil.rmtree(folder, ignore_errors=True)
    try:
        for _ in range(3000):
            sweeping.leftovers(tmp_path)
            run_checkpoint.whole(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_names_of_a_folder_outlast_the_power(tmp_path: Path) -> None:
    """Oracle: a file system that logs what is done to it, and loses what no sync made durable."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("a file system in user space needs root and /dev/fuse")
    left = {}
    for name, make in (
        ("durable", atomic_files.make_folder),
        ("not", lambda path: path.mkdir(parents=True)),
    ):
        with recorded(tmp_path / name) as disk:
            make(tmp_path / name / "a" / "b" / "c")
        volumes = [volume_of(survivors(disk.log, random.Random(seed))) for seed in range(20)]
        for number, volume in enumerate(volumes):
            volume.copy_to(tmp_path / f"{name}-{number}")
        left[name] = sum(
            (tmp_path / f"{name}-{number}" / "a" / "b" / "c").is_dir() for number in range(20)
        )
    assert left["durable"] == 20
    assert left["not"] < 20


def test_too_little_room_is_said_before_any_work(tmp_path: Path) -> None:
    """Oracle: the file system's own count of free bytes."""
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    atomic_files.require_space(tmp_path / "not" / "yet", free // 2, "this")
    with refused(ValueError, "store GB disk free"):
        atomic_files.require_space(tmp_path / "not" / "yet", 2 * free, "the store")

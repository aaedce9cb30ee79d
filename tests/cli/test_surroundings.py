"""Oracle: the operating system: its locks, homes, processors, signals and threads."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import blockwalk
from blockwalk.cli import main
from blockwalk.plan.parsing import host_and_port
from blockwalk.ranks import launch
from blockwalk.system import atomic_files, cache, locks
from blockwalk.system.cores import usable_cores
from blockwalk.train.config import from_mapping
from tests.conftest import TinyRun
from tests.forked import Forked
from tests.support.messages import refused, says

DISK = ["--method", "zo2", "--trainable", "disk", "--optimizer.learning_rate", "1e-5"]


def without_locks(number: int = errno.ENOTSUP) -> Any:
    """``flock`` as it answers on a file system that has none."""

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("settings", [["--method", "mebp"], DISK], ids=["mebp", "zo2"])
def test_runs_go_on_where_the_file_system_has_no_locks(
    settings: list[str],
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every place that locks: a run's folder, a pack that is made, and weights that are written."""
    monkeypatch.setattr(fcntl, "flock", without_locks())
    assert (
        main.main(["train", *tiny_run.arguments(tmp_path / "run"), "--max_steps", "1", *settings])
        == 0
    )
    says(caplog.text, "locks")


@pytest.mark.parametrize("number", locks.WITHOUT_LOCKS)
def test_a_lock_that_is_not_there_is_no_lock_that_another_holds(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks(number))
    with atomic_files.locked(tmp_path / "run"):
        pass


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "BLOCKWALK_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        os.path, "expanduser", lambda path: path
    )  # as for a user id that the system does not know
    with refused(PermissionError, "BLOCKWALK_CACHE"):
        cache.folder()
    cache.write_sealed("entry", {"a": 1})
    assert cache.read_sealed("entry", dict) is None


def test_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = from_mapping(
        {"model": "~/m", "output_dir": "~/run", "resume_from_checkpoint": "~/run/checkpoint-000001"}
    )
    assert run.model == f"{tmp_path}/m"
    assert run.output_dir == f"{tmp_path}/run"
    assert run.resume_from_checkpoint == f"{tmp_path}/run/checkpoint-000001"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            8,
        ),
        ("0::/\n", {}, 8),
    ],
)
def test_cores_are_those_of_affinity_and_control_group(
    groups: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "groups").write_text(groups)
    assert usable_cores(tmp_path, tmp_path / "groups") == cores


def test_ranks_share_the_cores_that_the_launcher_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the kernel's affinity of a process."""
    threads: list[str] = []
    popen = subprocess.Popen

    def count(_: Any, env: dict[str, str], **__: Any) -> subprocess.Popen[bytes]:
        threads.append(env["OMP_NUM_THREADS"])
        return popen(["true"])

    before = os.sched_getaffinity(0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "_ends_with", lambda _: None)
    monkeypatch.setattr(subprocess, "Popen", count)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert launch.start(["env"], 1, 1) == 0
    finally:
        os.sched_setaffinity(0, before)
    assert threads == ["1"]


def test_training_in_a_thread(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Python allows signal handlers in the main thread alone."""
    steps: list[Any] = []
    settings = {
        "model": str(tiny_run.model),
        "method": "plain",
        "data": {"train": str(tiny_run.train), "format": "text"},
        "max_steps": 1,
        "output_dir": str(tmp_path / "run"),
    }

    def work() -> None:
        try:
            steps.append(blockwalk.train(settings).steps)
        except Exception as error:
            steps.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert steps == [1]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_announces_the_end_leaves_a_checkpoint(
    number: signal.Signals, tiny_run: TinyRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = Forked("train", *tiny_run.arguments(folder), "--method", "plain", "--max_steps", "100000")
    deadline = time.monotonic() + 60
    while not (folder / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(number)
    text, errors = run.communicate(60)
    assert run.returncode == 128 + number, errors
    assert f"stopped by {number.name}" in text
    assert list(folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("address", "parts"),
    [("[::1]:29600", ("::1", 29600)), ("::1:29600", ("::1", 29600)), ("host:1", ("host", 1))],
)
def test_an_address(address: str, parts: tuple[str, int]) -> None:
    assert host_and_port(address) == parts


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "[]:1", "host:0", "host:65536", "host:99999999999999", "host:²"]
)
def test_no_address(address: str) -> None:
    with refused(ValueError, "65535"):
        host_and_port(address)


ALLOCATOR = """
import os, sys
from blockwalk.cli import main
main.main([])
names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
print("torch" in sys.modules, *(os.environ.get(name) for name in names))
"""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "expandable_segments:True None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native None"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "None backend:native"),
    ],
)
def test_device_memory_grows_in_segments_unless_its_user_has_chosen(
    given: dict[str, str], told: str
) -> None:
    """Oracle: the environment that torch, imported afterwards, finds."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", ALLOCATOR]
    done = subprocess.run(
        command, env={**environment, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f"False {told}"


def without_a_place(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command where nothing can be written but what it names itself."""
    script = "import tempfile, sys; tempfile._candidate_tempdir_list = lambda: ['/nowhere']\n"
    script += "from blockwalk.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments], capture_output=True, text=True
    )


def test_without_a_place_for_temporary_files_the_run_has_one(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Oracle: the standard library, which finds no place; torch asks for it as it is imported."""
    outcome = without_a_place("train", *tiny_run.arguments(tmp_path / "run"), "--dry-run")
    assert outcome.returncode == 0, outcome.stderr


def test_where_nothing_can_be_written_the_variable_is_named(tmp_path: Path) -> None:
    """Oracle: as above; an output folder below a file."""
    (tmp_path / "file").write_text("")
    for arguments in (
        ["train", "--model", "m", "--data.train", "d", "--output_dir", f"{tmp_path}/file/run"],
        ["merge", "model", "adapter", "out"],
    ):
        outcome = without_a_place(*arguments)
        assert outcome.returncode == main.BAD_INPUT
        says(outcome.stderr, "TMPDIR")
        assert "torch" not in outcome.stderr

"""Oracle: the kernel, which ends a killed process's locks, and the names in the folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockwalk.convert.to_gguf import convert
from blockwalk.system import locks, partial_outputs
from blockwalk.system.atomic_files import atomic_folder
from tests.conftest import TinyRun

HOLDS = """
import os, sys, time
from pathlib import Path
from blockwalk.system import locks, partial_outputs
from blockwalk.system.atomic_files import atomic_folder
with atomic_folder(sys.argv[1], sweeps=True) as folder:
    (folder / "weights").write_bytes(b"1" * 4096)
    print(folder, flush=True)
    time.sleep(60)
"""


def started(out: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that writes an output, and where it does."""
    command = [sys.executable, "-c", HOLDS, str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_goes_with_the_next_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    others = [tmp_path / ".other.0123abcd.partial", tmp_path / ".out.notours.partial"]
    for other in others:
        other.mkdir()
    (tmp_path / "place").mkdir()
    (tmp_path / ".out.00000000.partial").symlink_to(tmp_path / "place")
    process, partial = started(out)
    assert (partial / "weights").exists()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert partial.exists()
    with atomic_folder(out, sweeps=True) as folder:
        assert not partial.exists()
        (folder / "weights").write_bytes(b"2")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out", "place", ".out.00000000.partial", *(other.name for other in others)}


def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    process, partial = started(tmp_path / "out")
    try:
        with atomic_folder(tmp_path / "out", sweeps=True):
            assert (partial / "weights").exists()
    finally:
        process.kill()
        process.wait()


def test_a_gguf_file_that_was_killed_goes(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: the same names and bytes as without what was left."""
    pytest.importorskip("gguf")
    model = Path(shutil.copytree(tiny_run.model, tmp_path / "model"))
    (tmp_path / "whole").mkdir()
    convert(model, tmp_path / "whole" / "m.gguf")
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / ".m.gguf.0123abcd.partial").write_bytes(b"1")
    convert(model, tmp_path / "again" / "m.gguf")
    names = [sorted(os.listdir(tmp_path / folder)) for folder in ("whole", "again")]
    assert names[0] == names[1]
    files = [(tmp_path / folder / "m.gguf").read_bytes() for folder in ("whole", "again")]
    assert files[0] == files[1]


def test_a_folder_around_it_that_is_locked_is_not_waited_for(tmp_path: Path) -> None:
    """A pack is written where its process holds the folder already."""
    around = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(around, fcntl.LOCK_EX)
    with atomic_folder(tmp_path / "out", sweeps=True) as folder:
        (folder / "weights").write_bytes(b"1")
    os.close(around)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_an_output_that_is_taken_for_an_ended_one_s_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / ".out.0123abcd.partial"
    removals = iter([True])

    def make() -> None:
        partial.mkdir()
        if moment == "before it is opened" and next(removals, False):
            partial.rmdir()

    def got_lock(fd: int, *, wait: bool = False) -> bool:
        if moment == "before it is locked" and next(removals, False):
            partial.rmdir()
        return locks.got_lock(fd, wait=wait)

    monkeypatch.setattr(partial_outputs, "got_lock", got_lock)
    with partial_outputs.held(partial, tmp_path / "out", make, ".partial"):
        assert partial.is_dir()
        assert next(removals, False) is False
        other = os.open(partial, os.O_RDONLY)
        assert not locks.got_lock(other)
        os.close(other)

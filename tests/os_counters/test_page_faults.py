"""Oracle: the kernel, which ends a process by SIGBUS for a page that it cannot bring, and the bytes
that the file has then. The line that comes before names both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockwalk.numerics import native
from tests.conftest import TinyRun
from tests.support.callback_settings import settings

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or native.load("faults") is None, reason="no kernel names the file"
)

MAPPED = """
import faulthandler, mmap, os, sys, threading
if "Python" in sys.argv[1]:
    faulthandler.enable()
from blockwalk.tiers.page_faults import name_faults, note_steps
kind, path = sys.argv[1:]
name_faults()
note_steps(7)
fd = os.open(path, os.O_RDWR)
pages = mmap.mmap(fd, 0)
"""
BY_KIND = {
    "cut": "os.truncate(path, 4096); pages[500_000]",
    "written anew": "open(path, 'wb').write(b'12'); pages[500_000]",
    "a removed name": "os.truncate(path, 0); os.unlink(path); pages[500_000]",
    "a handler of Python's": "os.truncate(path, 9); pages[500_000]",
    "threads": "os.truncate(path, 1);"
    " T = [threading.Thread(target=pages.find, args=(b'x', 500_000)) for _ in range(8)];"
    " [t.start() for t in T]; [t.join() for t in T]",
}
"""What becomes of a file of 1 MB, after which its byte 500,000 is asked for."""
TRAINED = """
import json, os, sys
import blockwalk
def cut(event):
    if event.name == "step" and event.step == 2:
        os.truncate(sys.argv[2], 4096)
blockwalk.train(json.loads(sys.argv[1]), callbacks=[cut])
"""


def ended(*command: str) -> tuple[int, str]:
    """The exit code of a program of Python's and what it wrote to standard error."""
    process = subprocess.run([sys.executable, "-c", *command], capture_output=True, text=True)
    return process.returncode, process.stderr


def line_of(errors: str) -> str:
    """The only line of ours."""
    (line,) = [line for line in errors.splitlines() if line.startswith("blockwalk: error: ")]
    return line


@pytest.mark.parametrize("kind", BY_KIND)
def test_a_page_that_is_gone_is_named_by_its_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a file, and a blank"
    path.write_bytes(b"\1" * (1 << 20))
    code, errors = ended(MAPPED + BY_KIND[kind], kind, str(path))
    assert code == -signal.SIGBUS, errors
    line = line_of(errors)
    assert all(fact in line for fact in (f"{path}", "at step 7", "--resume_from_checkpoint"))
    assert "(deleted)" in line if not path.exists() else f"{path.stat().st_size} bytes now" in line
    assert ("Fatal Python error" in errors) is ("Python" in kind)
    (byte,) = re.findall(r"byte (\d+)", line)
    assert 500_000 <= int(byte) < 1 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 1 MB, as root")
def test_a_full_disk_under_a_sparse_file_is_named(tmp_path: Path) -> None:
    """Oracle: the same of a file system in memory that has room for a quarter of the file."""
    write = "os.truncate(fd, 4 << 20); pages = mmap.mmap(fd, 0); pages.write(b'x' * (4 << 20))"
    script = tmp_path / "script.py"
    script.write_text(MAPPED + write)
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && echo 1 > {tmp_path}/full"
    program = f"exec {sys.executable} /dev/stdin full {tmp_path}/full"
    process = subprocess.run(
        ["unshare", "-m", "bash", "-c", f"exec < {script}; {mount} && {program}"],
        capture_output=True,
        text=True,
    )
    if "mount" in process.stderr or "unshare" in process.stderr:
        pytest.skip(process.stderr)
    assert process.returncode == -signal.SIGBUS, process.stderr
    assert f"{tmp_path}/full, of {4 << 20} bytes now" in line_of(process.stderr)


def test_a_signal_that_a_program_sends_acts_as_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    code, errors = ended(MAPPED + "os.kill(os.getpid(), 7)", "sent", str(path))
    assert (code, errors) == (-signal.SIGBUS, "")


def test_a_model_that_is_cut_ends_a_run_by_file_and_step(tiny_run: TinyRun, tmp_path: Path) -> None:
    """A fetch of mapped weights is refused by the kernel, and a product that reads them gets the
    signal: which comes first, pages and threads decide."""
    file = tmp_path / "model" / "model.safetensors"
    file.parent.mkdir()
    for source in tiny_run.model.iterdir():
        (file.parent / source.name).write_bytes(source.read_bytes())
    more = {"model": str(file.parent), "max_steps": 9, "method": "mebp", "frozen": "disk × raw"}
    run = settings(tiny_run, tmp_path / "out", **more, lora={"rank": 2})
    code, errors = ended(TRAINED, json.dumps(run), str(file))
    assert code in (-signal.SIGBUS, 1), errors
    assert all(fact in errors for fact in (f"{file}", "at step 2", "--resume_from_checkpoint"))

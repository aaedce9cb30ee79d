"""Runs that are harmed: each is forked from a process that has imported everything, and goes
through the command line's own ``main``. Ranks are started and attended as the launcher does it, but
forked as well.

A family is a row of the table of methods, with settings that make a run of six steps, two
checkpoints and four evaluations."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockwalk.checkpoints import run_checkpoint
from blockwalk.cli import main
from blockwalk.ranks import launch
from blockwalk.system import terminal
from tests.conftest import TinyRun, make_tiny_run

LIMIT = 75.0
"""Seconds after which a run counts as hanging."""
MEASURED = ("seconds", "tokens_per_second", "peak_bytes", "bytes_moved", "digest")
OF_A_LIVE_STEP = "bytes_by_axis"
"""The figure that no ledger has: the line of a step that was killed before its line was written
lacks it."""
_SLIDE = (
    "--trainable disk×fp32 --optimizer_state disk×fp32 --update.timing block --recompute all"
    " --prefetch 1"
)
_EXACT = "--optimizer.learning_rate 1e-3"
_ZEROTH = "--optimizer.learning_rate 1e-5"


@dataclass(frozen=True)
class Family:
    """A kind of run: its settings, and the ranks that take part."""

    settings: str
    ranks: int = 1


FAMILIES = {
    "mebp": Family(f"--method mebp --frozen disk×int4 --lora.rank 4 --lora.dropout 0.1 {_EXACT}"),
    "plain": Family(f"--method plain {_EXACT}"),
    "slide": Family(f"--method plain {_SLIDE} {_EXACT}"),
    "mezo": Family(f"--method mezo {_ZEROTH}"),
    "zo2": Family(f"--method zo2 --trainable disk {_ZEROTH}"),
    "distzo2": Family(f"--method distzo2 --lora false {_ZEROTH}", 2),
    "fcdp": Family(f"--method fcdp {_EXACT}", 2),
    "hzp": Family(f"--method hzp {_EXACT}", 2),
}
COMMON = (
    "--max_steps 6 --save_every 3 --eval_every 2 --resume_from_checkpoint latest --start_timeout 20"
)


@dataclass(frozen=True)
class Place:
    """A model and data for all runs, and a folder below which they run."""

    tiny: TinyRun
    folder: Path

    def arguments(self, family: str, output_dir: Path, *more: str) -> list[str]:
        return [
            "train",
            *self.tiny.arguments(output_dir),
            *COMMON.split(),
            *FAMILIES[family].settings.split(),
            *more,
        ]


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """A place for the time of a benchmark, with a cache of its own that a first run of each kind
    has filled."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    ctypes.CDLL(None).prctl(
        36, 1
    )  # PR_SET_CHILD_SUBREAPER: ranks whose launcher was killed are this process's then
    with tempfile.TemporaryDirectory(
        prefix="blockwalk-faults-", dir=os.environ.get("FAULTS_DIR")
    ) as name:
        os.environ["BLOCKWALK_CACHE"] = str(Path(name, "cache"))
        (tiny := Path(name, "tiny")).mkdir()
        where = Place(make_tiny_run(tiny), Path(name))
        for family in ("mebp", "zo2"):
            _import_what_it_imports(where, family)
        gc.collect()
        gc.freeze()  # or each fork looks through all of this process's objects
        yield where


def _import_what_it_imports(where: Place, family: str) -> None:
    """Import here what a run of a family imports, so that the forks of this process need not."""
    names = where.folder / "imported"
    output = where.folder / "imports.said"

    def run() -> int:
        code = main.main(where.arguments(family, where.folder / f"imports-{family}"))
        names.write_text("\n".join(sys.modules))
        return code

    assert Fork(run, output).wait() == 0, output.read_text()
    for name in names.read_text().split():
        with contextlib.suppress(ImportError):  # names that a module gave itself
            importlib.import_module(name)


class Fork:
    """A forked process with the part of ``subprocess.Popen`` that the launcher uses."""

    def __init__(self, work: Callable[[], int], output: Path) -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                said = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(said, 1)
                os.dup2(said, 2)
                sys.stdout, sys.stderr = (
                    os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2)
                )
                code = work()
            except BaseException as error:
                print(f"ESCAPED {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        self.pid = pid

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = LIMIT) -> int | None:
        """The exit code; None, and the process is killed, after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.returncode = -signal.SIGKILL
            return None
        return self.returncode


def start(
    place: Place,
    family: str,
    folder: Path,
    *more: str,
    harm: Callable[[int], None] = lambda rank: None,
) -> Fork:
    """Start a run, or with ranks the process that attends to them; ``harm`` is called with the rank
    before it begins. All that is said goes to a file beside the folder."""
    said = folder.with_name(f"{folder.name}.said")
    ranks = FAMILIES[family].ranks
    arguments = place.arguments(family, folder, *more)

    def rank(number: int, store: str) -> int:
        if ranks > 1:
            os.environ |= {
                launch.STORE: store,
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(number),
                "LOCAL_RANK": str(number),
            }
            os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        harm(number)
        return main.main(arguments)

    def attend() -> int:
        with tempfile.TemporaryDirectory(dir=place.folder) as name:
            forks: Any = [
                Fork(lambda n=n: rank(n, str(Path(name, "store"))), said) for n in range(ranks)
            ]  # type: ignore[misc]
            return launch._attend(forks)

    return Fork((lambda: rank(0, "")) if ranks == 1 else attend, said)


def wait_for_orphans() -> None:
    """Wait for the ranks of a launcher that was killed: each is killed with it, and ends when the
    kernel comes to it."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass


def said(folder: Path) -> str:
    """All that runs in a folder have said so far."""
    return folder.with_name(f"{folder.name}.said").read_text(errors="replace")


OUTPUTS = ("full", "closed", "broken", "unread")
"""Kinds of standard output that nobody gets to read."""


def bad_output(kind: str) -> None:
    """Give this process a standard output and error of a kind of :data:`OUTPUTS`."""
    read, write = os.pipe()
    if kind == "full":
        write = os.open("/dev/full", os.O_WRONLY)
    elif kind == "broken":
        os.close(read)
    elif kind == "unread":
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, b"x")
        os.set_blocking(write, True)
        terminal.PATIENCE = 1.0
    for number, name in ((1, "stdout"), (2, "stderr")):
        if kind == "closed":
            os.close(number)
            setattr(sys, name, None)
        else:
            os.dup2(write, number)
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))


_CALLS = ("open", "write", "pwrite", "pwritev", "writev", "fsync", "fdatasync", "ftruncate",
          "posix_fallocate", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link",
          "symlink")  # fmt: skip


def _filesystem_calls(when: Callable[[int], None]) -> None:
    """Call ``when`` with 2n before the n-th call that changes or opens a file, and with 2n + 1
    after it, in this process."""
    count = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any, **options: Any) -> Any:
            number = count[0]
            count[0] += 1
            when(2 * number)
            result = call(*arguments, **options)
            when(2 * number + 1)
            return result

        return do

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))
    whole = builtins.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return (whole if mode.startswith("r") and "+" not in mode else counted(whole))(
            file, mode, *arguments, **options
        )

    builtins.open = opened  # type: ignore[assignment]
    import io

    io.open = opened  # type: ignore[assignment]  # pathlib's


def dies_at(point: int, of_rank: int = 0) -> Callable[[int], None]:
    """Harm: SIGKILL before (even) or after (odd) a file-system call."""

    def when(number: int) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda rank: _filesystem_calls(when) if rank == of_rank else None


def count_calls(place: Place, family: str, folder: Path) -> int:
    """File-system calls of the first rank of an undisturbed run, twice each: before and after."""
    path = folder.with_name("count")

    def when(number: int) -> None:
        if number % 2 == 0:
            fd = _open(path, os.O_CREAT | os.O_WRONLY)
            _write(fd, b"%10d" % (number + 2))
            os.close(fd)

    _open = os.open
    _write = os.write
    code = start(
        place, family, folder, harm=lambda rank: _filesystem_calls(when) if rank == 0 else None
    ).wait()
    assert code == 0, said(folder)
    return int(path.read_text())


def result(folder: Path) -> dict[str, Any]:
    """Names of a run's files, and of each what must be alike: weights, the ledger's steps, logs but
    for what clocks decide."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "/weights-" in name or not path.is_file():
            continue
        found[name] = None
        if path.name == "ledger.jsonl":
            found[name] = path.read_bytes().split(b"\n")[1:]
        elif path.name in ("metrics.jsonl", "evaluations.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [
                {key: value for key, value in line.items() if key not in MEASURED} for line in lines
            ]
        elif path.suffix == ".safetensors":
            found[name] = path.read_bytes()
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, list[str]]:
    """The files that differ, by kind: ``bits`` (weights, ledger), ``lines`` (logs), ``stray`` and
    missing names."""
    kinds: dict[str, list[str]] = {
        "bits": [],
        "lines": [],
        "stray": sorted(found.keys() ^ expected.keys()),
    }
    has_ledger = any(Path(name).name == "ledger.jsonl" for name in found)
    for name in sorted(found.keys() & expected.keys()):
        is_log = name.endswith(("metrics.jsonl", "evaluations.jsonl"))
        equal = lines_alike if is_log and has_ledger else operator.eq
        if not equal(found[name], expected[name]):
            kinds["lines" if is_log else "bits"].append(name)
    return kinds


def lines_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Whether two logs have the same lines, but for the figure that a line from the ledger
    lacks."""
    if len(found) != len(expected):
        return False
    for line, whole in zip(found, expected, strict=True):
        missing = whole.keys() - line.keys()
        known = {key: value for key, value in whole.items() if key not in missing}
        if not missing <= {OF_A_LIVE_STEP} or line != known:
            return False
    return True


def latest_step(folder: Path) -> int:
    """The step of the newest checkpoint; −1: there is none."""
    newest = run_checkpoint.latest(folder)
    return -1 if newest is None else run_checkpoint.step_of(newest)


def mounted(folder: Path, nbytes: int) -> contextlib.AbstractContextManager[None]:
    """A file system in memory of so many bytes at ``folder``; needs root."""

    @contextlib.contextmanager
    def mount() -> Iterator[None]:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "blockwalk-faults", str(folder)],
            check=True,
        )
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)

    return mount()


def resize(folder: Path, nbytes: int) -> None:
    """Change the size of a file system that :func:`mounted` made."""
    subprocess.run(["mount", "-o", f"remount,size={nbytes}", str(folder)], check=True)

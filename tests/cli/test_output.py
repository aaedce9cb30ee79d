"""Oracle: the operating system: its full device, its pipes that nobody reads, its closed
descriptors, and bytes on a pipe."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from blockwalk.cli import main
from blockwalk.system import terminal
from blockwalk.system.terminal import clean, one_line, say
from blockwalk.train.progress import Progress
from tests.conftest import TinyRun

EVIL = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e\x7f"


def forked(work: Callable[[], int]) -> int:
    """The number of a forked process that does some work with fresh streams on its descriptors."""
    if (process := os.fork()) == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return process


def ended(process: int, seconds: float = 60) -> int | None:
    """Its exit code; None, and it is killed, where it takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def streams(out: int, errors: int) -> None:
    """Put descriptors in the place of this process's standard output and error, −1 for closed
    ones."""
    for fd, number, name in ((out, 1, "stdout"), (errors, 2, "stderr")):
        if fd < 0:
            os.close(number)
            setattr(sys, name, None)
        else:
            os.dup2(fd, number)
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def full_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    fcntl.fcntl(write, 1031, 4096)  # F_SETPIPE_SZ
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"x")
    os.set_blocking(write, True)
    return read, write


@pytest.fixture(scope="module", params=["full", "closed", "broken"])
def bad_output(request: pytest.FixtureRequest) -> Iterator[int]:
    if request.param == "full":
        fd = os.open("/dev/full", os.O_WRONLY)
    elif request.param == "broken":
        read, fd = os.pipe()
        os.close(read)
    else:
        yield -1
        return
    yield fd
    os.close(fd)


def test_output_that_cannot_be_written_does_not_end_a_run(
    bad_output: int, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Standard error too; and no file gets the number of a closed descriptor."""
    arguments = ["train", *tiny_run.arguments(tmp_path), "--method", "plain", "--max_steps", "2"]

    def work() -> int:
        streams(bad_output, bad_output)
        return main.main(arguments)

    assert ended(forked(work)) == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_stream_without_a_buffer_does_not_wait_for_ever() -> None:
    """Such streams are those of Python under PYTHONUNBUFFERED."""
    read, write = full_pipe()

    def work() -> int:
        sys.stdout = io.TextIOWrapper(io.FileIO(write, "w", closefd=False), write_through=True)  # type: ignore[type-var]
        with terminal.steady(0.2):
            say("nobody reads this")
        return 0

    assert ended(forked(work), 20) == 0
    os.close(read)
    os.close(write)


def test_a_command_whose_result_is_lost_has_failed(tiny_run: TinyRun, tmp_path: Path) -> None:
    def work() -> int:
        streams(
            os.open("/dev/full", os.O_WRONLY),
            os.open(tmp_path / "errors", os.O_CREAT | os.O_WRONLY),
        )
        return main.main(["env"])

    assert ended(forked(work)) == 1
    assert "standard output: No space left" in (tmp_path / "errors").read_text()


def test_a_signal_is_answered_while_nobody_reads(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Standard error on the same pipe; the run goes on once its patience is over."""
    read, write = full_pipe()
    arguments = [
        "train",
        *tiny_run.arguments(tmp_path),
        "--method",
        "plain",
        "--max_steps",
        "1000000",
    ]

    def work() -> int:
        terminal.PATIENCE = 1.0
        streams(write, write)
        return main.main(arguments)

    process = forked(work)
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while (
        not (metrics.is_file() and metrics.read_text().count("\n") > 20)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    os.kill(process, signal.SIGTERM)
    assert ended(process, 30) == 143
    assert list(tmp_path.glob("checkpoint-*"))
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_utf_8(encoding: str, tiny_run: TinyRun, tmp_path: Path) -> None:
    for name, command in (("train", ["--max_steps", "1"]), ("plan", [])):

        def work(name: str = name, command: list[str] = command) -> int:
            out = os.open(tmp_path / f"{name}.said", os.O_CREAT | os.O_WRONLY)
            streams(out, out)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(encoding=encoding, errors="strict")  # type: ignore[union-attr]
            return main.main(
                [name, *tiny_run.arguments(tmp_path / "run"), "--method", "plain", *command]
            )

        assert ended(forked(work)) == 0, (tmp_path / f"{name}.said").read_text(encoding)


def test_text_is_cleaned() -> None:
    assert clean("a\tb\nc é 汉 \u200f") == "a\tb\nc é 汉 \u200f"
    assert clean(EVIL) == "\\x1b]0;title\\x07\\x1b[2J\\r\\x9b31m\\u202e\\x7f"
    assert clean("\ud800") == "\\ud800"
    assert one_line("a\nblockwalk: error: b") == "a blockwalk: error: b"


def test_what_a_record_holds_does_not_reach_a_terminal(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain lines and rich's, an error's line with a file's name in it, and rich's markup and emoji
    names."""
    data = tmp_path / f"data{EVIL}.jsonl"
    data.write_text(json.dumps({"text": f"hi {EVIL}", "label": "good"}) * 1)
    arguments = [
        "train",
        *tiny_run.arguments(tmp_path / "run"),
        "--data.train",
        str(data),
        "--batch_size",
        "1",
    ]
    assert main.main([*arguments, "--max_steps", "1", "--method", "plain"]) == 0
    data.write_text("{")
    assert main.main([*arguments, "--overwrite_output_dir", "true"]) == 2
    printed = "".join(capsys.readouterr())
    assert "title" in printed
    assert not set(EVIL) & {"\x1b", "\x07", "\r", "\x9b", "\u202e", "\x7f"} & set(printed)

    rich_out = io.StringIO()
    from rich.console import Console

    progress = Progress(1, done=0, log_every=1)
    progress._bar = type(
        "Bar", (), {"console": Console(file=rich_out, force_terminal=True, width=200)}
    )
    progress.say(f"[bold]{EVIL} :boom:")
    progress.show_learnt("record", [(EVIL, True)])
    assert "[bold]\\x1b]0;title" in rich_out.getvalue()
    assert ":boom:" in rich_out.getvalue()
    assert "\x1b]0" not in rich_out.getvalue()


def test_a_stream_without_a_character_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    say("2 × 3")
    assert raw.getvalue() == b"2 ? 3\n"
    monkeypatch.setattr(sys, "stdout", None)
    say("nobody")

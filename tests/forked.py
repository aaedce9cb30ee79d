"""A ``blockwalk`` command in a process of its own, forked after the imports. Not a test: no oracle.

Starting an interpreter that imports torch and transformers takes five seconds of the processor, a
fork a hundredth of one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from typing import IO

import blockwalk.train.loop  # noqa: F401
from blockwalk.cli import main


class Forked:
    """A running command, as ``subprocess.Popen`` would have it. Its output goes to files: nothing
    has to read it meanwhile."""

    def __init__(self, *arguments: str) -> None:
        self._out, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_command, args=(arguments, self._out, self._errors), daemon=True
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote, once it has ended; it is killed where that takes longer than so many
        seconds."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return _text(self._out), _text(self._errors)


def _text(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode()


def _command(arguments: tuple[str, ...], out: IO[bytes], errors: IO[bytes]) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # tests under nohup ignore it, and so would the command
    code = 1
    try:
        code = main.main(list(arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

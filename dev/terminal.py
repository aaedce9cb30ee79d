"""A terminal's screen after a command, as an SVG picture.

    python -m dev.terminal > docs/terminal.svg

The command runs under a pseudo-terminal of :data:`COLUMNS` columns in the folder of the
repository, and its output is read as a terminal reads it: lines that a progress bar drew over are
gone. Of the steps the first three and the last two are shown."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from select import select

ROOT = Path(__file__).parents[1]
COMMAND = "blockwalk train examples/quickstart.yaml"
COLUMNS = 100
_PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[^\[]|([\r\n])|([^\x1b\r\n]+)")


def screen(output: str) -> list[str]:
    """Return the lines that a terminal shows after ``output``: carriage returns, the cursor's moves
    up and erased lines are followed, long lines go on below, colours are left out."""
    lines = [""]
    row = 0
    column = 0
    for moved, command, control, text in _PIECES.findall(output):
        if text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
        elif control == "\n":
            row += 1
            column = 0
            if row == len(lines):
                lines.append("")
        elif control == "\r":
            column = 0
        elif command == "A":
            row = max(row - int(moved or 1), 0)
        elif command == "K":
            lines[row] = "" if moved == "2" else lines[row][:column]
    starts = [(line.rstrip(), range(0, max(len(line.rstrip()), 1), COLUMNS)) for line in lines]
    return [line[start : start + COLUMNS] for line, parts in starts for start in parts]


def under(work: Callable[[], int], *, seconds: float = 600) -> tuple[int, str]:
    """Do some work in a forked process under a pseudo-terminal, and return its exit code and its
    output. It is ended where it takes longer."""
    process, descriptor = pty.fork()
    if process == 0:
        code = 99
        try:
            ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
            os.environ["TERM"] = "xterm-256color"
            for name in ("stdout", "stderr"):
                setattr(sys, name, open(1, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
            code = work()
            sys.stdout.flush()
        finally:
            os._exit(code)
    output = b""
    deadline = time.monotonic() + seconds
    with suppress(OSError):  # the end of a pseudo-terminal
        while time.monotonic() < deadline:
            if select([descriptor], [], [], 1)[0]:
                if not (part := os.read(descriptor, 65_536)):
                    break
                output += part
        else:
            os.kill(process, signal.SIGKILL)
    os.close(descriptor)
    status = os.waitpid(process, 0)[1]
    return os.waitstatus_to_exitcode(status), output.decode("utf-8", "replace")


def picture(command: str, lines: Sequence[str]) -> str:
    """Return a command and the lines below it as an SVG."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    for line in lines:
        told = line.startswith(("step", "held-out", "saved", "training", "peak"))
        console.print(Text(line, style="" if told else "dim"), soft_wrap=True)
    svg = console.export_svg(title="blockwalk", clear=False)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    words = COMMAND.split()
    program = str(Path(sys.executable).with_name(words[0]))
    os.chdir(ROOT)
    code, output = under(lambda: subprocess.call([program, *words[1:]]))
    if code != 0:
        sys.exit(f"{COMMAND} ended with {code}:\n{output}")
    lines = [line for line in screen(output) if line]
    steps = [number for number, line in enumerate(lines) if line.startswith("step ")]
    shown = [line for number, line in enumerate(lines) if number not in steps[3:-2]]
    if len(steps) > 5:
        shown.insert(shown.index(lines[steps[2]]) + 1, "...")
    print(picture(COMMAND, shown), end="")


if __name__ == "__main__":
    main()

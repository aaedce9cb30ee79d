"""Lines on standard output and standard error: cleaned of what would control a terminal, and never
the end of a run.

Printed text may come from others: records, names of files, a model's configuration, ranks that
nobody authenticated."""

from __future__ import annotations

import io
import logging
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

PATIENCE = 10.0
"""Seconds that a run waits for a reader of its output, before lines are dropped until somebody
reads again."""
_PIECE = 4096
"""Bytes that a pipe takes at once where it takes any (PIPE_BUF)."""

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that move a cursor, begin a control sequence, turn the direction of text around, or
are half of one; tabs and line ends are none."""


def clean(text: str) -> str:
    """Return the text with escapes such as ``\\x1b`` in place of characters that would control a
    terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def one_line(text: str) -> str:
    """Return the text on one line, cleaned."""
    return clean(" ".join(text.split()))


def say(*texts: object, file: IO[str] | None = None, end: str = "\n") -> None:
    """Print texts, a line each, cleaned, to standard output unless a ``file`` is given. Lines that
    cannot be written are dropped."""
    stream = sys.stdout if file is None else file
    text = clean("\n".join(map(str, texts))) + end
    # full or broken; closed; None where there is none
    with suppress(OSError, ValueError, AttributeError):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "replace").decode("ascii"))
        stream.flush()


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is there and a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def clean_record(record: logging.LogRecord) -> bool:
    """Clean a line of a log: a filter for handlers of :mod:`logging`."""
    record.msg = clean(record.getMessage())
    record.args = None
    return True


class _Steady(io.RawIOBase):
    """A descriptor that is written to without ever raising, and without waiting longer than
    :data:`PATIENCE` for a reader."""

    def __init__(self, fd: int, patience: float) -> None:
        self._fd = fd
        self.patience = patience
        self.failure: OSError | None = None
        """The error by which output was lost, if any was."""
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        """Write, or drop, all of ``data``; answers its length in bytes."""
        view = memoryview(data).cast("B")
        try:
            if self._dropped and self._takes_more(0.0):
                os.write(
                    self._fd, b"\n... %d bytes were not shown: nobody read them\n" % self._dropped
                )
                self._dropped = 0
            written = 0
            while written < len(view) and not self._dropped and self._takes_more(self.patience):
                # a descriptor that does not block: others wrote first
                with suppress(BlockingIOError):
                    written += os.write(self._fd, view[written : written + _PIECE])
            self._dropped += len(view) - written
        except OSError as error:
            self.failure = self.failure or error
        return len(view)

    def _takes_more(self, seconds: float) -> bool:
        """Return whether the descriptor can be written to without waiting, within so many seconds;
        no longer once a run is to end."""
        if not hasattr(select, "poll"):  # Windows: a writer waits for its reader
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        ends = time.monotonic() + seconds
        while not poll.poll(50 if seconds else 0):
            if time.monotonic() >= min(ends, _hurried_at):
                return False
        return True


_hurried_at = float("inf")
"""The instant from which on nobody waits for a reader."""


@contextmanager
def steady(patience: float = PATIENCE) -> Iterator[list[_Steady]]:
    """Make standard output and standard error, for the time of a command, streams that cannot end
    it: closed ones go nowhere, characters that their encoding has not are replaced, and what is
    full or broken loses lines. A stream that is no file (a notebook's, a test's) stays as it is.

    Yields:
        The streams' lowest layers, which know what was lost.
    """
    global _hurried_at
    _hurried_at = float("inf")
    # or the next file that is opened would have its number, and hold what libraries print
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    previous = sys.stdout, sys.stderr
    layers: list[_Steady] = []
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            stream = open(fd, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        # the file itself under PYTHONUNBUFFERED, else behind a buffer
        raw = getattr(stream, "buffer", None)
        if type(stream) is io.TextIOWrapper and isinstance(getattr(raw, "raw", raw), io.FileIO):
            with suppress(OSError):
                stream.flush()
            layers.append(_Steady(stream.fileno(), patience))
            buffer = io.BufferedWriter(layers[-1])
            stream = io.TextIOWrapper(
                buffer, stream.encoding, "replace", newline="\n", write_through=True
            )
        setattr(sys, name, stream)
    if logging.lastResort is not None and clean_record not in logging.lastResort.filters:
        logging.lastResort.addFilter(clean_record)
    try:
        yield layers
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = previous


def hurry() -> None:
    """Wait for no reader from here on: a signal asks the run to end."""
    global _hurried_at
    _hurried_at = time.monotonic()


def say_in_handler(text: str) -> None:
    """Write to standard error from a signal's handler, which may have interrupted a writer:
    unbuffered, and only where nothing has to be waited for."""
    with suppress(OSError, ValueError, AttributeError):  # Windows has no poll
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(0):
            os.write(2, clean(text).encode())

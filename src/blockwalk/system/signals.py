"""Signals that ask a run to end, and the time in which a function of ours answers them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

STOPS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
"""Signals that end a run after a checkpoint: a service's and Ctrl-C, a terminal that is closed, and
the warning that SLURM sends before a job's time is up (``--signal``). Windows has the first two."""


@contextmanager
def handled(answer: Handler, numbers: Sequence[signal.Signals]) -> Iterator[dict[int, Any]]:
    """Answer signals with a function, and as before when the block ends.

    One that the process ignores stays ignored (``nohup``). Outside the main thread Python allows no
    handler: signals act there as the program around has it.

    Yields:
        The handlers that the signals had before, by number.
    """
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heard:
            old_handler = signal.signal(number, answer)
            # None: a handler that is not Python's
            previous[number] = signal.SIG_DFL if old_handler is None else old_handler
    try:
        yield previous
    finally:
        for answered, handler in previous.items():
            signal.signal(answered, handler)

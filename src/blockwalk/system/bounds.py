"""Bounds of time and memory for work that files of others decide: templates, patterns, rules of
tokenizers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blockwalk.system.process_limits import UNLIMITED, limit, set_limit
from blockwalk.system.process_memory import address_space_bytes


class Endless(Exception):
    """Work that has not come to an end in its time."""


@contextmanager
def bounded(seconds: float, nbytes: int | None = None) -> Iterator[None]:
    """Let work take so many seconds, and this process's address space grow by so many bytes
    meanwhile.

    Both are bounded in the main thread of a system with signals (not Windows), and memory if there
    is a ``/proc``: a limit is the whole process's, and another thread's work is not to fail by it.

    Raises:
        MemoryError: more memory was wanted.
        Endless: it took longer.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return
    soft, hard = limit("RLIMIT_AS")
    if nbytes is not None and (address_space := address_space_bytes()):
        bounds = [bound for bound in (soft, hard, address_space + nbytes) if bound != UNLIMITED]
        set_limit("RLIMIT_AS", min(bounds), hard)
    previous = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        set_limit("RLIMIT_AS", soft, hard)


def _stop(*_: object) -> None:
    raise Endless

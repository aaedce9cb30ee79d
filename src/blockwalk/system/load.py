"""The load that other processes put on the machine: their threads that compute, or wait for a core.
No torch.

A timing beside other work is no figure of the machine: whoever times asks here, by one bound."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

BUSY = 1 / 4
"""Threads of others for each core, beyond which timings are those of a busy machine. One thread
beside a team on both of two cores makes the team wait at each of its barriers."""
EVERY = 0.05
"""Seconds between two looks."""
LEAST = 0.5
"""Seconds over which looks are averaged at least: kernel threads come and go."""

_LOAD = Path("/proc/loadavg")


def computing(own: Iterable[int]) -> float:
    """Return the number of threads that compute or wait for a core now, those of the processes
    ``own`` left out; where there is no ``/proc``, the machine's average of the last minute, with
    ``own``."""
    try:
        running = int(_LOAD.read_text(encoding="ascii").split()[3].partition("/")[0])
    except OSError:
        return os.getloadavg()[0]
    # below 0 where one of them began to run in between: looks are averaged
    return running - sum(map(_computing, own))


def _computing(process: int) -> int:
    """Return the number of a process's threads that compute or wait for a core now."""
    threads = 0
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        try:
            words = stat.read_bytes()
        except OSError:  # it has ended
            continue
        # the state follows the name, which may hold anything
        threads += words.rpartition(b") ")[2].startswith(b"R")
    return threads


class OtherLoad:
    """The threads of other processes that compute while this is open, sampled by a thread.

    Own threads must be idle meanwhile, or another process's (:meth:`belongs`): those that wait for
    Python's lock are seen to run and not to run.

    Args:
        beside: threads of others that are meant to compute at the same time, as a run's other ranks
            do.
    """

    def __init__(self, beside: int = 0) -> None:
        self._beside = beside
        self._own = {os.getpid()}
        self._looks: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="blockwalk-load", daemon=True)

    def __enter__(self) -> OtherLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def belongs(self, process: int) -> None:
        """Count a process's threads as own ones from now on."""
        self._own.add(process)

    def busy(self, start: float = 0.0, end: float = float("inf")) -> str:
        """Return what speaks against a timing between two moments of :func:`time.monotonic`, in
        words; empty where nothing does."""
        more = max(LEAST - (end - start), 0.0) / 2
        looks = [
            threads for when, threads in tuple(self._looks) if start - more <= when <= end + more
        ]
        threads = sum(looks) / max(len(looks), 1) - self._beside
        cores = os.cpu_count() or 1
        if threads <= BUSY * cores:
            return ""
        return f"{threads:.1f} threads of other processes were computing on {cores} cores"

    def _sample(self) -> None:
        while not self._stop.wait(EVERY):
            self._looks.append((time.monotonic(), computing(self._own)))


def busy_now(beside: int = 0) -> str:
    """Return what speaks against a timing now, in words, as :meth:`OtherLoad.busy` does."""
    with OtherLoad(beside) as load:
        time.sleep(LEAST)
        return load.busy()


def of_other_ranks(threads: int) -> int:
    """Return the threads with which a run's other ranks on this machine compute, as many each."""
    return (int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1) * threads

"""Lanes: where the ops of a program run. The compute lane is the caller's thread; every other lane is a thread of its own.

On a GPU each lane also has a CUDA stream, and an op's end is an event on it: a later op waits for the event on its own
stream, so that no thread ever waits for the device inside a step. On a CPU an op's end is its thread's future.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from blockwalk.program.program import Lane


@dataclass(slots=True)
class Mark:
    """The end of one op: issued when ``future`` is done, finished on the device when ``event`` has passed."""

    future: Future[None] | None = None
    event: torch.cuda.Event | None = None
    began: float = 0.0
    """Host seconds (``time.perf_counter``)."""
    ended: float = 0.0


@dataclass(slots=True)
class Lanes:
    """One queue of work for each :class:`~blockwalk.program.program.Lane`."""

    device: torch.device
    _threads: dict[Lane, ThreadPoolExecutor] = field(default_factory=dict)
    _streams: dict[Lane, torch.cuda.Stream] = field(default_factory=dict)
    _start: torch.cuda.Event | None = None

    def submit(self, lane: Lane, work: Callable[[], None], after: Iterable[Mark]) -> Mark:
        """Run ``work`` on a lane once the ops of ``after`` are done. The compute lane runs it before returning.

        Raises:
            Exception: whatever an op that this one waits for raised.
        """
        mark, after = Mark(), tuple(after)
        if lane is Lane.COMPUTE:
            self._run(lane, work, after, mark)
        else:
            mark.future = self._thread(lane).submit(self._run, lane, work, after, mark)
        return mark

    def begin(self) -> None:
        """Every lane's next op comes after what the caller has issued so far."""
        if self.device.type == "cuda":
            self._start = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._start.record(torch.cuda.current_stream(self.device))

    def drain(self, marks: Iterable[Mark]) -> None:
        """Wait until every op was issued, and raise the first error. Ops that the caller issues next come after all of
        them."""
        errors = [mark.future.exception() for mark in marks if mark.future is not None]
        for stream in self._streams.values():
            torch.cuda.current_stream(self.device).wait_stream(stream)
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        self._threads.clear()

    def _thread(self, lane: Lane) -> ThreadPoolExecutor:
        if lane not in self._threads:
            name = f"blockwalk {lane}"
            self._threads[lane] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=_work_alone)
        return self._threads[lane]

    def _run(self, lane: Lane, work: Callable[[], None], after: tuple[Mark, ...], mark: Mark) -> None:
        for earlier in after:
            if earlier.future is not None:
                earlier.future.result()
        mark.began = time.perf_counter()
        if self.device.type != "cuda":
            work()
        else:
            with self._on_stream(lane):
                stream = torch.cuda.current_stream(self.device)
                if self._start is not None:
                    stream.wait_event(self._start)
                for earlier in after:
                    if earlier.event is not None:
                        stream.wait_event(earlier.event)
                work()
                mark.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                mark.event.record(stream)
        mark.ended = time.perf_counter()

    def _on_stream(self, lane: Lane) -> AbstractContextManager[object]:
        """The lane's stream as the current one; the compute lane keeps the caller's."""
        if lane is Lane.COMPUTE:
            return nullcontext()
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams[lane])


def _work_alone() -> None:
    """Let torch's operators use this thread only. Each thread that runs one has a team of OpenMP threads of its own, and with
    two teams on as many cores libgomp no longer spins between operators: every thread sleeps and is woken for each one."""
    try:
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(1)
    except (OSError, AttributeError):  # a build without OpenMP
        return

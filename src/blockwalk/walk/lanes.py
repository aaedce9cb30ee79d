"""Lanes: where the ops of a program run. The compute lane is the caller's thread; every other lane
is a thread of its own. On a processor brief work does not wait for that to wake up: where nothing
is before it, the caller does it.

On an accelerator each lane also has a stream, and an op's end is an event on it: a later op waits
for the event on its own stream, so that no thread ever waits for the device inside a step. There
the lanes of collectives have no thread: the caller issues them in the program's order, which is the
same on every rank, as NCCL asks. On a CPU an op's end is its thread's future.

Work may answer with a completion, which waits for what it has begun: a collective between nodes
does. The lane then goes on to its next op, so that one is on its way while the one before it is
waited for; completions come in the order of their ops, on a thread of their own. With one at a
time, a link that sends and receives at once stands still in one direction until the other has
caught up: it carried 70% of its rate."""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from blockwalk.engine.home import Brief
from blockwalk.numerics.device import elapsed, is_cpu, recorded
from blockwalk.program.program import Lane
from blockwalk.ranks.groups import Completion

_ISSUED_BY_CALLER = (Lane.INTRA, Lane.INTER, Lane.INTER_SUMS)

Work = Callable[[], Completion | None]


@dataclass(slots=True)
class Mark:
    """The end of one op: issued when ``future`` is done, finished on the device when ``event`` has
    passed."""

    lane: Lane = Lane.COMPUTE
    future: Future[None] | None = None
    event: torch.Event | None = None
    start: torch.Event | None = None
    """The op's beginning on the device, where lanes are timed."""
    began: float = 0.0
    """Host seconds (``time.perf_counter``): of the work on a CPU, of its issue on an
    accelerator."""
    ended: float = 0.0

    def passed(self) -> bool:
        """Whether the op is done, on the device too; nothing waits for the answer."""
        return self.ended > 0 and (self.event is None or self.event.query())


@dataclass(slots=True)
class Lanes:
    """One queue of work for each :class:`~blockwalk.program.program.Lane`."""

    device: torch.device
    _threads: dict[tuple[Lane, str], ThreadPoolExecutor] = field(default_factory=dict)
    _begun: dict[Lane, deque[Future[None]]] = field(default_factory=partial(defaultdict, deque))
    """The ends of each lane's last ops, of work that has one, the oldest first."""
    timed: bool = False
    """Whether ops that are submitted from here on have the times of their work on the device, see
    :meth:`seconds`."""
    _last: dict[Lane, Mark] = field(default_factory=dict)
    """Each lane's last op, of lanes that have a thread."""
    _streams: dict[Lane, torch.Stream] = field(default_factory=dict)
    _start: torch.Event | None = None
    _began: float = 0.0
    _marks: list[Mark] = field(default_factory=list)
    _is_cpu: bool = field(init=False)
    """Asked of the device once, not at each op."""

    def __post_init__(self) -> None:
        self._is_cpu = is_cpu(self.device)

    def submit(self, lane: Lane, work: Work, dependencies: Iterable[Mark]) -> Mark:
        """Run ``work`` on a lane once the ops that it depends on are done. The compute lane runs it
        before returning; so does a processor's lane brief work that waits for nothing.

        Raises:
            Exception: whatever an op that this one waits for raised.
        """
        mark = Mark(lane)
        dependencies = tuple(dependencies)
        self._marks.append(mark)
        if lane is Lane.COMPUTE or (lane in _ISSUED_BY_CALLER and not self._is_cpu):
            self._run(lane, work, dependencies, mark)
        else:
            if self._is_cpu and type(work) is Brief and self._is_next(lane, dependencies):
                self._do_now(lane, work, dependencies, mark)
            else:
                mark.future = Future()
                self._thread(lane).submit(self._begin, lane, work, dependencies, mark)
            self._last[lane] = mark
        return mark

    def _do_now(self, lane: Lane, work: Brief, dependencies: tuple[Mark, ...], mark: Mark) -> None:
        """Do brief work of a lane on this thread; its error is told as one of the lane's thread."""
        try:
            self._run(lane, work, dependencies, mark)
        except BaseException as error:
            mark.future = Future()
            mark.future.set_exception(error)

    def _is_next(self, lane: Lane, dependencies: tuple[Mark, ...]) -> bool:
        """Return whether a lane's next op could begin now: its thread has ended all that came
        before it, so that nothing overtakes."""
        before = (self._last[lane], *dependencies) if lane in self._last else dependencies
        return all(mark.future is None or mark.future.done() for mark in before)

    def begin(self) -> None:
        """Every lane's next op comes after what the caller has issued so far."""
        self._marks = []
        if not is_cpu(self.device):
            self._start = recorded(self.device, timing=self.timed)
            self._began = time.perf_counter()

    def drain(self, marks: Iterable[Mark]) -> None:
        """Wait until every one of these ops was issued, and raise the first error. Ops that the
        caller issues next come after all of them, and after no others of their lanes."""
        marks = list(marks)
        errors = [mark.future.exception() for mark in marks if mark.future is not None]
        last = {mark.lane: mark for mark in marks}
        for lane, stream in self._streams.items():
            current = torch.accelerator.current_stream(self.device)
            event = last[lane].event if lane in last else None
            if event is not None:
                current.wait_event(event)
            else:
                current.wait_stream(stream)
        for error in errors:
            if error is not None:
                raise error

    def finished(self) -> int:
        """Return the ops since :meth:`begin` that are done, not only issued. Any thread may ask."""
        return sum(mark.passed() for mark in list(self._marks))

    def seconds(self, marks: Iterable[Mark]) -> list[tuple[float, float]]:
        """Return the beginning and the end of each op, in host seconds; on an accelerator by its
        events, which are waited for, or where they tell no time, of the issuing."""
        spans = []
        for mark in marks:
            began = mark.began
            ended = mark.ended
            if mark.start is not None and mark.event is not None and self._start is not None:
                mark.event.synchronize()
                start_seconds = elapsed(self._start, mark.start)
                end_seconds = elapsed(self._start, mark.event)
                if start_seconds is not None and end_seconds is not None:
                    began = self._began + start_seconds
                    ended = self._began + end_seconds
            spans.append((began, ended))
        return spans

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        self._threads.clear()

    def _thread(self, lane: Lane, what: str = "") -> ThreadPoolExecutor:
        key = (lane, what)
        if key not in self._threads:
            self._threads[key] = ThreadPoolExecutor(
                max_workers=1,
                thread_name_prefix=f"blockwalk {lane}{what}",
                initializer=self._enter,
            )
        return self._threads[key]

    def _enter(self) -> None:
        """Begin a lane's thread: on this walk's device, for a thread begins on device 0."""
        if is_cpu(self.device):
            _work_alone()
        else:
            torch.accelerator.set_device_index(self.device)

    def _begin(self, lane: Lane, work: Work, dependencies: tuple[Mark, ...], mark: Mark) -> None:
        """Run work on its lane's thread; what it has begun ends on another."""
        future = mark.future
        assert future is not None
        begun = self._begun[lane]
        while len(begun) >= lane.at_once:
            wait([begun.popleft()])
        try:
            completion = self._run(lane, work, dependencies, mark)
        except BaseException as error:
            future.set_exception(error)
            return
        if completion is None:
            future.set_result(None)
        else:
            begun.append(future)
            self._thread(lane, " ends").submit(self._end, completion, mark, future)

    @staticmethod
    def _end(completion: Completion, mark: Mark, future: Future[None]) -> None:
        try:
            completion()
        except BaseException as error:
            future.set_exception(error)
            return
        mark.ended = time.perf_counter()
        future.set_result(None)

    def _run(
        self, lane: Lane, work: Work, dependencies: tuple[Mark, ...], mark: Mark
    ) -> Completion | None:
        """Run work once the ops that it depends on are done, and return what is left to wait
        for."""
        for dependency in dependencies:
            if dependency.future is not None:
                dependency.future.result()
        mark.began = time.perf_counter()
        completion: Completion | None = None
        if self._is_cpu:
            completion = work()
        else:
            with self._on_stream(lane):
                self._await(lane, dependencies)
                if self.timed:
                    mark.start = recorded(self.device, timing=True)
                completion = work()
                assert completion is None, "a device's queue waits, not a thread"
                mark.event = recorded(self.device, timing=self.timed)
        if completion is None:
            mark.ended = time.perf_counter()
        return completion

    def _await(self, lane: Lane, dependencies: tuple[Mark, ...]) -> None:
        """Let the current stream wait for the ops that an op depends on. Those of its own lane went
        the same way before it, and the compute lane's stream is the caller's, on which the program
        began."""
        events = [mark.event for mark in dependencies if mark.lane is not lane]
        if lane is not Lane.COMPUTE:
            events.append(self._start)
        if not events:
            return
        stream = torch.accelerator.current_stream(self.device)
        for event in events:
            if event is not None:
                stream.wait_event(event)

    def _on_stream(self, lane: Lane) -> AbstractContextManager[object]:
        """Return the lane's stream as the current one; the compute lane keeps the caller's."""
        if lane is Lane.COMPUTE:
            return nullcontext()
        if lane not in self._streams:
            self._streams[lane] = torch.Stream(self.device)
        return self._streams[lane]


def _work_alone() -> None:
    """Let torch's operators use this thread only. Each thread that runs one has a team of OpenMP
    threads of its own, and with two teams on as many cores libgomp no longer spins between
    operators: every thread sleeps and is woken for each one."""
    try:
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(1)
    except (OSError, AttributeError):  # a build without OpenMP
        return

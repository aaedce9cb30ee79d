"""The executor: it runs a program on this machine.

Read it after ``plan/methods.py`` and ``program/program.py``. A program is the whole schedule of a
step, so the executor decides nothing. It takes the ops in their order and asks for the work of
each: the engine moves state (FETCH, GATHER, CACHE, REDUCE, STORE, EVICT), the estimator computes
(all others). The work runs on the op's lane, a queue of its own, once the ops that it depends on
are done. So transfers go on beside the products, and a program's dependencies alone say what waits
for what.

Who brings block 3? An op ``FETCH block 3`` ahead of its turn. ``Engine.prepare`` hands it to the
home of the part that it names (:mod:`blockwalk.engine.home`), whose work copies the block's bytes
from their tier into a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from blockwalk.engine.engine import MOVES, Engine
from blockwalk.program.program import Op, Program
from blockwalk.walk.lanes import Lanes, Mark

Timeline = list[tuple[Program, list[tuple[Op, float, float]]]]
"""Programs that ran; of each op the host seconds of its beginning and end."""


class Computes(Protocol):
    """An estimator, as far as a program needs it."""

    def prepare(self, op: Op) -> Callable[[], None]:
        """Return the work of an op that computes."""


class Executor:
    """Runs programs over one engine.

    Args:
        engine: moves the model's state.
        lanes: the queues that ops run on.
    """

    def __init__(self, engine: Engine, lanes: Lanes) -> None:
        self.engine = engine
        self.lanes = lanes

    def run(self, program: Program, estimator: Computes, timeline: Timeline | None = None) -> None:
        """Run a program to its end, on the device too. A ``timeline`` is told the seconds of its
        ops.

        Raises:
            Exception: the first error of any op; ops that depend on it do not run.
        """
        self.lanes.timed = timeline is not None
        self.lanes.begin()
        marks: list[Mark] = []
        try:
            for op in program.ops:
                work = (self.engine if op.kind in MOVES else estimator).prepare(op)
                marks.append(self.lanes.submit(op.lane, work, (marks[dep] for dep in op.deps)))
        finally:
            self.lanes.drain(marks)
        self.engine.dirty = program.dirty
        if timeline is not None:
            seconds = self.lanes.seconds(marks)
            ran = [(op, *times) for op, times in zip(program.ops, seconds, strict=True)]
            timeline.append((program, ran))

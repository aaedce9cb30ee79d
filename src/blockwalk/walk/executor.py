"""The executor: it runs a program on this machine.

Read it after ``plan/methods.py`` and ``program/program.py``. A program is the whole schedule of a
step, so the executor decides nothing. It takes the ops in their order and asks for the work of
each: the engine moves state (FETCH, GATHER, CACHE, REDUCE, STORE, EVICT), the estimator computes
(all others). The work runs on the op's lane, a queue of its own, once the ops that it depends on
are done. So transfers go on beside the products, and a program's dependencies alone say what waits
for what.

Ops that refresh a node slice may run on when their program has ended, while the next batch is read:
whoever reads the slice, or changes what it is made of, waits for them.

Who brings block 3? An op ``FETCH block 3`` ahead of its turn. ``Engine.prepare`` hands it to the
home of the part that it names (:mod:`blockwalk.engine.home`), whose work copies the block's bytes
from their tier into a slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from blockwalk.engine.engine import MOVES, Engine
from blockwalk.plan.placement import StateKind
from blockwalk.program.program import Op, Program
from blockwalk.ranks.groups import Completion
from blockwalk.system.deferred_imports import deferred_imports
from blockwalk.walk.lanes import Lanes, Mark, Work

Timeline = list[tuple[Program, list[tuple[Op, float, float]]]]
"""Programs that ran; of each op the host seconds of its beginning and end."""


class Computes(Protocol):
    """An estimator, as far as a program needs it."""

    def prepare(self, op: Op) -> Work:
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
        self._refreshes: dict[int, Mark] = {}
        """The end of the last refreshment of each unit's node slice, until a program has read
        it."""

    @deferred_imports()  # torch.autograd.grad imports symbolic shapes to compare plain ones
    def run(
        self,
        program: Program,
        estimator: Computes,
        timeline: Timeline | None = None,
        *,
        step: int = 0,
    ) -> None:
        """Run a program to its end, on the device too, but for the node slices that it refreshes
        last. A ``timeline`` is told the seconds of its ops, and waits for all.

        Args:
            step: its number, which the error of a refreshment names.

        Raises:
            Exception: the first error of any op; ops that depend on it do not run. So does an error
                of an earlier program's refreshment, where this one reads what it made.
        """
        self.lanes.timed = timeline is not None
        self.engine.begin(program.shape)
        self.lanes.begin()
        marks: list[Mark] = []
        earlier = dict(self._refreshes)
        try:
            for op in program.ops:
                work = (self.engine if op.kind in MOVES else estimator).prepare(op)
                refreshes = op.refreshes
                if refreshes:
                    work = self._named(work, program.unit_names[op.unit], step)
                dependencies = [marks[dep] for dep in op.deps]
                if op.part is StateKind.TRAINABLE and op.unit in earlier:
                    dependencies.append(earlier[op.unit])
                marks.append(self.lanes.submit(op.lane, work, dependencies))
                if refreshes:
                    self._refreshes[op.unit] = marks[-1]
        finally:
            waits_for_all = timeline is not None
            self.lanes.drain(
                mark
                for op, mark in zip(program.ops, marks, strict=False)
                if waits_for_all or not op.refreshes
            )
        for unit, mark in earlier.items():
            if self._refreshes[unit] is mark and mark.passed():
                del self._refreshes[unit]
        self.engine.dirty = program.dirty
        if timeline is not None:
            seconds = self.lanes.seconds(marks)
            ran = [(op, *times) for op, times in zip(program.ops, seconds, strict=True)]
            timeline.append((program, ran))

    def settle(self) -> None:
        """Wait until every node slice is refreshed.

        Raises:
            RuntimeError: a refreshment failed, in the step that the message names. What it should
                have brought up to date is out of date.
        """
        refreshes, self._refreshes = self._refreshes, {}
        try:
            self.lanes.drain(refreshes.values())
        except BaseException:
            self.engine.dirty = self.engine.dirty.union(refreshes)
            raise

    @staticmethod
    def _named(work: Work, unit: str, step: int) -> Work:
        """Return the work of a refreshment, whose error says what failed, and in which step."""

        @contextmanager
        def named() -> Iterator[None]:
            try:
                yield
            except Exception as error:
                raise RuntimeError(
                    f"refreshing the weights of {unit} over ranks failed after step {step}: {error}"
                ) from error

        def begin() -> Completion | None:
            with named():
                completion = work()
            return None if completion is None else named()(completion)

        return begin

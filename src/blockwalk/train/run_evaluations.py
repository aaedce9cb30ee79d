"""The evaluations of a run: which are due, which were made, and the best of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted
from blockwalk.ranks.ranks import first
from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import whole_lines
from blockwalk.train.beginning import Beginning
from blockwalk.train.best import Best
from blockwalk.train.evaluation import Evaluation, HeldOut
from blockwalk.train.metrics_log import MetricsLog
from blockwalk.train.progress import Progress
from blockwalk.walk.walker import Walker


class _Interrupted(Exception):
    """A signal came while held-out records were evaluated."""


@dataclass(slots=True)
class RunEvaluations:
    """The evaluations of a run in progress."""

    config: RunConfig
    held_out: HeldOut | None
    records: str
    """The digest of the held-out records; empty where there are none."""
    log: MetricsLog
    step: int
    """The step of the last evaluation, on every rank as in rank 0's log; −1: there was none."""
    best: Best

    @classmethod
    def begin(cls, beginning: Beginning, log: MetricsLog) -> RunEvaluations:
        """Return the evaluations that rank 0's log has. Raises Damaged where it does not tell."""
        config = beginning.config
        records = beginning.records

        def last_step() -> int:
            with atomic_files.reading(log.path):
                for line in (log.first_line, log.last_line):
                    if line is not None:
                        Evaluation.of(line)  # which the run's outcome will tell
            return log.last_step

        def best() -> dict[str, Any]:
            with atomic_files.reading(log.path):
                best = Best.of(whole_lines(log.path), config.keep_best or "loss", records)
            return dataclasses.asdict(best)

        return cls(
            config, beginning.prepared.held_out, records, log, first(last_step), Best(**first(best))
        )

    def due(self, step: int, total: int) -> bool:
        """Return whether an evaluation is due and not in the log yet: before the first step, every
        ``eval_every``, after the last."""
        every = self.config.eval_every
        if self.held_out is None or self.step == step:
            return False
        if step == 0:
            return self.config.eval_first
        return step == total or (every > 0 and step % every == 0)

    def make(
        self, walker: Walker, progress: Progress, interrupted: Callable[[], bool]
    ) -> Mapping[str, Any] | None:
        """Evaluate the walker, and return the line that is logged. None: a signal ended it between
        two batches, and the resumed run makes it."""
        assert self.held_out is not None

        def watch(records_done: int) -> None:
            show(records_done)
            if interrupted():
                raise _Interrupted

        began = time.perf_counter()
        try:
            with progress.evaluating(len(self.held_out.rows)) as show:
                evaluation = self.held_out.evaluate(walker, watch)
        except _Interrupted:
            return None
        line = {
            "step": walker.steps_done,
            **dataclasses.asdict(evaluation),
            "seconds": time.perf_counter() - began,
            "records": self.records,
        }
        if walker.ranks.rank == 0:
            self.log.write(line)
            self.log.sync()  # it cannot be made any more once the ledger has gone on
        self.step = walker.steps_done
        self.best = Best(**first(lambda: dataclasses.asdict(self.best.after(line))))
        progress.say(f"evaluation at step {self.step}: {evaluation}")
        return line

    def stop_early(self, step: int, *, resumed: bool) -> str:
        """Return why a run ends after a step, where the evaluations since the best one are as many
        as ``early_stopping`` says; empty where they are not.

        Args:
            resumed: whether the run may have ended so before, and its user wants to go on.
        """
        count = self.best.without
        if not 0 < self.config.early_stopping <= count:
            return ""
        way_on = f"; to go on, set early_stopping above {count}, or to 0" if resumed else ""
        return (
            f"early stopping after step {step}: {counted(count, 'evaluation')} since the best one"
            f" ({self.best}){way_on}"
        )

    @property
    def kept(self) -> str:
        """The name of the checkpoint that stays although newer ones follow; empty: none."""
        return self.best.name if self.config.keep_best else ""

    def is_best(self, step: int) -> bool:
        """Return whether the evaluation at a step is the best one, whose checkpoint is kept."""
        return bool(self.config.keep_best) and self.best.step == step

    def ends(self) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """Return the lines of the first and the last evaluation; no first one where it is of other
        records."""
        initial = self.log.first_line
        final = self.log.last_line
        if initial and final and initial.get("records") != final.get("records"):
            initial = None
        return initial, final

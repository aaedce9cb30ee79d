"""The results of a run that has ended, and the lines that it prints last."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockwalk.plan.words import counted
from blockwalk.program.program import human_bytes
from blockwalk.system.process_memory import COUNTED
from blockwalk.train.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run that has ended."""

    steps: int
    """Optimizer steps done, those before a resume included."""
    first_loss: float | None
    last_loss: float | None
    """Mean training losses of the first and of the last tenth of the steps; None before the first
    step."""
    before: Evaluation | None
    after: Evaluation | None
    """The evaluations before the first step and after the last; None: there was none."""
    peak_bytes: int
    """The process's peak; see :func:`blockwalk.system.process_memory.process_bytes`."""
    saved_to: Path
    stopped_by: signal.Signals | None = None
    """The signal that ended the run early, after a checkpoint."""
    resident_bytes: int = 0
    """The process's peak with the file pages that the kernel can drop; 0 where it is not known."""
    compared: tuple[str, ...] = ()
    """Forecast against measured."""
    next_command: str = ""
    """A command line that uses what was trained; empty where the run has not ended, or no short
    prompt fits."""
    best: str = ""
    """The checkpoint of the best evaluation, its step and its score, where ``keep_best`` is set."""

    def lines(self) -> Iterator[str]:
        """Yield the summary that a run prints last."""
        if self.before is not None and self.after is not None:
            for title, ended in self.after.scores.items():
                yield f"held-out {title:<9} {self.before.scores[title]:.1f}% → {ended:.1f}%"
            yield f"held-out loss      {self.before.loss:.4f} → {self.after.loss:.4f}"
        elif self.after is not None:
            yield f"held-out loss      {self.after.loss:.4f}"
        if self.first_loss is not None and self.last_loss is not None:
            tenth = -(-self.steps // 10)
            means = "" if tenth == 1 else f"; means of the first and the last {tenth}"
            yield (
                f"training loss      {self.first_loss:.4f} → {self.last_loss:.4f} "
                f" ({counted(self.steps, 'step')}{means})"
            )
        yield f"peak memory        {human_bytes(self.peak_bytes)} ({COUNTED})"
        if self.resident_bytes:
            resident = human_bytes(self.resident_bytes)
            yield f"                   RSS incl. droppable file pages: {resident}"
        yield from self.compared
        yield f"saved to           {self.saved_to}"
        if self.best:
            yield f"best evaluation    {self.best}"
        if self.next_command:
            yield f"try it             {self.next_command}"

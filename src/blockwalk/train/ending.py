"""The end of a run: its last step, an answer of a callback, or a signal."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from blockwalk.train.stop_signals import Stop
from blockwalk.walk.walker import Walker


@dataclass(slots=True)
class Ending:
    """The step that a run ends after, and the signal that ended it before."""

    walker: Walker
    stop: Stop
    total: int
    """The last step; earlier than the settings say once a callback or early stopping ends the
    run."""
    stopped_by: signal.Signals | None = None

    @property
    def reached(self) -> bool:
        """Whether the last step is done."""
        return self.walker.steps_done >= self.total

    @property
    def over(self) -> bool:
        """Whether no step is left to do: the last one is done, or a signal has been heard."""
        return self.reached or self.stopped_by is not None

    def end_here(self) -> None:
        """Make the step just done the last."""
        self.total = self.walker.steps_done

    def signalled(self, *, heard: bool = True) -> bool:
        """Return whether a signal that all ranks know of ends the run.

        Args:
            heard: whether the step just done has told every rank's signal; False asks the ranks.
        """
        ranks = self.walker.ranks
        if ranks.world == 1:
            number = self.stop.signal
        elif heard:
            number = ranks.stop_signal_of_any_rank
        else:
            number = int(max(values[0] for values in ranks.exchange([self.stop.signal])))
        if number:
            self.stopped_by = signal.Signals(number)
        return self.stopped_by is not None

"""The signals that ask a run to end: they end the process where it stands, or are noted for the
loop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from blockwalk.ranks import place
from blockwalk.system.signals import STOPS, handled
from blockwalk.system.terminal import hurry, say_in_handler


class Stopped(KeyboardInterrupt):
    """A signal before the run began; nothing was changed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@dataclass(slots=True)
class Stop:
    """The action of the signals that ask a run to end: they end the process where it stands, or are
    noted for the loop, which ends between two steps."""

    noted: bool = False
    signal: int = 0
    """The number of the signal that came; 0: none."""


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Handle the signals that ask the run to end, as a :class:`Stop` says; a second one acts as it
    would have."""
    stop = Stop()

    def act(number: int, _: FrameType | None) -> None:
        hurry()
        signal.signal(number, previous[number])
        if not stop.noted:
            raise Stopped(number)
        stop.signal = number
        # Not through a buffered writer, which this may have interrupted.
        if place.place().rank == 0:
            say_in_handler(
                "\nstopping after this step, or this batch of an evaluation, with a checkpoint;"
                " ^C again to quit\n"
            )

    with handled(act, STOPS) as previous:
        yield stop

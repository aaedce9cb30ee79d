"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from blockwalk.program.program import human_bytes
from blockwalk.system.terminal import clean, is_terminal, say

QUIET = 10.0
"""Seconds between plain lines of an evaluation."""


SHOWN = 400
"""Characters of a run of text that are shown at most."""


class Progress:
    """A display of each step; :meth:`say` prints a line beside it.

    Args:
        total: the run's last step.
        done: steps done when it starts.
        log_every: steps between lines that stay.
        foreseen: bytes of the process that were foreseen; 0: none.
        beyond: a function of the bytes that the process holds: why they are more than was foreseen,
            empty where they are not. It is said once.
    """

    def __init__(
        self,
        total: int,
        *,
        done: int,
        log_every: int,
        foreseen: int = 0,
        beyond: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._foreseen = foreseen
        self._beyond: Callable[[int], str] | None = beyond
        self._total = total
        self._done = done
        self._log_every = log_every
        self._bar: Any = None
        self._task: Any = None
        self._first = done
        self._began: float | None = None
        """The time in seconds at which the first step began: the time before it (evaluation,
        compiling) says nothing of the steps to come."""

    def __enter__(self) -> Progress:
        if is_terminal(sys.stdout) or "ipykernel" in sys.modules:
            from rich import progress

            columns = (
                progress.TextColumn("{task.fields[what]} {task.completed}/{task.total}"),
                progress.BarColumn(bar_width=8),
                progress.TextColumn("{task.description}"),
                progress.TimeElapsedColumn(),
                progress.TextColumn("gone,"),
                progress.TimeRemainingColumn(),
                progress.TextColumn("left"),
            )
            self._bar = progress.Progress(*columns)
            self._task = self._bar.add_task(
                "", what="step", total=self._total, completed=self._done
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(clean(text)))  # no markup and no emoji names in it
        else:
            say(text)

    def show_learnt(self, title: str, runs: Sequence[tuple[str, bool]]) -> None:
        """Print a text whose learnt runs stand in ⟦ ⟧, green on a terminal; a run's middle is left
        out where it is long."""
        if self._bar is None:
            say(*learnt_lines(title, runs))
        else:
            from rich.text import Text

            styled = [(clean(text), "green" if learnt else "dim") for text, learnt in _marked(runs)]
            self._bar.console.print(Text.assemble(f"{title} (learnt: ⟦ ⟧):\n", *styled))

    @contextmanager
    def evaluating(self, count: int, what: str = "evaluation") -> Iterator[Callable[[int], None]]:
        """Show an evaluation of ``count`` records; what is given here is told how many are done."""
        began = said = time.perf_counter()
        task = None if self._bar is None else self._bar.add_task("", what=what, total=count)

        def show(done: int) -> None:
            nonlocal said
            now = time.perf_counter()
            if task is not None:
                self._bar.update(task, completed=done)
            elif done and now - said > QUIET:
                said = now
                remaining = (now - began) / done * (count - done)
                say(f"{what} {done}/{count}  {remaining:.0f} s left")

        try:
            yield show
        finally:
            if task is not None:
                self._bar.remove_task(task)

    def step(
        self,
        step: int,
        *,
        loss: float,
        seconds: float,
        tokens_per_second: float,
        peak_bytes: int,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Show that a step is done, with further means over it by name."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now - seconds
        further = "".join(f"{name} {value:.4f}  " for name, value in metrics.items())
        speed = f"loss {loss:.4f}  {further}{tokens_per_second:,.0f} tokens/s"
        figures = f"{speed}  {human_bytes(peak_bytes)} private"
        stays = step % self._log_every == 0 or step == self._total
        if self._beyond is not None and (reason := self._beyond(peak_bytes)):
            self.say(reason)
            self._beyond = None
        width = int(math.log10(self._total)) + 1
        title = f"step {step:>{width}}/{self._total}"
        if self._bar is not None:
            if stays:
                self.say(f"{title}  {figures}")
            if self._foreseen:
                figures = f"{speed}  {human_bytes(peak_bytes)} of {human_bytes(self._foreseen)}"
            self._bar.update(self._task, completed=step, description=figures)
        elif stays:
            step_seconds = (now - self._began) / (step - self._first)
            remaining = step_seconds * (self._total - step)
            say(f"{title}  {figures}  {remaining:.0f} s left")


def learnt_lines(title: str, runs: Sequence[tuple[str, bool]]) -> list[str]:
    """Return a text whose learnt runs stand in ⟦ ⟧, below a title."""
    text = "".join(text for text, _ in _marked(runs))
    return [f"{title} (learnt: ⟦ ⟧):", *(f"    {line}" for line in text.split("\n"))]


def one_line(runs: Sequence[tuple[str, bool]], room: int) -> str:
    """Return the first learnt run of a text in ⟦ ⟧, behind the run before it, in a line of ``room``
    characters: the middle of long runs is left out, and a new line is ⏎."""
    first_learnt = next((at for at, (_, learnt) in enumerate(runs) if learnt), 0)
    shown = runs[max(first_learnt - 1, 0) : first_learnt + 1]
    share = (room - len("⟦⟧")) // len(shown)
    lines = [text.replace("\r", "").replace("\n", "⏎") for text, _ in shown]
    spare = sum(max(share - len(line), 0) for line in lines)
    texts = [_without_middle(line, share + spare) for line in lines]
    return "".join(
        f"⟦{text}⟧" if learnt else text for text, (_, learnt) in zip(texts, shown, strict=True)
    )


def _without_middle(text: str, length: int) -> str:
    """Return a text in at most so many characters."""
    if len(text) <= length:
        return text
    tail = max(length - 1, 0) // 2
    return f"{text[: max(length - 1 - tail, 0)]}…{text[len(text) - tail :]}"


def _marked(runs: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Return runs with ⟦ ⟧ around those that are learnt, without the middle of long ones."""
    short = [
        text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
        for text, _ in runs
    ]
    return [
        (f"⟦{text}⟧" if learnt else text, learnt)
        for text, (_, learnt) in zip(short, runs, strict=True)
    ]

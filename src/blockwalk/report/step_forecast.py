"""The forecast of a run's steps, kept beside its metrics for its report: ``forecast.json`` and
``trace.json``.

Seconds are foreseen where ``blockwalk doctor`` has measured the machine (``hardware.yaml`` in the
working directory), bytes of tensors always, and on a processor the memory of the whole process: the
bytes that it holds by now, tokenizer and data included, and those that a step adds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from blockwalk.plan.placement import NOBODY
from blockwalk.program.program import Pool, human_bytes
from blockwalk.report.forecast import Forecast
from blockwalk.simulate import process_memory, timeline
from blockwalk.simulate.simulator import Simulation
from blockwalk.system import atomic_files
from blockwalk.system.process_memory import COUNTED, process_bytes
from blockwalk.system.versions import installed

if TYPE_CHECKING:
    from blockwalk.walk.walker import Walker


NAME = "forecast.json"
TRACE = "trace.json"

TRACED_STEP = 3
"""The step that is traced: the first that finds everything as a long run does. In a shorter run it
is the last."""


@dataclass(slots=True)
class StepForecast:
    """The forecast of a run's step at its longest sequences, and the trace of one real step."""

    forecast: Forecast
    simulation: Simulation | None = None
    usual: Simulation | None = None
    """The simulation of a step of average length."""
    process_bytes: int = 0
    """Foreseen peak of the whole process on a CPU; 0 on a GPU."""
    held_bytes: int = 0
    """Bytes that the process held when the model was open, before the first step."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each step done."""
    paths: tuple[Path, ...] = ()
    """Files that the trace is written to, by rank 0."""

    @classmethod
    def of(
        cls, forecast: Forecast, usual: Simulation | None = None, *, before: int = 0
    ) -> StepForecast:
        """Return the forecast of a run whose model is open now.

        Args:
            forecast: of a step at the longest sequences.
            usual: a step of average length.
            before: bytes that the process held before the model was opened: interpreter, libraries,
                tokenizer, data.
        """
        process_now = process_bytes()
        peak = forecast.process_bytes(before, process_now) if forecast.device == "cpu" else 0
        return cls(forecast, forecast.simulated(), usual, peak, process_now)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the foreseen tensors on the device and the host at the peak."""
        return process_memory.tensors(self.forecast.fullest)

    def lines(self) -> Iterator[str]:
        """Yield what the memory of a step is made of, and what bounds its time."""
        if self.process_bytes:
            now = human_bytes(self.held_bytes)
            more = human_bytes(self.process_bytes - self.held_bytes)
            yield f"{COUNTED}: {human_bytes(self.process_bytes)} at a step's peak"
            yield (
                f"  {now} are there now (interpreter, libraries, tokenizer, data, the open model),"
                f" {more} come with a step"
            )
            if mapped := self.forecast.program.peaks()[Pool.MAPPED]:
                yield (
                    f"  beside it up to {human_bytes(mapped)} of mapped files, as far as there is"
                    " room (RSS counts them)"
                )
            if self.simulation is None:
                yield f"  {process_memory.GUESSED}"
        if self.usual is not None:
            yield f"  a step's seconds: {self.usual.bottleneck()}"

    def beyond(self, measured_bytes: int) -> str:
        """Return why a process may hold more than was foreseen; empty where it does not."""
        if not 0 < self.process_bytes < measured_bytes:
            return ""
        reason = "what libraries keep beside tensors differs from doctor's walks"
        if self.simulation is None:
            reason = process_memory.GUESSED
        return (
            f"note: memory is {human_bytes(measured_bytes)}, and {human_bytes(self.process_bytes)}"
            f" were foreseen: {reason}"
        )

    def compared(self, measured_bytes: int) -> Iterator[str]:
        """Forecast against measured, after a run: bytes of the process, or of the allocator's
        tensors on a GPU."""
        measured = "the whole process"
        foreseen = self.process_bytes
        if not foreseen:
            measured = "tensors"
            foreseen = self.tensor_bytes
        peak = human_bytes(measured_bytes) if measured_bytes else "not told by this device"
        yield (
            f"forecast, memory   {human_bytes(foreseen)} of {measured} at a step's peak;"
            f" measured: {peak}"
        )
        steady = self.seconds[1:] or self.seconds
        if self.usual is not None and steady:
            yield (
                f"forecast, time     {self.usual.seconds:.3g} s a step on average; measured:"
                f" {fmean(steady):.3g} s"
            )

    def write(self, folder: Path, trace_path: str | Path | None = None) -> None:
        """Write ``forecast.json``, for the report; beside it, and to ``trace_path``, the foreseen
        step until one was traced."""
        self.paths = (folder / TRACE, *([Path(trace_path)] if trace_path else []))
        atomic_files.write_bytes(
            folder / NAME, (json.dumps(self.values(), indent=1) + "\n").encode()
        )
        for path in self.paths:
            # a run that was killed as it traced its step does not do it again
            if not path.is_file():
                timeline.write(path, self._foreseen())

    def _foreseen(self) -> list[dict[str, Any]]:
        """Return events of the simulated step, if it could be simulated."""
        if self.simulation is None:
            return []
        spans = [(span.op, span.began, span.ended) for span in self.simulation.spans]
        host = self.simulation.host_times()
        return timeline.events(self.simulation.program, [spans], process="foreseen", host=host)

    def values(self) -> dict[str, Any]:
        """Return the forecast as ``forecast.json`` holds it."""
        forecast = self.forecast
        peaks = forecast.program.peaks()
        rows = ((row, str(row.placement).removesuffix(f" × {NOBODY}")) for row in forecast.rows())
        return {
            "states": [[row.kind, place, row.nbytes, row.note] for row, place in rows],
            "peaks": {str(pool): peaks[pool] for pool in Pool if peaks[pool]},
            "tensor_bytes": self.tensor_bytes,
            "process_bytes": self.process_bytes,
            "bytes_moved": {
                str(lane): nbytes for lane, nbytes in forecast.program.bytes_by_lane().items()
            },
            "bytes_by_axis": forecast.program.bytes_by_axis(forecast.plan.mesh),
            "seconds": None if self.simulation is None else self.simulation.seconds,
            "average_seconds": None if self.usual is None else self.usual.seconds,
            "versions": installed(),
        }

    def before_step(self, walker: Walker, step: int, total: int) -> None:
        """Have a step's ops timed, if it is the one that is traced."""
        walker.timeline = [] if self.paths and step == min(TRACED_STEP, total) else None

    def after_step(self, walker: Walker, seconds: float) -> None:
        """Write the traced step, the forecast of the same step above it in the same lanes and
        names."""
        self.seconds.append(seconds)
        if not walker.timeline:
            return
        walks = [
            timeline.events(program, [timed], process="measured")
            for program, timed in walker.timeline
        ]
        events = [event for walk in walks for event in walk]
        for path in self.paths:
            timeline.write(path, self._foreseen() + events)
        walker.timeline = None

"""What a run foresees of its steps, and keeps beside its metrics for its report: ``forecast.json`` and ``trace.json``.

Seconds, and memory of the whole process, are foreseen where ``blockwalk doctor`` has measured the machine (``hardware.yaml`` in
the working directory); bytes of tensors always.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockwalk import checkpoint, files
from blockwalk.metrics import process_bytes
from blockwalk.program import Pool, Program, Shape, StepKind, human_bytes
from blockwalk.simulate import hardware, memory, trace
from blockwalk.simulate.simulator import Simulation, simulate

if TYPE_CHECKING:
    from blockwalk.walker import Walker

NAME, TRACE = "forecast.json", "trace.json"

TRACED_STEP = 3
"""The step that is traced: the first that finds everything as a long run does. Of a shorter run, the last."""


@dataclass(slots=True)
class Record:
    """The forecast of a run's step at its longest sequences, and the trace of one real step."""

    program: Program
    simulation: Simulation | None = None
    process_bytes: int = 0
    """Foreseen peak of the whole process on a CPU; 0 where it is not foreseen."""
    seconds: list[float] = field(default_factory=list)
    """Of the steps done."""
    paths: tuple[Path, ...] = ()
    """Where the trace goes: on rank 0."""

    @classmethod
    def of(cls, walker: Walker, shape: Shape, *, adapters: bool) -> Record:
        """Foresee a run's training step."""
        program = walker.program(StepKind.TRAIN, shape, foresee=True)
        if not hardware.HERE.is_file():
            return cls(program)
        here = hardware.load(hardware.HERE)
        if here.device != walker.device.type:
            return cls(program)
        found = simulate(program, walker.plan, walker.spec, here, walker.costs(shape))
        process = 0
        if here.process_bytes:  # beside what doctor found on its walks a run holds a tokenizer, data, and their libraries
            growth = memory.step_growth(program, walker.plan, here, adapters=adapters)
            process = max(memory.process_peak(program, walker.plan, here, adapters=adapters), process_bytes() + growth)
        return cls(program, found, process)

    @property
    def tensor_bytes(self) -> int:
        """Foreseen tensors on the device and the host at a step's peak."""
        return memory.tensors(self.program)

    def lines(self) -> Iterator[str]:
        """What is foreseen beside the program's own bytes."""
        if self.simulation is not None:
            found = self.simulation
            yield f"  foreseen: {found.seconds:.3g} s a step, {found.tokens_per_second:,.0f} tokens/s; {found.bottleneck()}"
        if self.process_bytes:
            yield f"  foreseen: {human_bytes(self.process_bytes)} of memory, of the whole process"

    def compared(self, measured_bytes: int) -> Iterator[str]:
        """Forecast against measured, after a run."""
        if self.process_bytes:
            whole = f"{human_bytes(self.process_bytes)} of the whole process at its peak"
            yield f"forecast, memory   {whole}; measured: {human_bytes(measured_bytes)}"
        steady = sorted(self.seconds[1:] or self.seconds)
        if self.simulation is not None and steady:
            foreseen, middle = self.simulation.seconds, steady[len(steady) // 2]
            yield f"forecast, time     {foreseen:.3g} s a step at the longest sequences; measured: {middle:.3g} s (median)"

    def write(self, folder: Path, trace_path: str | Path | None = None) -> None:
        """``forecast.json``, for the report; the trace will follow beside it, and to ``trace_path``."""
        self.paths = (folder / TRACE, *([Path(trace_path)] if trace_path else []))
        peaks = self.program.peaks()
        value: dict[str, Any] = {
            "peaks": {str(pool): peaks[pool] for pool in Pool if peaks.get(pool)},
            "tensor_bytes": self.tensor_bytes,
            "process_bytes": self.process_bytes,
            "bytes_moved": {str(lane): nbytes for lane, nbytes in self.program.bytes_by_lane().items()},
            "seconds": None if self.simulation is None else self.simulation.seconds,
            "versions": checkpoint.versions(),
        }
        files.write_bytes(folder / NAME, (json.dumps(value, indent=1) + "\n").encode())

    def before_step(self, walker: Walker, step: int, total: int) -> None:
        """Have a step's ops timed, if it is the one that is traced."""
        walker.timeline = [] if self.paths and step == min(TRACED_STEP, total) else None

    def after_step(self, walker: Walker, seconds: float) -> None:
        """Write the traced step, the forecast of the same step above it in the same lanes and names."""
        self.seconds.append(seconds)
        if not walker.timeline:
            return
        found = [
            event
            for program, timed in walker.timeline
            for event in trace.events(program, [timed], process="measured")
        ]
        if self.simulation is not None:
            spans = [(span.op, span.began, span.ended) for span in self.simulation.spans]
            found = trace.events(self.simulation.program, [spans], process="foreseen") + found
        for path in self.paths:
            trace.write(path, found)
        walker.timeline = None

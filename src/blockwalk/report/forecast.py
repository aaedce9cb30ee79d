"""The forecast of a plan before it starts: bytes of each kind of state on its tier, the predicted
peak, the traffic.

Everything is read off the program that the run will execute. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from blockwalk.plan.choices import Timing
from blockwalk.plan.mesh import PIPELINE
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.parsing import plain_values
from blockwalk.plan.placement import NOBODY
from blockwalk.plan.plan import Plan
from blockwalk.plan.words import counted
from blockwalk.program.costs import Costs
from blockwalk.program.program import Pool, Program, human_bytes
from blockwalk.program.settling import BUDGET
from blockwalk.program.stages import idle, loads, part_of, stage_at
from blockwalk.report import machine
from blockwalk.report.state_rows import StateRow, state_rows
from blockwalk.simulate import hardware, process_memory
from blockwalk.simulate.seconds import NO_COSTS, CostModel
from blockwalk.simulate.simulator import Simulation, simulate


class DoesNotFit(ValueError):
    """A plan needs more device memory than ``budget`` gives it."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The costs of a run's training step, and the memory of its evaluations."""

    plan: Plan
    model: ModelSpec
    programs: tuple[Program, ...]
    """The distinct ones of the ranks (:func:`blockwalk.program.compile.compile_ranks`); what is
    said is of the first, of stages of the fullest."""
    device: str = "cpu"
    costs: Costs = NO_COSTS
    """The measured costs that the programs were compiled with."""
    visit: Program | None = None
    """The largest visit of held-out data: all its batches at each unit's turn."""
    settled: tuple[str, ...] = ()
    """Names of the settings that this machine decided."""
    notes: tuple[str, ...] = ()
    """Sentences on the tiers among them, and on the card."""
    device_free: int = 0
    """Bytes that are free on the accelerator; 0: there is none, or they are not known."""
    copied: tuple[int, ...] = ()
    """Bytes of host memory that each stage's ranks copy a checkpoint to, while it is written behind
    the steps; empty: none is."""

    @property
    def program(self) -> Program:
        return max(self.stages, key=self._held_bytes)

    @property
    def stages(self) -> tuple[Program, ...]:
        """The programs of the stages, each of which is a rank's; the first one where there is
        one."""
        return self.programs if self.plan.mesh.pipeline > 1 else self.programs[:1]

    @property
    def fullest(self) -> Program:
        """The program that holds more tensors: a step or a visit of held-out data."""
        return max(filter(None, (self.program, self.visit)), key=self._held_bytes)

    def _held_bytes(self, program: Program) -> int:
        return process_memory.tensors(program) + self._copied_bytes(program)

    def _copied_bytes(self, program: Program) -> int:
        return self.copied[program.stage] if self.copied else 0

    def simulated(self) -> Simulation | None:
        """Return the step on this machine; None where doctor has not measured it."""
        description = machine.this_machine(self.device)
        if description.name == hardware.UNMEASURED:
            return None
        return simulate(self.programs, self.plan, self.model, description, self.costs)

    def host_bytes(self) -> int:
        """Return bytes of tensors in a processor's own memory at the peak."""
        peaks = self.fullest.peaks()
        in_memory = peaks[Pool.HOST] + (peaks[Pool.DEVICE] if self.device == "cpu" else 0)
        return in_memory + self._copied_bytes(self.fullest)

    def process_bytes(self, before: int, opened: int | None = None) -> int:
        """Return bytes of the whole process at its peak, on a processor, where it held ``before``
        without the model and ``opened`` with it."""
        description = machine.this_machine(self.device)
        peak = process_memory.process_peak(
            self.fullest, self.plan, description, self.model, process=before
        )
        if opened is not None:
            opened += process_memory.step_growth(self.fullest, self.plan, description, self.model)
        return max(peak, opened or 0) + self._copied_bytes(self.fullest)

    def guessed_seconds(self) -> tuple[float, float]:
        """Return the least and the most seconds of a step on a machine that doctor has not
        measured."""
        slowest, fastest = hardware.extremes(machine.this_machine(self.device))
        least, most = (
            simulate(self.programs, self.plan, self.model, description, self.costs).seconds
            for description in (fastest, slowest)
        )
        return least, most

    def rows(self) -> list[StateRow]:
        """Return the kinds of state, each on its tier."""
        stage = stage_at(self.plan, self.model, ((PIPELINE, self.program.stage),))
        model = part_of(stage, self.model)
        return list(state_rows(self.plan, model, self.program, self.device))

    def lines(self) -> Iterator[str]:
        """Yield the forecast as a small table."""
        plan = self.plan
        program = self.program
        shape = self.program.shape
        passes = ""
        if not plan.estimator.facts.walks_back:
            passes = f", {plan.forward_passes} forward passes"
        yield (
            f"{plan.method} on {self.model.name}: {plan.estimator}{passes}, updates at"
            f" {_when(plan)}"
        )
        if plan.mesh.world > 1:
            yield f"  ranks       {plan.mesh.world}: {_shared(plan)}"
        for row in self.rows():
            placement = str(row.placement).removesuffix(f" × {NOBODY}")
            line = f"  {row.kind:<11} {placement:<24} {human_bytes(row.nbytes):>10}   {row.note}"
            yield line.rstrip()
        if plan.mesh.world > 1:
            ranks = plan.mesh.world
            node = plan.mesh.ranks_per_node
            yield (
                f"  ranks        {ranks} on {ranks // node} node{'s' * (ranks > node)} of {node}"
                " (mesh.ranks_per_node)"
            )
        if plan.mesh.pipeline > 1:
            yield from self._stages()
        micro = (
            f" × {plan.gradient_accumulation_steps}" if plan.gradient_accumulation_steps > 1 else ""
        )
        moved = ", ".join(
            f"{lane} {human_bytes(nbytes)}" for lane, nbytes in program.bytes_by_lane().items()
        )
        yield (
            f"  one step     {shape.batch} × {shape.sequence} tokens{micro}; moves"
            f" {moved or 'nothing'}"
        )
        if over := program.bytes_by_axis(plan.mesh):
            sent = ", ".join(f"{axis} {human_bytes(nbytes)}" for axis, nbytes in over.items())
            yield f"               a rank sends over each axis: {sent}"
        if plan.resident > 0:
            yield (
                f"  {plan.resident} of {counted(len(self.model.blocks), 'block')} stay on the"
                " device for good"
            )
        whose = "a step" if self.fullest is self.program else "an evaluation"
        yield f"  tensors at {whose}'s peak: {', '.join(self.pools())}"
        if copied := self._copied_bytes(self.fullest):
            yield (
                f"  a checkpoint is written behind the steps: a copy of {human_bytes(copied)} lies"
                " in host memory meanwhile (save_every)"
            )
        if plan.budget is not None:
            place = " on the device" if self.device != "cpu" else ""
            yield f"  budget: {human_bytes(plan.budget)}{place}{self._share()}"
        yield from (f"  {note}" for note in self.notes)

    def _stages(self) -> Iterator[str]:
        """Yield what each stage holds and needs, and the part of a step in which it waits."""
        plan = self.plan
        steps = len(plan.walks)
        ranks = counted(plan.mesh.stage_ranks, "rank")
        fewer = ", fewer than stages" if steps < plan.mesh.pipeline else ""
        yield (
            f"  stages       {plan.mesh.pipeline}, each of {ranks}: {100 * idle(plan):.0f}% of a"
            f" step idle at least ({counted(steps, 'visit')} of each block{fewer})"
        )
        priced = CostModel(plan, self.model, machine.this_machine(self.device), self.costs)
        work = loads(plan, self.model, self.costs, priced.work_seconds)
        for program in self.stages:
            stage = stage_at(plan, self.model, ((PIPELINE, program.stage),))
            share = sum(work[unit] for unit in stage.units) / sum(work)
            peaks = program.peaks()
            fullest = ", the fullest; rows above are its" if program is self.program else ""
            yield (
                f"    stage {program.stage + 1}    {stage.words(len(self.model.blocks))}:"
                f" {100 * share:.0f}% of the seconds, memory"
                f" {human_bytes(peaks[Pool.DEVICE] + peaks[Pool.HOST])}{fullest}"
            )

    def pools(self) -> Iterator[str]:
        """Yield the tensors' bytes at the peak, by where they lie: a processor's device and host
        are one memory."""
        peaks = self.fullest.peaks()
        if self.device == "cpu":
            yield f"memory {human_bytes(peaks.pop(Pool.DEVICE, 0) + peaks.pop(Pool.HOST, 0))}"
        names = {Pool.MAPPED: "file maps (pages that the kernel may drop)"}
        yield from (
            f"{names.get(pool, pool)} {human_bytes(peaks[pool])}" for pool in Pool if peaks[pool]
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def choices(self) -> dict[str, Any]:
        """Return the settings that this machine decided, by name, in plain types."""
        return {name: plain_values(attrgetter(name)(self.plan)) for name in self.settled}

    def device_peak(self) -> int:
        """Return bytes of tensors on the device at the peak: of a step, and on an accelerator of an
        evaluation as well."""
        programs = (self.program, self.visit) if self.device != "cpu" else (self.program,)
        return max(program.peaks()[Pool.DEVICE] for program in programs if program is not None)

    def _share(self) -> str:
        """Return the origin of a budget that nobody gave, in words."""
        free = human_bytes(self.device_free)
        return f", {BUDGET} of the {free} that are free there" if "budget" in self.settled else ""

    def check(self, otherwise: Callable[[int], str] = lambda _: "") -> None:
        """Refuse a plan that is above its own budget, or above what is free on an accelerator.

        Args:
            otherwise: another plan that would fit so many bytes, in words.

        Raises:
            DoesNotFit: the predicted peak on the device is above ``plan.budget``, or above
                ``device_free``.
        """
        peak = self.device_peak()
        plan = self.plan
        program = self.program
        over_free = 0 < self.device_free < min(peak, plan.budget or peak)
        if not over_free and (plan.budget is None or peak <= plan.budget):
            return
        other = plan.home.more_room(plan, program.slots, human_bytes(program.slot_bytes))
        room = plan.budget or 0
        remedy = "raise budget, "
        limit = f"budget is {human_bytes(room)}{self._share()}"
        if over_free:
            room = self.device_free
            remedy = ""
            limit = f"{human_bytes(self.device_free)} are free there"
        raise DoesNotFit(
            f"the plan needs {human_bytes(peak)} on the device, and {limit}: {remedy}lower"
            f" batch_size or data.max_length, {other}{otherwise(room)}"
        )


def _when(plan: Plan) -> str:
    words = {
        Timing.BLOCK: "the block's turn",
        Timing.STEP: "the step's end",
        Timing.DEFERRED: "the next fetch",
    }
    return words[plan.update.timing]


def _shared(plan: Plan) -> str:
    """Return the ranks that share each kind of state, in words."""
    mesh = plan.mesh
    if not plan.estimator.facts.shares_forwards:
        return (
            f"parameters over {plan.parameter_ranks}, gradients over {plan.gradient_ranks},"
            f" optimizer states over {plan.optimizer_ranks}, {mesh.ranks_per_node} to a node"
        )
    forwards = f"a step's {plan.forward_passes} forwards shared by {mesh.perturb}"
    return (
        f"the batch cut in {mesh.data}, {forwards}, streamed blocks held once by"
        f" {plan.parameter_ranks}"
    )

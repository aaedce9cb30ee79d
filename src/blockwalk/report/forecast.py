"""The forecast of a plan before it starts: bytes of each kind of state on its tier, the predicted
peak, the traffic.

Everything is read off the program that the run will execute. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockwalk.plan.choices import Adapters, LoraSettings, PrefixSettings, Timing
from blockwalk.plan.model_spec import ModelSpec, encoded_nbytes
from blockwalk.plan.parsing import plain_values
from blockwalk.plan.placement import NOBODY, Codec, Placement, Tier
from blockwalk.plan.plan import Plan
from blockwalk.plan.words import counted
from blockwalk.plan.zeroth_order_kinds import states_beside
from blockwalk.program.costs import Costs
from blockwalk.program.placements import Placements
from blockwalk.program.program import OpKind, Pool, Program, Shape, StepKind, human_bytes
from blockwalk.program.settling import BUDGET, settle
from blockwalk.program.state_sizes import compute_dtype, gradient_pool
from blockwalk.report import machine
from blockwalk.simulate import hardware, process_memory
from blockwalk.simulate.seconds import NO_COSTS
from blockwalk.simulate.simulator import Simulation, simulate
from blockwalk.system.card import Card
from blockwalk.system.process_memory import process_bytes

if TYPE_CHECKING:
    from blockwalk.plan.run_config import RunConfig
    from blockwalk.walk.unit_costs import UnitCosts


class DoesNotFit(ValueError):
    """A plan needs more device memory than ``budget`` gives it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of state: where it lives, and how many bytes it takes there."""

    kind: str
    placement: Placement
    nbytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The costs of a run's training step, and the memory of its evaluations."""

    plan: Plan
    model: ModelSpec
    programs: tuple[Program, ...]
    """The distinct ones of the ranks (:func:`blockwalk.program.compile.compile_ranks`); what is
    said is of the first."""
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

    @property
    def program(self) -> Program:
        return self.programs[0]

    @property
    def fullest(self) -> Program:
        """The program that holds more tensors: a step or a visit of held-out data."""
        return max(filter(None, (self.program, self.visit)), key=process_memory.tensors)

    def simulated(self) -> Simulation | None:
        """Return the step on this machine; None where doctor has not measured it."""
        here = machine.this_machine(self.device)
        if here.name == hardware.UNMEASURED:
            return None
        return simulate(self.programs, self.plan, self.model, here, self.costs)

    def host_bytes(self) -> int:
        """Return bytes of tensors in a processor's own memory at the peak."""
        peaks = self.fullest.peaks()
        return peaks[Pool.HOST] + (peaks[Pool.DEVICE] if self.device == "cpu" else 0)

    def process_bytes(self, before: int, opened: int | None = None) -> int:
        """Return bytes of the whole process at its peak, on a processor, where it held ``before``
        without the model and ``opened`` with it."""
        here = machine.this_machine(self.device)
        most = process_memory.process_peak(
            self.fullest, self.plan, here, self.model, process=before
        )
        if opened is not None:
            opened += process_memory.step_growth(self.fullest, self.plan, here, self.model)
        return max(most, opened or 0)

    def overview(self, steps: int, usual: Simulation | None = None) -> Iterator[str]:
        """Yield a run in the figures that decide about it: the process's memory, and the time of
        all ``steps`` (0: not known), as long as ``usual`` on average, the longest unless given."""
        found = self.simulated()
        if self.device == "cpu":
            free = "" if found else f"; {process_memory.GUESSED}"
            most = human_bytes(self.process_bytes(process_bytes()))
            tensors = human_bytes(self.host_bytes())
            yield f"memory  about {most} for the whole process, {tensors} of it tensors{free}"
        else:
            yield f"memory  {', '.join(self.pools())}"
        if found is None:
            yield "time    not known before blockwalk doctor has measured this machine, once"
            return
        each = f", {usual.seconds:.3g} s on average" if usual else ""
        # the simulation of a shorter row may take longer than that of the longest
        at_most = max(found.seconds, usual.seconds if usual else 0.0)
        duration = _duration(steps * (usual or found).seconds)
        whole = (
            f"; {counted(steps, 'step')}: about {duration}, evaluations left out" if steps else ""
        )
        yield f"time    {at_most:.3g} s a step at most{each}{whole}; {found.bottleneck()}"

    def rows(self) -> list[Row]:
        """Return bytes of each kind of state. A gradient that is used at its block's turn is at
        most one unit's."""
        plan = self.plan
        model = self.model
        frozen = model.numel(trainable=False)
        trained = model.numel(trainable=True)
        places = Placements(plan, model, self.device)
        stays = places.stays
        trainable = (
            replace(plan.trainable, tier=Tier.DEVICE, group=NOBODY) if stays else plan.trainable
        )
        small = (
            f", fewer than a block's: they stay there, not on the {plan.trainable.tier}"
            if stays
            else ""
        )
        rows = [
            Row(
                "frozen",
                plan.frozen,
                self._stored(plan.frozen, trainable=False),
                f"{frozen:,} parameters",
            ),
            Row(
                "trainable",
                trainable,
                self._stored(plan.trainable, trainable=True),
                f"{trained:,} parameters{small}",
            ),
        ]
        if not plan.zeroth_order:
            at_turn = plan.update.at_turn
            most = max(unit.numel(trainable=True) for unit in model.units) if at_turn else trained
            note = "of one unit: used at its turn" if at_turn else "accumulated to the step's end"
            stay = not plan.sharded and gradient_pool(plan, self.device) is Pool.DEVICE
            gradient = replace(plan.gradient, tier=Tier.DEVICE) if stay else plan.gradient
            rows.append(Row("gradient", gradient, 4 * most, note))
        states = 4 * len(plan.update_rule.states) * trained
        beside = plan.optimizer_state
        if plan.zeroth_order:  # in the buckets, with the parameters
            codecs = [codec for codec, _ in states_beside(plan.zo, plan.optimizer).values()]
            states = sum(encoded_nbytes((trained,), "float32", codec) for codec in codecs)
            beside = replace(trainable, codec=next(iter(codecs), Codec.FP32))
        elif places.updates_on_host and not places.states_on_disk:
            beside = replace(beside, tier=Tier.HOST)
        rows.append(Row("optimizer", beside, states, plan.optimizer.name))
        saved = sum(
            nbytes for op in self.program.ops if op.kind is OpKind.SAVE for _, nbytes in op.takes
        )
        if not plan.zeroth_order:
            rows.append(
                Row("activation", plan.activation, saved, "activation checkpoints of one step")
            )
        return rows

    def _stored(self, placement: Placement, *, trainable: bool) -> int:
        return sum(unit.nbytes(placement.codec, trainable=trainable) for unit in self.model.units)

    def lines(self) -> Iterator[str]:
        """Yield the forecast as a small table."""
        plan = self.plan
        program = self.program
        shape = self.program.shape
        passes = f", {plan.forward_passes} forward passes" if plan.zeroth_order else ""
        yield (
            f"{plan.method} on {self.model.name}: {plan.estimator}{passes}, updates at"
            f" {_when(plan)}"
        )
        if plan.mesh.world > 1:
            yield f"  ranks       {plan.mesh.world}: {_shared(plan)}"
        for row in self.rows():
            where = str(row.placement).removesuffix(f" × {NOBODY}")
            yield f"  {row.kind:<11} {where:<24} {human_bytes(row.nbytes):>10}   {row.note}".rstrip()
        if plan.mesh.world > 1:
            ranks = plan.mesh.world
            node = plan.mesh.ranks_per_node
            yield (
                f"  ranks        {ranks} on {ranks // node} node{'s' * (ranks > node)} of {node}"
                " (mesh.ranks_per_node)"
            )
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
        if plan.resident > 0:
            yield (
                f"  {plan.resident} of {counted(len(self.model.blocks), 'block')} stay on the"
                " device for good"
            )
        whose = "a step" if self.fullest is self.program else "an evaluation"
        yield f"  tensors at {whose}'s peak: {', '.join(self.pools())}"
        if plan.budget is not None:
            on = " on the device" if self.device != "cpu" else ""
            yield f"  budget: {human_bytes(plan.budget)}{on}{self._share()}"
        yield from (f"  {note}" for note in self.notes)

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
        return max(each.peaks()[Pool.DEVICE] for each in programs if each is not None)

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
        other = "or move state to another tier (frozen: disk × int4a)"
        if plan.sharded:
            other = (
                f"lower prefetch ({program.slots} slots of up to {human_bytes(program.slot_bytes)}:"
                " a block is gathered whole, attention and feed-forward together), or set"
                " optimizer_state: host × fp32 × world or frozen: device × int4a ×"
                f" {plan.frozen.group}"
            )
        room = plan.budget or 0
        raised = "raise budget, "
        there = f"budget is {human_bytes(room)}{self._share()}"
        if over_free:
            room = self.device_free
            raised = ""
            there = f"{human_bytes(self.device_free)} are free there"
        raise DoesNotFit(
            f"the plan needs {human_bytes(peak)} on the device, and {there}: {raised}lower"
            f" batch_size or data.max_length, {other}{otherwise(room)}"
        )


def foresee(
    run: RunConfig, shape: Shape, measured: UnitCosts, visit: tuple[Shape, int] | None = None
) -> Forecast:
    """Return the forecast of a run's training step at the shape of a micro-batch, read off the
    model's configuration alone: no weight is touched. Its plan has what this machine decides: see
    :func:`blockwalk.program.settling.settle`.

    Args:
        visit: the shape of a batch of held-out data, and how many of them a visit of a block
            computes.
    """
    from blockwalk.program.compile import compile, compile_ranks

    device = measured.device
    room = machine.room(Path(run.output_dir), measured.device)
    model = model_spec(run.model, measured)
    costs = measured(run.plan, shape)
    settled = settle(run.plan, model, shape, costs, device=device, room=room, named=run.named)
    plan = settled.plan
    programs = compile_ranks(
        plan, model, StepKind.TRAIN, shape, costs=costs, device=device, page_cache=room.page_cache
    )
    held_out = None
    if visit is not None:
        given: Any = {"costs": measured(run.plan, visit[0]), "batches": visit[1], "device": device}
        held_out = compile(plan, model, StepKind.EVALUATE, visit[0], **given)
    notes = (*settled.notes, *without_bfloat16(machine.card(device), plan, model))
    decided = (settled.names, notes, room.device_free)
    return Forecast(plan, model, programs, device, costs, held_out, *decided)


def without_bfloat16(card: Card, plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Yield a sentence where a plan computes in bfloat16 and the card has no such arithmetic: a
    T4's or an RTX 20's products and attention take their slowest ways then. Nothing is refused: the
    numbers are right."""
    if not card.bfloat16 and compute_dtype(plan, model) == "bfloat16":
        other = "float32, or float16" if plan.zeroth_order else "float32"
        yield (
            f"note: {card.name or 'this card'} has no bfloat16 arithmetic, and the plan computes in"
            f" bfloat16, slowly there: set compute_dtype: {other}"
        )


def model_spec(model: str, measured: UnitCosts) -> ModelSpec:
    """Return the model of a folder as the walk will see it, adapters included and stored as it is
    there; no weight is read."""
    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.models.model_source import model_source
    from blockwalk.tiers.block_store.store import read_index
    from blockwalk.tiers.model_folder.folder import CheckpointFolder
    from blockwalk.tiers.protocols import as_stored

    spec = measured.spec()
    files = model_source(model)
    if files.packed:
        index = read_index(model)
        stored = {p.name: p.codec for unit in index.units for p in unit.params}
        return spec.as_stored(
            lambda p: replace(p, codec=stored.get(p.name, p.codec), group_size=index.group_size)
        )
    if files.codec is None:
        return spec
    source = CheckpointFolder(files, build_skeleton(files))  # its header alone is read
    known = set(source.names())
    found = spec.as_stored(lambda p: as_stored(p, source) if p.name in known else p)
    source.close()
    return found


def _duration(seconds: float) -> str:
    """Return seconds in words: "50 s", "12 min", "3.4 h"."""
    if seconds < 7200:
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


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
    if not plan.zeroth_order:
        return (
            f"parameters over {plan.parameter_ranks}, gradients over {plan.gradient_ranks},"
            f" optimizer states over {plan.optimizer_ranks}, {mesh.ranks_per_node} to a node"
        )
    forwards = f"a step's {plan.forward_passes} forwards shared by {mesh.perturb}"
    return (
        f"the batch cut in {mesh.data}, {forwards}, streamed blocks held once by"
        f" {plan.parameter_ranks}"
    )


_TUNING: dict[type, tuple[str, float, float, float]] = {
    type(None): ("full-parameter", 1e-7, 1e-6, 1e-3),
    LoraSettings: ("LoRA", 5e-5, 1e-4, 1e-2),
    PrefixSettings: ("prefix", 1e-3, 1e-2, 1e-1),
}
"""Learning rates, lowest and highest, and ε that work in zeroth order, by what is trained."""


def zeroth_order_advice(plan: Plan, adapters: Adapters | None) -> list[str]:
    """Return advice to a user before a zeroth-order run starts; none for other estimators.

    Source: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (NeurIPS 2023),
    appendix D."""
    if not plan.zeroth_order:
        return []
    whole = isinstance(adapters, LoraSettings) and not adapters.target_modules
    (kind, low, high, epsilon), rate = (
        _TUNING[type(None if whole else adapters)],
        plan.optimizer.learning_rate,
    )
    lines = [
        "zeroth order: forward passes only, no gradients; expect thousands of steps where"
        " backpropagation takes hundreds.",
        f"recommended for {kind} tuning: optimizer.learning_rate {low:g} to {high:g} with"
        f" zo.epsilon {epsilon:g}",
    ]
    if not low / 10 <= rate <= high * 10:
        lines.append(f"note: optimizer.learning_rate is {rate:g}, far outside of that range")
    if not epsilon / 10 <= plan.zo.epsilon <= epsilon * 10:
        lines.append(f"note: zo.epsilon is {plan.zo.epsilon:g}, far from {epsilon:g}")
    return lines

"""The planner: it enumerates the plans for a model on a machine, simulates and ranks them, and says
why others were left out.

The model, its costs and the machine are values that are handed in
(:func:`blockwalk.report.advice.task` makes them of a ``config.json``); nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from blockwalk.plan.choices import AUTO
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import NOBODY
from blockwalk.plan.plan import Plan
from blockwalk.plan.tiers import TIERS
from blockwalk.program.compile import compile_ranks, resident
from blockwalk.program.costs import Costs, Pending
from blockwalk.program.program import COMPUTES, Lane, Pool, Program, Shape, StepKind, human_bytes
from blockwalk.program.resident_blocks import settled
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.simulator import Simulation, simulate
from blockwalk.system.process_memory import DIRTY_SHARE

ZEROTH_ORDER_STEPS = 44
"""Two-point steps that make the progress of one step with exact gradients, as measured:
``benchmarks/zo_converge.py``, a small Llama on sentiment, batch 16, three seeds at the best of the
learning rates that were tried. 500 steps of two-point SPSA brought the held-out loss from 0.87 to
0.47; exact gradients (AdamW) were there, by interpolation, after 11."""


@dataclass(frozen=True, slots=True)
class Task:
    """A model to be trained, and the machine to train it on."""

    model: ModelSpec
    """Its parameters say which of them are trained."""
    costs: Callable[[Plan, Shape], Costs]
    """The cost of each kind of the model's units under a plan at the shape of a micro-batch; the
    same answer each time."""
    hardware: Hardware
    shape: Shape
    """One rank's micro-batch."""
    budget: int | None = None
    """Device bytes that a step may use, where that is less than the device has."""
    micro_batches: int = 1
    """The number of them in a step, of every plan that is looked at."""

    @property
    def room(self) -> int:
        """Device bytes that a step may use."""
        return min(self.hardware.usable_bytes, self.budget or self.hardware.usable_bytes)

    @property
    def adapters(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.model.numel(trainable=False) > 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan, what it takes, and why it is left out (empty: it is not)."""

    plan: Plan
    label: str
    peaks: Counter[Pool]
    simulation: Simulation | None = None
    refused: str = ""

    @property
    def progress(self) -> float:
        """Tokens per second, those of zeroth-order steps at their measured worth."""
        if self.simulation is None:
            return 0.0
        return self.simulation.tokens_per_second / (
            ZEROTH_ORDER_STEPS if self.plan.zeroth_order else 1
        )

    def line(self) -> str:
        """Return the candidate as a row of a table."""
        held = f"{human_bytes(self.peaks[Pool.DEVICE]):>9} {human_bytes(self.peaks[Pool.HOST]):>9}"
        if self.simulation is None:
            return f"{self.label:<44} {held}  {self.refused}"
        found = self.simulation
        speed = (
            f"{found.seconds:>9.3g} s {found.tokens_per_second:>9,.0f} tok/s"
            f" {100 * found.mfu:>5.1f}%"
        )
        return f"{self.label:<44} {held} {speed}  {found.bottleneck()}"


@dataclass(frozen=True, slots=True)
class Ranking:
    """Every plan that was looked at: those that fit, best first, and the others."""

    first_order: tuple[Candidate, ...]
    zeroth_order: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    larger: Candidate | None = None
    """The fastest streamed plan of zeroth order with the micro-batches a fetch that hide its link,
    see :func:`hides_link`."""

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """Every plan that fits, by progress a second."""
        return tuple(sorted((*self.first_order, *self.zeroth_order), key=lambda c: -c.progress))

    @property
    def best(self) -> Candidate | None:
        """The plan that makes the most progress a second."""
        return next(iter(self.ranked), None)

    def lines(self, *, most: int = 10) -> Iterator[str]:
        """Yield the ranking as tables."""
        yield (
            f"{'plan':<44} {'device':>9} {'host':>9} {'step':>11} {'tokens a second':>15}"
            f" {'MFU':>6}  critical path"
        )
        for title, found in (
            ("exact gradients", self.first_order),
            ("zeroth order", self.zeroth_order),
        ):
            if found:
                yield f"-- {title}, by tokens a second"
                yield from (candidate.line() for candidate in found[:most])
        if self.zeroth_order:
            first = self.zeroth_order[0]
            yield (
                f"   a zeroth-order step is worth 1/{ZEROTH_ORDER_STEPS} of one with exact"
                " gradients (500 steps to a loss of"
            )
            yield "   0.47, against 11, in benchmarks/zo_converge.py):"
            yield f"   {first.label} is as good as {first.progress:,.0f} tok/s there"
        if self.larger is not None:
            yield (
                "-- a larger step, whose micro-batches hide the fetches"
                " (gradient_accumulation_steps)"
            )
            yield self.larger.line()
        if self.refused:
            yield "-- left out"
            yield from (candidate.line() for candidate in self.refused)


def candidates(task: Task) -> Iterator[tuple[str, Plan]]:
    """Yield every plan worth looking at: each row of the table, in the variants that its facts have
    room for, labelled by them.

    Frozen weights in 4 or 8 bits need adapters; rows that spread state need more ranks than one.
    """
    for name, row in METHODS.items():
        alone = row().trainable.group == NOBODY
        for label, settings in (_alone if alone else _over_ranks)(task, row()):
            yield (
                f"{name}{label}",
                method(name, gradient_accumulation_steps=task.micro_batches, **settings),
            )


def _alone(task: Task, row: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield variants of a row for one rank."""
    if row.frozen.codec.encoded:
        for codec in reversed(CODECS.tried("frozen")) if task.adapters else ():
            yield f", {codec}", {"frozen": f"{row.frozen.tier} × {codec}"}
            if (
                task.hardware.device != "cpu"
            ):  # a processor's host is its device: the disk's pages are read in place
                yield f", host × {codec}", {"frozen": f"host × {codec}", "activation": "host"}
    elif not row.zeroth_order:
        for recompute in ("none", "all"):
            yield f", recompute {recompute}", {"recompute": recompute}
    elif row.trainable.on_device:
        yield "", {}
    else:
        tiers = [name for name, facts in TIERS.items() if not facts.resident]
        codecs = ["raw"] if task.adapters else CODECS.tried("trainable")
        for tier, codec, prefetch in product(tiers, codecs, (1, 2)):
            placed = {"trainable": f"{tier} × {codec}", "frozen": f"{tier} × raw"}
            yield f", {tier} × {codec}, prefetch {prefetch}", {"prefetch": prefetch, **placed}


def _over_ranks(task: Task, row: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield variants of a row that spreads state: activations elsewhere, codecs where every use
    gathers what is kept, an adaptive cache, and groups of other sizes where nothing is cached
    between two of them."""
    node = task.hardware.devices_per_node
    world = task.hardware.world
    mesh = {"world": world, "ranks_per_node": node}
    if world == 1:
        return
    if row.zeroth_order:
        yield "", {"mesh": mesh}
        return
    for prefetch in (1, 2):
        yield f", prefetch {prefetch}", {"prefetch": prefetch, "mesh": mesh}
    if task.hardware.device == "cuda":
        yield ", activations on the host", {"activation": "host", "mesh": mesh}
    if row.trainable.group == row.optimizer_state.group:
        for codec in reversed(CODECS.tried("gathered")) if task.adapters else ():
            yield f", {codec}", {"frozen": f"device × {codec}", "mesh": mesh}
    elif row.cache.tier == "none":
        for few, many in _groups(node, world):
            names = {node: "node", world: "world"}
            groups = [f"group{size}={size}" for size in {few, many} - set(names)]
            inner, outer = (names.get(size, f"group{size}") for size in (few, many))
            over = dict.fromkeys(("frozen", "trainable"), f"device × raw × {inner}")
            over |= {
                "gradient": f"device × fp32 × {inner}",
                "optimizer_state": f"device × fp32 × {outer}",
            }
            yield f", over {few} and {many}", {"mesh": {**mesh, "groups": groups}, **over}
    if row.cache.tier == "host" and task.budget is not None:
        yield ", adaptive cache", {"mesh": mesh, "cache.threshold": 0.9, "budget": task.budget}


def _groups(node: int, world: int) -> Iterator[tuple[int, int]]:
    """Yield sizes of groups worth looking at, for parameters and gradients, and for optimizer
    states: a part of a node, a node or two; everything or a few nodes."""
    inner = sorted(
        {
            z
            for z in (2, node // 2, *(node << k for k in range(5)))
            if 1 < z <= world and world % z == 0
        }
    )
    for few in (z for z in inner if node % z == 0 or z % node == 0):
        for many in sorted(
            {world, *(z for z in (8 * node,) if node < z < world and world % z == 0)}
        ):
            if many % few == 0:
                yield few, many


def steady(plan: Plan, model: ModelSpec) -> Pending:
    """Return the updates that a step of a long run finds pending: the last step's where it is
    deferred, and every node slice out of date."""
    if plan.update.deferred:
        return Pending(1, flush=True)
    if plan.sharded:
        return Pending(
            dirty=frozenset(i for i, unit in enumerate(model.units) if unit.numel(trainable=True))
        )
    return Pending()


def programs_of(
    task: Task, plan: Plan, shape: Shape | None = None
) -> tuple[tuple[Program, ...], Costs]:
    """Return the training step of a plan in a long run, as the distinct programs of its ranks, and
    its costs."""
    shape = shape or task.shape
    costs = task.costs(plan, shape)
    room = task.hardware.host_bytes // DIRTY_SHARE
    pending = steady(plan, task.model)
    inputs = {
        "costs": costs,
        "pending": pending,
        "device": task.hardware.device,
        "page_cache": room,
    }
    return compile_ranks(plan, task.model, StepKind.TRAIN, shape, **inputs), costs


def look_at(task: Task, label: str, plan: Plan) -> Candidate:
    """Return one plan: simulated where it fits, with as many blocks that stay on the device as fit,
    else with the reason and what would make it fit."""
    costs = task.costs(plan, task.shape)
    on = task.hardware.device
    if plan.resident == AUTO:
        plan = settled(plan, task.model, task.shape, costs, device=on, budget=task.room)
        label += f", {plan.resident} blocks stay" if plan.resident > 0 else ""
    between = resident(plan, task.model, device=task.hardware.device)
    if refused := _too_large(task, between, plan.mesh.world):
        alone = "; weights and states alone do not fit: stream, shard, or train adapters"
        return Candidate(plan, label, between, None, refused + alone)
    # A run on an accelerator has a budget, and graphs fill what is left of it.
    bounded = on != "cpu" and plan.budget is None and not plan.sharded
    programs, costs = programs_of(task, replace(plan, budget=task.room) if bounded else plan)
    held = programs[0].peaks()
    if refused := _too_large(task, held, plan.mesh.world):
        if held[Pool.DEVICE] > task.room:
            refused += "; fewer tokens a micro-batch would fit"
            refused += ", or recompute: all" if plan.recompute == "none" else ""
        return Candidate(plan, label, held, None, refused)
    return Candidate(plan, label, held, simulate(programs, plan, task.model, task.hardware, costs))


def _seconds_a_token(candidate: Candidate) -> float:
    assert candidate.simulation is not None
    return candidate.simulation.seconds / candidate.simulation.tokens


def rank(task: Task) -> Ranking:
    """Look at every candidate and rank them by tokens a second, exact gradients and zeroth order
    apart."""
    found = [look_at(task, label, plan) for label, plan in candidates(task)]
    fits = sorted((c for c in found if c.simulation), key=_seconds_a_token)
    zeroth_order = tuple(c for c in fits if c.plan.zeroth_order)
    streamed = next((c for c in zeroth_order if c.simulation and c.simulation.program.slots), None)
    return Ranking(
        tuple(c for c in fits if not c.plan.zeroth_order),
        zeroth_order,
        tuple(c for c in found if c.simulation is None),
        None if streamed is None else hides_link(task, streamed),
    )


def hides_link(task: Task, candidate: Candidate, most: int = 16) -> Candidate | None:
    """Return a streamed plan with the fewest micro-batches whose step computes as long as it
    fetches: all of them pass through a block while it is there. None where they do so already, or
    would not with ``most`` of them: a step of so many more sequences is for its user to decide."""
    found = candidate
    steps = candidate.plan.gradient_accumulation_steps
    label = candidate.label.removesuffix(f", {candidate.plan.resident} blocks stay")
    while found.simulation is not None:
        spans = found.simulation.spans
        fetches = sum(span.seconds for span in spans if span.op.lane is Lane.FETCH)
        computes = sum(span.seconds for span in spans if span.op.lane is Lane.COMPUTE)
        if fetches <= computes:
            return None if found is candidate else found
        forwards = sum(span.seconds for span in spans if span.op.kind in COMPUTES)
        # Too few where a pass's noise is drawn once for all of them.
        steps += math.ceil((fetches - computes) * steps / forwards)
        if steps > most:
            return None
        resident = AUTO if candidate.plan.resident else 0
        plan = replace(candidate.plan, gradient_accumulation_steps=steps, resident=resident)
        found = look_at(task, f"{label}, {steps} micro-batches", plan)
    return None


def choose(task: Task, *, world: int = 1) -> Plan:
    """Return the best plan for so many ranks.

    Raises:
        ValueError: none fits; the message says why the nearest does not.
    """
    found = rank(task)
    for candidate in found.ranked:
        if candidate.plan.mesh.world == world:
            return candidate.plan
    refused = [c for c in found.refused if c.plan.mesh.world == world]
    nearest = min(refused, key=lambda c: c.peaks[Pool.DEVICE])
    raise ValueError(
        f"no method fits {task.hardware.name}; the nearest, {nearest.label}, {nearest.refused}"
    )


def largest_batch(task: Task, plan: Plan, most: int = 1 << 16) -> int:
    """Return the most sequences of a micro-batch with which a plan's step fits; 0 where not even
    one does."""

    def fits(batch: int) -> bool:
        (program, *_), _ = programs_of(task, plan, Shape(batch, task.shape.sequence))
        return not _too_large(task, program.peaks(), plan.mesh.world)

    low = 0
    high = 1
    while high <= most and fits(high):
        low = high
        high = 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _too_large(task: Task, held: Counter[Pool], ranks: int) -> str:
    """The reason why these peaks do not fit, or ""."""
    hardware = task.hardware
    device = held[Pool.DEVICE]
    host = held[Pool.HOST] * min(ranks, hardware.devices_per_node)
    if hardware.device == "cpu":
        device = device + host
        host = 0
    for what, needed, room, there in (
        (
            "on the device",
            device,
            task.room,
            min(hardware.device_bytes, task.budget or hardware.device_bytes),
        ),
        ("of host memory", host, hardware.host_room, hardware.host_bytes),
        ("of disk", held[Pool.DISK] + held[Pool.MAPPED], hardware.disk_bytes, hardware.disk_bytes),
    ):
        if needed > room:
            share = "" if room == there else f", {room / there:.2g} of it for a plan"
            return f"needs {human_bytes(needed)} {what}, which has {human_bytes(there)}{share}"
    return ""

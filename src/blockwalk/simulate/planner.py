"""The planner: it enumerates the plans for a model on a machine, simulates and ranks them, and says
why others were left out.

The model, its costs and the machine are values that are handed in
(:func:`blockwalk.report.advice.task` makes them of a ``config.json``); nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from blockwalk.plan.choices import AUTO
from blockwalk.plan.codecs import CODECS
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import NOBODY
from blockwalk.plan.plan import AUTO_TOGETHER, Plan
from blockwalk.plan.tiers import TIERS
from blockwalk.program.adaptive_cache import adapts
from blockwalk.program.compile import compile_ranks, resident
from blockwalk.program.costs import Costs, Pending
from blockwalk.program.program import COMPUTES, Lane, Pool, Program, Shape, StepKind, human_bytes
from blockwalk.program.resident_blocks import settled
from blockwalk.program.stages import cut
from blockwalk.program.visits import counts
from blockwalk.simulate.axes import PARTS_FROM as PARTS_FROM
from blockwalk.simulate.axes import label_of, plan_of
from blockwalk.simulate.bounds import Bounds
from blockwalk.simulate.candidate import ZEROTH_ORDER_STEPS
from blockwalk.simulate.candidate import Candidate as Candidate
from blockwalk.simulate.long_steps import lengthened, short_plans
from blockwalk.simulate.search import Found, explained, search, whole_choices
from blockwalk.simulate.seconds import CostModel
from blockwalk.simulate.simulator import Simulation, simulate
from blockwalk.simulate.task import Task as Task
from blockwalk.system.process_memory import DIRTY_SHARE


@dataclass(frozen=True, slots=True)
class Ranking:
    """Every plan that was looked at: those that fit, best first, and the others."""

    first_order: tuple[Candidate, ...]
    forwards_alone: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    larger: Candidate | None = None
    """The fastest streamed plan of zeroth order with the micro-batches a fetch that hide its link,
    see :func:`hides_link`."""
    found: Found = field(default_factory=Found)
    """The search over all axes of plans over ranks."""

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """Every plan that fits, by progress a second."""
        return tuple(sorted((*self.first_order, *self.forwards_alone), key=lambda c: -c.progress))

    @property
    def best(self) -> Candidate | None:
        """The plan that makes the most progress a second."""
        return next(iter(self.ranked), None)

    def lines(self, *, most: int = 10) -> Iterator[str]:
        """Yield the ranking as tables."""
        yield (f"{'plan':<46} {'device':>9} {'host':>9} {'step':>13} {'tokens a second':>15}")
        groups = {"exact gradients": self.first_order, "zeroth order": self.forwards_alone}
        for title, group in groups.items():
            if group:
                yield f"-- {title}, by tokens a second"
                yield from (candidate.line() for candidate in group[:most])
                yield group[0].bound()
        if self.forwards_alone:
            fastest = self.forwards_alone[0]
            yield (
                f"   a zeroth-order step is worth 1/{ZEROTH_ORDER_STEPS} of one with exact"
                " gradients (500 steps to a loss of"
            )
            yield "   0.47, against 11, in benchmarks/zo_converge.py):"
            yield f"   {fastest.label} is as good as {fastest.progress:,.0f} tok/s there"
        if self.larger is not None:
            yield (
                "-- a larger step, whose micro-batches hide the fetches"
                " (gradient_accumulation_steps)"
            )
            yield self.larger.line()
        if self.refused:
            yield "-- left out"
            yield from (candidate.line() for candidate in self.refused)
        if self.found.waiting:
            yield (
                f"   and {len(self.found.waiting):,} plans over ranks, by the least that they need"
                " (--explain)"
            )

    def explanation(self) -> Iterator[str]:
        """Yield the fastest step with each value of each axis of plans over ranks, and why values
        fell out."""
        yield from explained(self.found)


def candidates(task: Task) -> Iterator[tuple[str, Plan]]:
    """Yield every plan worth looking at: each row of the table, in the variants that its facts have
    room for, labelled by them. Over ranks these are all values of all axes that fit by their bound.

    Frozen weights in 4 or 8 bits need adapters; rows that spread state need more ranks than one.
    """
    yield from _beside_search(task)
    for _, choice in whole_choices(task, Bounds(task), {}):
        yield label_of(choice), plan_of(task, choice)


def _beside_search(task: Task) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of one rank, and those of zeroth order over ranks."""
    for name, row in METHODS.items():
        plan = row()
        steps: dict[str, Any] = {"gradient_accumulation_steps": task.micro_batches}
        if task.micro_batches > 1 and plan.estimator.facts.walks_back:
            steps["together"] = AUTO_TOGETHER
        if plan.trainable.group == NOBODY:
            for label, settings in _on_one_rank(task, plan):
                yield f"{name}{label}", method(name, **{**steps, **settings})
        elif plan.estimator.facts.shares_forwards and task.hardware.world > 1:
            mesh = {
                "world": task.hardware.world,
                "ranks_per_node": task.hardware.devices_per_node,
            }
            yield name, method(name, mesh=mesh, **steps)


def _on_one_rank(task: Task, row: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield variants of a row for one rank."""
    if row.frozen.codec.encoded:
        tier = row.frozen.tier
        # A processor's host is its device: the disk's pages are read in place.
        faster = tier.facts.begins_from if task.hardware.device != "cpu" else ""
        for codec in reversed(CODECS.tried("frozen")) if task.adapters else ():
            yield f", {codec}", {"frozen": f"{tier} × {codec}"}
            if faster:
                placed = {"frozen": f"{faster} × {codec}", "activation": faster}
                yield f", {faster} × {codec}", placed
    elif row.estimator.facts.walks_back:
        for recompute in ("none", "all"):
            yield f", recompute {recompute}", {"recompute": recompute}
    elif row.trainable.tier.facts.resident:
        yield "", {}
    else:
        tiers = [name for name, facts in TIERS.items() if not facts.resident]
        codecs = ["raw"] if task.adapters else CODECS.tried("trainable")
        for place, codec, prefetch in product(tiers, codecs, (1, 2)):
            placed = {"trainable": f"{place} × {codec}", "frozen": f"{place} × raw"}
            yield f", {place} × {codec}, prefetch {prefetch}", {"prefetch": prefetch, **placed}


def steady(plan: Plan, model: ModelSpec) -> Pending:
    """Return the updates that a step of a long run finds pending: the last step's where it is
    deferred, and where node slices may stay on the device every one of these out of date."""
    if plan.update.deferred:
        return Pending(1, flush=True)
    if not adapts(plan):
        return Pending()
    trained = (u for u, unit in enumerate(model.units) if unit.numel(trainable=True))
    return Pending(dirty=frozenset(trained))


def programs_of(
    task: Task, plan: Plan, shape: Shape | None = None
) -> tuple[tuple[Program, ...], Costs]:
    """Return the training step of a plan in a long run, as the distinct programs of its ranks, and
    its costs. ``shape``: of whole sequences, the task's unless given."""
    shape = (shape or task.shape).part(plan.mesh.context)
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
    else with the reason and what would make it fit. Where ``together`` is auto the answer is of the
    number that makes it fastest."""
    if plan.together == AUTO_TOGETHER:
        every = [_of_together(task, label, plan, count) for count in (*counts(plan), 1)]
        return min(every, key=lambda c: (_seconds_a_token(c), c.peaks[Pool.DEVICE]))
    shape = task.shape.part(plan.mesh.context)
    costs = task.costs(plan, shape)
    device = task.hardware.device
    priced = CostModel(plan, task.model, task.hardware, costs)
    plan = cut(plan, task.model, costs, priced.work_seconds)
    if plan.resident == AUTO:
        plan = settled(plan, task.model, shape, costs, device=device, budget=task.room)
        label += f", {plan.resident} blocks stay" if plan.resident > 0 else ""
    peaks = resident(plan, task.model, device=device)
    if refused := _too_large(task, peaks, plan.mesh.world):
        refused += "; weights and states alone do not fit: stream, shard, or train adapters"
        return Candidate(plan, label, peaks, None, refused)
    # A run on an accelerator has a budget, and graphs fill what is left of it.
    bounded = device != "cpu" and plan.budget is None
    full = replace(plan, budget=task.room) if bounded else plan
    short = short_plans(full) if plan.home.gathered else None
    programs, costs = programs_of(task, short[1] if short else full)
    peaks = programs[0].peaks()
    for of_stage in programs[1:] if plan.mesh.pipeline > 1 else ():
        peaks |= of_stage.peaks()
    if refused := _too_large(task, peaks, plan.mesh.world):
        if peaks[Pool.DEVICE] > task.room:
            refused += "; fewer tokens a micro-batch would fit"
            refused += ", or recompute: all" if plan.recompute == "none" else ""
        return Candidate(plan, label, peaks, None, refused)

    def played(of_ranks: tuple[Program, ...], of_plan: Plan) -> Simulation:
        return simulate(of_ranks, of_plan, task.model, task.hardware, costs)

    if short is None:
        return Candidate(plan, label, peaks, played(programs, plan))
    first, second = short
    shorter, _ = programs_of(task, first)
    simulation = lengthened(full, played(shorter, first), played(programs, second))
    return Candidate(plan, label, peaks, simulation)


AHEAD = (2, 4)
"""Numbers of blocks that are tried to be gathered ahead where a step waits for gathers."""

WAITS = 0.02
"""The share of a step's seconds from which on it waits for gathers."""


def _look_over_ranks(task: Task, label: str, plan: Plan) -> Candidate:
    """Return a plan over ranks with as many blocks gathered ahead as make it faster and the bytes
    that are left hold; none ahead where one does not fit."""
    best = look_at(task, label, plan)
    if best.simulation is None:
        lean = look_at(task, f"{label}, prefetch 0", replace(plan, prefetch=0))
        return lean if lean.simulation else best
    for prefetch in AHEAD:
        critical = best.simulation.critical if best.simulation else {}
        gathers = sum(seconds for words, seconds in critical.items() if ": gather" in words)
        if gathers < WAITS * sum(critical.values()):
            break
        ahead = look_at(task, f"{label}, prefetch {prefetch}", replace(plan, prefetch=prefetch))
        if ahead.a_token >= best.a_token:
            break
        best = ahead
    return best


def _of_together(task: Task, label: str, plan: Plan, count: int) -> Candidate:
    """Return a plan in which so many micro-batches visit a block together."""
    candidate = look_at(task, label, replace(plan, together=count))
    if count == 1:
        return candidate
    return replace(candidate, label=f"{candidate.label}, {count} micro-batches together")


def _seconds_a_token(candidate: Candidate) -> tuple[float, float]:
    """Return a step's seconds a token, then those of all of its lanes: of plans that wait for the
    host alike, the one that moves and computes least comes first."""
    simulation = candidate.simulation
    if simulation is None:
        return math.inf, math.inf
    of_lanes = sum(span.seconds for span in simulation.spans)
    return simulation.seconds / simulation.tokens, of_lanes / simulation.tokens


def rank(task: Task) -> Ranking:
    """Look at every candidate that may be among the best, and rank them by tokens a second, exact
    gradients and zeroth order apart."""
    looked_at = [look_at(task, label, plan) for label, plan in _beside_search(task)]
    found = search(task, partial(_look_over_ranks, task))
    fits = sorted(
        (c for c in (*looked_at, *found.best, *found.variants) if c.simulation),
        key=_seconds_a_token,
    )
    first_order = tuple(c for c in fits if c.plan.estimator.facts.walks_back)
    forwards_alone = tuple(c for c in fits if not c.plan.estimator.facts.walks_back)
    streamed = (c for c in forwards_alone if c.simulation and c.simulation.program.slots)
    fastest = next(streamed, None)
    return Ranking(
        first_order,
        forwards_alone,
        (*(c for c in looked_at if c.simulation is None), *found.refused),
        hides_link(task, fastest) if fastest else None,
        found,
    )


def hides_link(task: Task, candidate: Candidate, most: int = 16) -> Candidate | None:
    """Return a streamed plan with the fewest micro-batches whose step computes as long as it
    fetches: all of them pass through a block while it is there. None where they do so already, or
    would not with ``most`` of them: a step of so many more sequences is for its user to decide."""
    larger = candidate
    steps = candidate.plan.gradient_accumulation_steps
    label = candidate.label.removesuffix(f", {candidate.plan.resident} blocks stay")
    while larger.simulation is not None:
        spans = larger.simulation.spans
        fetches = sum(span.seconds for span in spans if span.op.lane is Lane.FETCH)
        computes = sum(span.seconds for span in spans if span.op.lane is Lane.COMPUTE)
        if fetches <= computes:
            return None if larger is candidate else larger
        forwards = sum(span.seconds for span in spans if span.op.kind in COMPUTES)
        # Too few where a pass's noise is drawn once for all of them.
        steps += math.ceil((fetches - computes) * steps / forwards)
        if steps > most:
            return None
        resident = AUTO if candidate.plan.resident else 0
        plan = replace(candidate.plan, gradient_accumulation_steps=steps, resident=resident)
        larger = look_at(task, f"{label}, {steps} micro-batches", plan)
    return None


def choose(task: Task, *, world: int = 1) -> Plan:
    """Return the best plan for so many ranks.

    Raises:
        ValueError: none fits; the message says why the nearest does not.
    """
    ranking = rank(task)
    for candidate in ranking.ranked:
        if candidate.plan.mesh.world == world:
            return candidate.plan
    refused = [c for c in ranking.refused if c.plan.mesh.world == world]
    if not refused:
        raise ValueError(
            f"no method fits {task.hardware.name}: over {world} ranks the leanest needs at least"
            f" {human_bytes(int(ranking.found.leanest))} on each device, of which a plan may use"
            f" {human_bytes(task.room)}"
        )
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

    return largest_fitting(fits, most)


def largest_fitting(fits: Callable[[int], bool], most: int = 1 << 16) -> int:
    """Return the largest batch that fits, to one part in 64 of it; 0 where not even one does."""
    fitting = 0
    batch = 1
    while batch <= most and fits(batch):
        fitting = batch
        batch *= 2
    too_large = batch
    while too_large - fitting > max(1, fitting // 64):
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return fitting


def _too_large(task: Task, peaks: Counter[Pool], ranks: int) -> str:
    """Return the reason why these peaks do not fit, or ""."""
    hardware = task.hardware
    device = peaks[Pool.DEVICE]
    host = peaks[Pool.HOST] * min(ranks, hardware.devices_per_node)
    if hardware.device == "cpu":
        device = device + host
        host = 0
    device_bytes = min(hardware.device_bytes, task.budget or hardware.device_bytes)
    disk = peaks[Pool.DISK] + peaks[Pool.MAPPED]
    for place, needed, room, capacity in (
        ("on the device", device, task.room, device_bytes),
        ("of host memory", host, hardware.host_room, hardware.host_bytes),
        ("of disk", disk, hardware.disk_bytes, hardware.disk_bytes),
    ):
        if needed > room:
            share = "" if room == capacity else f", {room / capacity:.2g} of it for a plan"
            return f"needs {human_bytes(needed)} {place}, which has {human_bytes(capacity)}{share}"
    return ""

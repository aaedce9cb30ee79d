"""The simulator, which runs a program on paper: seconds, peak bytes of every pool, bytes on every
lane, and what the time was spent on.

On an accelerator the host is a lane too, though no op of the program is on it: it starts what each
op computes, in the program's order, and waits for nobody. An op begins when the host has queued it.

Lanes are first-in, first-out, and an op starts when the op before it on its lane and all that it
waits for are done: the rules of :mod:`blockwalk.walk.lanes`. Of two ops between nodes, which may be
on their way at once there, the later one has the link after the earlier one here. Seconds are those
of :mod:`blockwalk.simulate.seconds`. Ranks with one program do the same at the same time, and one
stands for all; those with another are simulated beside it, and a collective begins when the slowest
has come.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from blockwalk.plan.mesh import ENDS, PIPELINE
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.costs import Costs
from blockwalk.program.program import Lane, Op, OpKind, Pool, Program
from blockwalk.simulate.hardware import Hardware
from blockwalk.simulate.seconds import NO_COSTS, STAGES, CostModel


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one op, in seconds from the step's start."""

    op: Op
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Simulation:
    """The time and memory of one step on one kind of hardware."""

    program: Program
    spans: tuple[Span, ...]
    seconds: float
    tokens: int
    """Tokens of one step, over all ranks."""
    peaks: Counter[Pool]
    """Bytes of one rank."""
    bytes_by_lane: dict[Lane, int]
    """Bytes of one rank."""
    bytes_by_axis: dict[str, int]
    """Bytes that one rank sends over each axis of the mesh."""
    useful_flops: float
    """FLOPs of one rank, recomputation not counted."""
    peak_flops: float
    critical: dict[str, float]
    """Seconds on the critical path, by what they were spent on, longest first."""
    host: tuple[Span, ...] = ()
    """The times in which the host starts each op, on an accelerator."""

    def host_times(self) -> list[tuple[Op, float, float]]:
        """Return the ops that the host starts, with the times of its work for them."""
        return [(span.op, span.began, span.ended) for span in self.host]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.inf

    @property
    def mfu(self) -> float:
        """Useful FLOP/s as a fraction of the device's promised ones."""
        return self.useful_flops / (self.seconds * self.peak_flops) if self.seconds else 0.0

    def bottleneck(self) -> str:
        """Return the greatest part of the critical path, in words: ``"78% waiting for the network:
        gather of frozen parameters"``."""
        if not self.critical or not self.seconds:
            return "nothing takes time"
        words, seconds = next(iter(self.critical.items()))
        return f"{100 * seconds / self.seconds:.0f}% {words}"


def simulate(
    programs: Sequence[Program],
    plan: Plan,
    model: ModelSpec,
    hardware: Hardware,
    costs: Costs = NO_COSTS,
) -> Simulation:
    """Run a step on paper.

    Args:
        programs: the distinct ones of the ranks (:func:`blockwalk.program.compile.compile_ranks`),
            compiled with ``costs``, for ``hardware.device``. The answer is of the first; peaks are
            the highest of any.
        plan, model: what they were compiled from.
        hardware: the machine.
        costs: what its units do while they compute; the FLOPs of recomputation do not count as
            useful.
    """
    programs = tuple(map(steady, programs))
    program, *_ = programs
    model_of = CostModel(plan, model, hardware, costs, program)
    queued = [queue_times(of_rank, model_of.host_seconds) for of_rank in programs]
    spans = schedule(programs, model_of.seconds, queued)
    recomputed = sum(
        costs.of(model.units[op.unit].kind).again.flops
        for op in program.ops
        if op.kind is OpKind.BACKWARD and not op.keep_graph
    )
    highest: Counter[Pool] = Counter()
    for of_rank, times in zip(programs, spans, strict=True):
        highest |= Counter(peaks(of_rank, times))
    return Simulation(
        program=program,
        spans=spans[0],
        seconds=max((span.ended for times in spans for span in times), default=0.0),
        tokens=program.shape.tokens * plan.mesh.context * plan.cuts,
        peaks=highest,
        bytes_by_lane=program.bytes_by_lane(),
        bytes_by_axis=program.bytes_by_axis(plan.mesh),
        useful_flops=sum(op.flops for op in program.ops) - recomputed,
        peak_flops=hardware.peak_of(model_of.dtype),
        critical=critical_path(programs, spans, lambda op: _words(op, model_of), queued),
        host=tuple(span for span in queued[0] if span.seconds),
    )


def steady(program: Program) -> Program:
    """Return a step as it is in a long run. What it refreshes last, for the step behind, the step
    before has refreshed for it: by ops at its beginning, which those that read the slices wait
    for."""
    last_reads = {
        op.unit: op.index for op in program.ops if op.part is StateKind.TRAINABLE and op.slot >= 0
    }
    behind = {
        op.index for op in program.ops if op.refreshes and op.index > last_reads.get(op.unit, -1)
    }
    order = sorted(program.ops, key=lambda op: op.index not in behind)
    places = {op.index: place for place, op in enumerate(order)}
    refreshed = {program.ops[index].unit: places[index] for index in sorted(behind)}
    ops = []
    for op in order:
        waits = {places[dep] for dep in op.deps if op.index not in behind or dep in behind}
        if op.index not in behind and op.part is StateKind.TRAINABLE and op.unit in refreshed:
            waits.add(refreshed[op.unit])
        ops.append(replace(op, index=places[op.index], deps=tuple(sorted(waits))))
    return replace(program, ops=tuple(ops), _peaks=Counter()) if behind else program


Spans = tuple[tuple[Span, ...], ...]
"""The times of every op of every rank."""
Place = tuple[int, int]
"""An op by the number of its rank's program and its own."""


def together(programs: Sequence[Program]) -> dict[Place, list[Place]]:
    """Return the ops that are one. What a stage sends is what its neighbour receives. A collective
    is the n-th of its kind, unit, part and axes on every rank of a stage that has it, or of all
    stages. Ranks of other groups, which would not wait for each other, are taken as one group: no
    step is faster for it, and none slower than its slowest rank."""
    met: dict[tuple[object, ...], list[Place]] = {}
    for rank, program in enumerate(programs):
        seen: Counter[tuple[object, ...]] = Counter()
        for op in program.ops:
            if op.kind in (OpKind.SEND, OpKind.RECV):
                value = (op.unit, op.part, op.micro_batch)
                met.setdefault(value, []).append((rank, op.index))
            elif op.axes:
                stage = -1 if {PIPELINE, ENDS}.intersection(op.axes) else program.stage
                collective = (op.kind, op.unit, op.part, op.axes, stage)
                seen[collective] += 1
                met.setdefault((*collective, seen[collective]), []).append((rank, op.index))
    return {member: members for members in met.values() for member in members}


def queue_times(program: Program, seconds_of: Callable[[Op], float]) -> tuple[Span, ...]:
    """Return the times in which the host starts the ops of a program, one after the other, given
    the seconds that each takes it."""
    spans = []
    free = 0.0
    for op in program.ops:
        spans.append(Span(op, free, free + seconds_of(op)))
        free = spans[-1].ended
    return tuple(spans)


def schedule(
    programs: Sequence[Program],
    seconds_of: Callable[[Op], float],
    queued: Sequence[tuple[Span, ...]] = (),
) -> Spans:
    """Return the times at which each op begins and ends, given the seconds that it takes, and of
    each program the times in which the host queues its ops. An op of
    several ranks begins on all of them when the last has come. Lanes that share a link take turns,
    an op at a time, and who came first goes first: what a link with one queue does, and no later at
    the end of the queue than one that halves its bandwidth."""
    meets = together(programs)
    begins = order(programs)
    ready = Counter[Place]()
    followers = defaultdict[Place, list[Place]](list)
    waits = Counter[Place]()
    for place, earlier in begins.items():
        leader = meets.get(place, [place])[0]
        waits[leader] += len(earlier)
        for wait in earlier:
            followers[wait].append(leader)
    leaders = (meets.get(place, [place])[0] for place in begins)
    queue = [(0.0, place) for place in dict.fromkeys(leaders) if not waits[place]]
    free: Counter[tuple[int, Lane]] = Counter()
    spans: dict[Place, Span] = {}
    while queue:
        came, place = heappop(queue)
        members = [(rank, programs[rank].ops[index]) for rank, index in meets.get(place, [place])]
        links = (free[rank, op.lane.link] for rank, op in members if op.nbytes)
        began = max([came, *links, _queued_by(queued, members)])
        for rank, op in members:
            ended = began + seconds_of(op)
            spans[rank, op.index] = Span(op, began, ended)
            if op.nbytes:
                free[rank, op.lane.link] = ended  # type: ignore[assignment]
            for follower in followers[rank, op.index]:
                ready[follower] = max(ready[follower], ended)  # type: ignore[assignment]
                waits[follower] -= 1
                if not waits[follower]:
                    heappush(queue, (ready[follower], follower))
    waiting = [
        rank
        for rank, program in enumerate(programs)
        if any((rank, op.index) not in spans for op in program.ops)
    ]
    assert not waiting, f"the programs of ranks {waiting} wait for each other"
    return tuple(
        tuple(spans[rank, op.index] for op in program.ops) for rank, program in enumerate(programs)
    )


def _queued_by(queued: Sequence[tuple[Span, ...]], members: Iterable[tuple[int, Op]]) -> float:
    """Return the time at which the hosts of all ranks have queued an op; 0 where none starts it."""
    latest = 0.0
    if queued:  # a planner asks millions of times
        for rank, op in members:
            span = queued[rank][op.index]
            if span.ended > span.began and span.ended > latest:
                latest = span.ended
    return latest


def order(programs: Sequence[Program]) -> dict[Place, list[Place]]:
    """Return the ops that each waits for: those that it names, and the one before it on its
    lane."""
    waits = [
        (rank, op, earlier)
        for rank, program in enumerate(programs)
        for op, earlier in program.waits()
    ]
    return {(rank, op.index): [(rank, index) for index in earlier] for rank, op, earlier in waits}


def peaks(program: Program, spans: tuple[Span, ...]) -> dict[Pool, int]:
    """Return peak bytes of each pool; of ops at one instant the earlier of the program ends before
    the next begins."""
    events = sorted(
        (seconds, span.op.index, is_end)
        for span in spans
        for is_end, seconds in enumerate((span.began, span.ended))
    )
    current = Counter(dict(program.static))
    peak = Counter(current)
    for _, index, is_end in events:
        op = program.ops[index]
        for pool, nbytes in op.frees if is_end else op.takes:
            current[pool] += -nbytes if is_end else nbytes
            peak[pool] = max(peak[pool], current[pool])
        current[Pool.DEVICE] += -op.transient if is_end else op.transient
        peak[Pool.DEVICE] = max(peak[Pool.DEVICE], current[Pool.DEVICE])
    return {Pool(pool): int(nbytes) for pool, nbytes in peak.items()}


def critical_path(
    programs: Sequence[Program],
    spans: Spans,
    words: Callable[[Op], str],
    queued: Sequence[tuple[Span, ...]] = (),
) -> dict[str, float]:
    """Return seconds of the chain of ops that the step's end waited for, by what they do, longest
    first; it goes from rank to rank where they met. Where an op waited for the host, all seconds
    before it are the host's, which waits for nobody."""

    def ended(place: Place) -> float:
        return spans[place[0]][place[1]].ended

    meets = together(programs)
    waits = order(programs)
    for rank, times in enumerate(spans):
        users: dict[Lane, int] = {}  # the op that had each link last
        for span in sorted(times, key=lambda span: (span.began, span.ended)):
            if span.op.nbytes:
                link = span.op.lane.link
                index = span.op.index
                waits[rank, index] += [(rank, users[link])] if link in users else []
                users[link] = index
    total: Counter[str] = Counter()
    place = max(waits, key=ended, default=None)
    while place is not None:
        span = spans[place[0]][place[1]]
        if span.seconds:
            total[words(span.op)] += span.seconds  # type: ignore[assignment]
        members = meets.get(place, [place])
        host = _queued_by(queued, [(rank, programs[rank].ops[index]) for rank, index in members])
        earlier = (wait for member in members for wait in waits[member])
        place = max(earlier, key=ended, default=None)
        if host > (0.0 if place is None else ended(place)):
            total[STARTING] += host  # type: ignore[assignment]
            place = None
    return dict(total.most_common())


STARTING = "starting operations on the host"
"""The words for the time in which an accelerator waits for the host."""

_STATE = {
    StateKind.FROZEN: "frozen parameters",
    StateKind.TRAINABLE: "trainable parameters",
    StateKind.GRADIENT: "gradients",
    StateKind.ACTIVATION: "activation checkpoints",
    None: "state",
}


def _words(op: Op, model_of: CostModel) -> str:
    if op.lane is Lane.COMPUTE or op.kind is OpKind.UPDATE:
        return op.kind.facts.doing
    noun = op.kind.facts.noun or op.kind.lower()
    state = "graphs" if op.of_graph else _STATE.get(op.part, "state")
    return f"waiting for {_link(op, model_of)}: {noun} of {state}"


def _link(op: Op, model_of: CostModel) -> str:
    """Return the words for the slowest link that an op's bytes cross."""
    if op.lane in STAGES:
        return "the neighbouring stage"
    if op.lane.link is Lane.INTER:
        return "the network"
    if op.lane is Lane.INTRA:
        return "the node's own link"
    return "the " + (model_of.link_of(op) or "host's link")

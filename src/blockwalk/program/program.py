"""A program: the ops of one kind of step, in order, with lane, bytes, memory and dependencies.
Data, not behaviour.

Lanes are first-in, first-out; an op starts when the op before it on its lane and all its
dependencies are done. Between nodes the next op may start before the one before it is done
(:attr:`Lane.at_once`), and ends after it. The executors
(:class:`blockwalk.walk.walker.Walker` and the simulator) run this list and decide nothing. The
rules that hold for every program are in :mod:`blockwalk.program.invariants`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.mesh import ENDS, PIPELINE, make_axes, named, share_by_axis, work_axes
from blockwalk.plan.placement import StateKind
from blockwalk.plan.row_order import part_tokens
from blockwalk.program.op_kinds import OpKind as OpKind

COMPUTES = (OpKind.PROLOGUE, OpKind.FORWARD, OpKind.LOSS, OpKind.BACKWARD, OpKind.PROLOGUE_BACKWARD)
"""The kinds of op that compute with a unit's parameters, for one micro-batch in one forward
pass."""

_IN_BUFFERS = (OpKind.LOSS, OpKind.BACKWARD, OpKind.PROLOGUE_BACKWARD, OpKind.REDUCE)
"""The kinds of op whose slot is a gradient buffer."""


class Lane(StrEnum):
    """A queue of work: a CUDA stream or a thread."""

    COMPUTE = "compute"
    FETCH = "fetch"
    STORE = "store"
    INTRA = "intra-node"
    INTER = "inter-node"
    INTER_SUMS = "inter-sums"
    """Reductions between nodes, where gathers have the other lane to themselves; they share its
    link."""
    SEND = "send"
    RECEIVE = "recv"
    """Hidden states to the next stage, and from the one before."""
    SEND_BACK = "send-back"
    RECEIVE_BACK = "recv-back"
    """Their gradients to the stage before, and from the next one. Each has a lane of its own, so
    that no stage waits to send while another waits to be sent to."""
    UPDATE = "update"
    """Updates by the processor behind an accelerator, and new masters on their way back, by the
    link of fetches."""

    @property
    def link(self) -> Lane:
        """The lane that a link is named for: this one, or the one that it shares its link with."""
        return {Lane.INTER_SUMS: Lane.INTER, Lane.UPDATE: Lane.FETCH}.get(self, self)

    @property
    def at_once(self) -> int:
        """The ops that may be on their way. Between nodes the next one begins before the one before
        it has ended, so that the link has something to send all the time."""
        return 2 if self.link is Lane.INTER else 1


class Pool(StrEnum):
    """A memory whose use a program accounts for."""

    DEVICE = "device"
    HOST = "host"
    MAPPED = "mapped"
    """File-backed pages: in memory while there is room for them, never charged as anonymous
    memory."""
    DISK = "disk"


class StepKind(StrEnum):
    """The kinds of step that a plan is compiled for."""

    TRAIN = "train"
    GRADIENTS = "gradients"
    EVALUATE = "evaluate"
    FLUSH = "flush"

    @property
    def trains(self) -> bool:
        """True where losses are turned into a direction, whether it is used or not."""
        return self in (StepKind.TRAIN, StepKind.GRADIENTS)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape bucket of one micro-batch: sequences × tokens."""

    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def part(self, count: int) -> Shape:
        """Return the shape of one of so many equal parts of the sequences."""
        return Shape(self.batch, part_tokens(self.sequence, count)) if count > 1 else self


Bytes = tuple[tuple[Pool, int], ...]
"""Memory taken or given back, pool by pool."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The bytes that a rank sends over one axis of the mesh while an op runs."""

    axis: str
    lane: Lane
    """The lane whose link they cross."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One action of a program."""

    index: int
    kind: OpKind
    unit: int
    """0 is the prologue, 1 to L the blocks, L + 1 the epilogue."""
    lane: Lane
    deps: tuple[int, ...] = ()
    part: StateKind | None = None
    """The kind of state that it moves or changes. What a graph holds is none: a SAVE or LOAD of it
    has no part."""
    nbytes: int = 0
    """Bytes that cross the lane's link."""
    flops: int = 0
    micro_batch: int = 0
    passes: range = range(1)
    """The forwards of a zeroth-order step that it computes as one batch: one for each perturbed
    copy of the weights."""
    slot: int = -1
    """The place that it fills, reads or empties: a slot of parameters, the place in host memory
    that gradients come to, or the gradient buffer of a backward op or a REDUCE. -1: none."""
    axes: tuple[str, ...] = ()
    """The axes of the mesh that it is a collective over, innermost first: a GATHER's slices come
    from there, a REDUCE's sums go there, and every rank's scalars are exchanged."""
    sent: tuple[Sent, ...] = ()
    """Bytes that blocks exchange over these axes while it computes, beside ``nbytes``."""
    device_slice: bool = False
    """True where the node slice that the adaptive cache keeps on the device is written (CACHE),
    read (GATHER) or freed (EVICT)."""
    entries: int = 0
    """Entries of the ledger that an UPDATE or a REPLAY applies."""
    keep_graph: bool = False
    """True for a FORWARD whose activations stay for its BACKWARD, and for a BACKWARD that need not
    recompute."""
    last: bool = False
    """The last of its micro-batches: gradients are complete after it."""
    takes: Bytes = ()
    """Memory claimed when it starts."""
    frees: Bytes = ()
    """Memory given back when it ends."""
    transient: int = 0
    """Device bytes held only while it runs."""

    @property
    def forward_pass(self) -> int:
        """The number of the first of its passes."""
        return self.passes.start

    @property
    def buffer(self) -> int:
        """The gradient buffer that a backward op fills and a REDUCE empties; -1 for others."""
        return self.slot if self.kind in _IN_BUFFERS else -1

    @property
    def of_graph(self) -> bool:
        """True for a SAVE or LOAD of what a block's graph holds in file maps, in place of its
        input."""
        return self.kind in (OpKind.SAVE, OpKind.LOAD) and self.part is None

    @property
    def refreshes(self) -> bool:
        """Whether it brings a unit's node slice up to date where it lies. It may run on when its
        program has ended: those who read the slice wait for it."""
        return self.kind is OpKind.GATHER and self.part is StateKind.TRAINABLE and self.slot < 0


@dataclass(slots=True)
class Draft:
    """Ops that are being written, numbered from ``start``."""

    start: int = 0
    ops: list[Op] = field(default_factory=list)

    def op(
        self, kind: OpKind, unit: int, lane: Lane, deps: Iterable[int] = (), **details: Any
    ) -> int:
        """Write an op, and return its number."""
        index = self.start + len(self.ops)
        self.ops.append(Op(index, kind, unit, lane, tuple(sorted(set(deps))), **details))
        return index


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of one kind of step, and the memory that is held before, during and after it."""

    title: str
    step_kind: StepKind
    shape: Shape
    unit_names: tuple[str, ...]
    streamed: frozenset[int]
    """Units whose parameters are fetched when their turn comes; the others are resident."""
    written: frozenset[int]
    """Units whose trainables live on a tier: once updated they must be stored."""
    ops: tuple[Op, ...]
    static: Bytes = ()
    slots: int = 0
    slot_bytes: int = 0
    stage: int = 0
    """The number of the stage that runs it; collectives over state are a stage's own."""
    absent: frozenset[int] = frozenset()
    """Units that other stages hold."""
    dirty: frozenset[int] = frozenset()
    """Sharded over ranks: units whose node slices are out of date when the program has run."""
    _peaks: Counter[Pool] = field(default_factory=Counter, compare=False, repr=False)

    def bytes_by_lane(
        self,
        graphs: Mapping[tuple[int, int], int] | None = None,
        exchanged: Iterable[Sent] | None = None,
    ) -> dict[Lane, int]:
        """Return bytes that cross the link of each lane in one run.

        Args:
            graphs: bytes that each block's graph wrote to file maps, by unit and micro-batch, in
                place of those foreseen: a program that was compiled without costs foresees none.
            exchanged: what blocks sent while they computed, likewise.
        """
        total: Counter[Lane] = Counter()
        for op in self.ops:
            nbytes = op.nbytes
            if graphs is not None and op.of_graph:
                nbytes = graphs[op.unit, op.micro_batch]
            if nbytes:
                total[op.lane.link] += nbytes
        for sent in self._exchanged(exchanged):
            total[sent.lane.link] += sent.nbytes
        return {lane: nbytes for lane, nbytes in total.items() if nbytes}

    def bytes_by_axis(
        self, mesh: MeshSettings, exchanged: Iterable[Sent] | None = None
    ) -> dict[str, int]:
        """Return bytes that a rank sends over each axis of a mesh in one run; ``exchanged`` as in
        :meth:`bytes_by_lane`."""
        moved: Counter[tuple[str, ...]] = Counter()
        for op in self.ops:
            if op.kind is OpKind.SEND or op.axes == (ENDS,):
                moved[PIPELINE,] += op.nbytes
            elif op.axes and op.nbytes:
                moved[op.axes] += op.nbytes
        total = Counter({PIPELINE: moved.pop((PIPELINE,), 0)})
        axes = (*work_axes(mesh), *make_axes(mesh))
        for names, nbytes in moved.items():
            for axis, share in share_by_axis(named(axes, names)).items():
                total[axis] += round(share * nbytes)
        for sent in self._exchanged(exchanged):
            total[sent.axis] += sent.nbytes
        return {axis: nbytes for axis, nbytes in total.items() if nbytes}

    def _exchanged(self, measured: Iterable[Sent] | None) -> Iterable[Sent]:
        """Return what blocks send while they compute: as measured, where that is known."""
        if measured is not None:
            return measured
        return [sent for op in self.ops for sent in op.sent]

    def peaks(self) -> Counter[Pool]:
        """Return peak bytes of each pool (0 of one that is not used) if every op started as early
        as its place in the list: an upper bound of any run."""
        if not self._peaks:
            peak = Counter(dict(self.static))
            for op, pools in self._holding():
                for pool, nbytes in pools.items():
                    transient = op.transient if pool is Pool.DEVICE else 0
                    peak[pool] = max(peak[pool], nbytes + transient)
            self._peaks.update({Pool(pool): int(nbytes) for pool, nbytes in peak.items()})
        return Counter(self._peaks)

    def device_bytes(self) -> list[int]:
        """Return bytes held on the device while each op runs, transients included, under the
        assumption of :meth:`peaks`."""
        return [pools[Pool.DEVICE] + op.transient for op, pools in self._holding()]

    def _holding(self) -> Iterator[tuple[Op, Counter[Pool]]]:
        """Yield each op, and the bytes that are held while it runs, without its transients."""
        pools = Counter(dict(self.static))
        for op in self.ops:
            for pool, nbytes in op.takes:
                pools[pool] += nbytes
            yield op, pools
            for pool, nbytes in op.frees:
                pools[pool] -= nbytes

    def waits(self) -> Iterator[tuple[Op, tuple[int, ...]]]:
        """Yield each op, and those that it waits for: its own, and the one before it on its
        lane."""
        previous: dict[Lane, int] = {}
        for op in self.ops:
            yield op, (*op.deps, *([previous[op.lane]] if op.lane in previous else []))
            previous[op.lane] = op.index

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the schedule as a table, one op a line."""
        yield (
            f"{self.title}: {self.step_kind}, {self.shape.batch} × {self.shape.sequence} tokens,"
            f" {len(self.ops)} ops"
        )
        elsewhere = self.streamed | self.absent
        resident = [name for u, name in enumerate(self.unit_names) if u not in elsewhere]
        if self.streamed and resident:
            yield f"stay on the device: {', '.join(resident)}"
        yield f"{'#':>5}  {'lane':<10} {'op':<18} {'unit':<12} {'detail':<30} {'bytes':>10}  after"
        for op in self.ops:
            deps = ",".join(str(dep) for dep in op.deps)
            nbytes = op.nbytes or sum(sent.nbytes for sent in op.sent)
            size = human_bytes(nbytes) if nbytes else ""
            name = self.unit_names[op.unit]
            yield (
                f"{op.index:>5}  {op.lane:<10} {op.kind:<18} {name:<12} {_detail(op):<30}"
                f" {size:>10}  {deps}"
            ).rstrip()


_BESIDE = (OpKind.SAVE, OpKind.LOAD, OpKind.ARGUMENTS, OpKind.SEND, OpKind.RECV)
"""Kinds of op that do not compute with parameters, and are of one micro-batch."""


def _detail(op: Op) -> str:
    of_batch = op.kind in (*COMPUTES, *_BESIDE) and op.kind is not OpKind.PROLOGUE_BACKWARD
    words = (
        op.part.value if op.part else "",
        f"µ{op.micro_batch}" if of_batch else "",
        _passes(op.passes) if of_batch else "",
        f"slot {op.slot}" if op.slot >= 0 and op.kind not in _IN_BUFFERS else "",
        f"over {', '.join(op.axes)}" if op.axes else "",
        f"buffer {op.buffer}" if op.buffer >= 0 else "",
        "on device" if op.device_slice else "",
        f"{op.entries} pending" if op.entries else "",
        ("keeps graph" if op.kind is OpKind.FORWARD else "graph kept") if op.keep_graph else "",
        "graph" if op.of_graph else "",
    )
    return " ".join(word for word in words if word)


def _passes(passes: range) -> str:
    if len(passes) > 1:
        return f"passes {passes[0]} to {passes[-1]}"
    return f"pass {passes[0]}" if passes[0] else ""


def human_bytes(nbytes: float) -> str:
    """Write a number of bytes in decimal units: ``1536`` as ``1.5 kB``."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"

"""A program: the ops of one kind of step, in order, with lane, bytes, memory and dependencies. Data, not behaviour.

Lanes are first-in, first-out; an op starts when the op before it on its lane and all its dependencies are done. The
executors (:class:`blockwalk.walker.Walker` and the simulator) run this list and decide nothing. What must hold of every
program is written below as pure functions over it, each returning the broken places in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from blockwalk.state import StateKind


class OpKind(StrEnum):
    """What an op does."""

    FETCH = "FETCH"
    """Bring a unit's state from its tier into a slot (on a CPU with mapped files: make its pages resident)."""
    GATHER = "GATHER"
    """Complete a slice over a group of ranks."""
    CACHE = "CACHE"
    """Keep a gathered slice for the backward walk."""
    PROLOGUE = "PROLOGUE"
    FORWARD = "FORWARD"
    SAVE = "SAVE"
    """Write a block's input, the activation checkpoint, to its tier."""
    LOAD = "LOAD"
    """Bring an activation checkpoint back."""
    LOSS = "LOSS"
    """The epilogue: final norm, head and loss, with the gradient of its input where the estimator needs one."""
    BACKWARD = "BACKWARD"
    """Recompute a block with its graph, unless the graph was kept, and differentiate it."""
    PROLOGUE_BACKWARD = "PROLOGUE_BACKWARD"
    REDUCE = "REDUCE"
    """Sum gradients over a group."""
    PERTURB = "PERTURB"
    """Perturb the resident weights in place, all of them: only where the original's arithmetic is reproduced."""
    EXCHANGE = "EXCHANGE"
    """Turn a step's losses into its scalars, over all ranks."""
    UPDATE = "UPDATE"
    STORE = "STORE"
    """Write a unit's state back to its tier."""
    EVICT = "EVICT"
    """Give a slot or a unit's pages back."""


class Lane(StrEnum):
    """A queue of work: a CUDA stream or a thread."""

    COMPUTE = "compute"
    FETCH = "fetch"
    STORE = "store"
    INTRA = "intra-node"
    INTER = "inter-node"


class Pool(StrEnum):
    """A memory whose use a program accounts for."""

    DEVICE = "device"
    HOST = "host"
    MAPPED = "mapped"
    """File-backed pages: in memory while there is room for them, never charged as anonymous memory."""
    DISK = "disk"


class StepKind(StrEnum):
    """The kinds of step that a plan is compiled for."""

    TRAIN = "train"
    GRADIENTS = "gradients"
    EVALUATE = "evaluate"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape bucket of one micro-batch: sequences × tokens."""

    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


Bytes = tuple[tuple[Pool, int], ...]
"""Memory taken or given back, pool by pool."""


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
    """The kind of state that it moves or changes."""
    nbytes: int = 0
    """Bytes that cross the lane's link."""
    flops: int = 0
    micro_batch: int = 0
    forward_pass: int = 0
    """Which forward of a zeroth-order step: one for each perturbed copy of the weights."""
    slot: int = -1
    span: tuple[int, int] | None = None
    """Groups of so many ranks become groups of so many: where a GATHER's pieces come from, where a REDUCE's sums go."""
    buffer: int = -1
    """The gradient buffer that a backward op fills and a REDUCE empties."""
    kept: bool = False
    """A CACHE that keeps a node slice on the device for the rest of the step, a GATHER that begins with it, an EVICT that lets
    go of it."""
    entries: int = 0
    """Deferred updates that an UPDATE applies."""
    keep_graph: bool = False
    """A FORWARD whose activations stay for its BACKWARD; a BACKWARD that need not recompute."""
    last: bool = False
    """The last of its micro-batches: gradients are complete after it."""
    takes: Bytes = ()
    """Memory claimed when it starts."""
    frees: Bytes = ()
    """Memory given back when it ends."""
    transient: int = 0
    """Device bytes held only while it runs."""


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
    dirty: frozenset[int] = frozenset()
    """Sharded over ranks: units whose node slices are out of date when the program has run."""
    _peaks: dict[Pool, int] = field(default_factory=dict, compare=False, repr=False)

    def bytes_by_lane(self) -> dict[Lane, int]:
        """Bytes that each lane moves in one run."""
        total: Counter[Lane] = Counter()
        for op in self.ops:
            if op.nbytes:
                total[op.lane] += op.nbytes
        return dict(total)

    def peaks(self) -> dict[Pool, int]:
        """Peak bytes of each pool if every op started as early as its place in the list: an upper bound of any run."""
        if not self._peaks:
            held = Counter(dict(self.static))
            peak = Counter(held)
            for op in self.ops:
                for pool, nbytes in op.takes:
                    held[pool] += nbytes
                    peak[pool] = max(peak[pool], held[pool])
                peak[Pool.DEVICE] = max(peak[Pool.DEVICE], held[Pool.DEVICE] + op.transient)
                for pool, nbytes in op.frees:
                    held[pool] -= nbytes
            self._peaks.update({Pool(pool): int(nbytes) for pool, nbytes in peak.items()})
        return dict(self._peaks)

    def device_bytes(self) -> list[int]:
        """Bytes held on the device while each op runs, transients included, under the assumption of :meth:`peaks`."""
        held, found = dict(self.static).get(Pool.DEVICE, 0), []
        for op in self.ops:
            held += sum(nbytes for pool, nbytes in op.takes if pool is Pool.DEVICE)
            found.append(held + op.transient)
            held -= sum(nbytes for pool, nbytes in op.frees if pool is Pool.DEVICE)
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The schedule as a table, one op a line."""
        yield f"{self.title}: {self.step_kind}, {self.shape.batch} × {self.shape.sequence} tokens, {len(self.ops)} ops"
        yield f"{'#':>5}  {'lane':<10} {'op':<18} {'unit':<12} {'detail':<30} {'bytes':>10}  after"
        for op in self.ops:
            after = ",".join(str(d) for d in op.deps)
            size = human_bytes(op.nbytes) if op.nbytes else ""
            name = self.unit_names[op.unit]
            yield f"{op.index:>5}  {op.lane:<10} {op.kind:<18} {name:<12} {_detail(op):<30} {size:>10}  {after}".rstrip()


def _detail(op: Op) -> str:
    words = [op.part.value] if op.part else []
    if op.kind in (OpKind.PROLOGUE, OpKind.FORWARD, OpKind.LOSS, OpKind.BACKWARD, OpKind.SAVE, OpKind.LOAD):
        words.append(f"µ{op.micro_batch}")
        if op.forward_pass:
            words.append(f"pass {op.forward_pass}")
    if op.slot >= 0:
        words.append(f"slot {op.slot}")
    if op.span is not None:
        words.append(f"ranks {op.span[0]}–{op.span[1]}")
    if op.buffer >= 0:
        words.append(f"buffer {op.buffer}")
    if op.kept:
        words.append("on device")
    if op.entries:
        words.append(f"{op.entries} pending")
    if op.keep_graph:
        words.append("keeps graph" if op.kind is OpKind.FORWARD else "graph kept")
    return " ".join(words)


def human_bytes(nbytes: float) -> str:
    """``1536`` → ``'1.5 kB'`` (decimal units)."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


# ---------------------------------------------------------------------------------------------------------------------
# What must hold of every program. Each function returns the broken places in words; none means that it holds.
# ---------------------------------------------------------------------------------------------------------------------

_FILLS = (OpKind.FETCH, OpKind.GATHER)
_USES = (OpKind.PROLOGUE, OpKind.FORWARD, OpKind.LOSS, OpKind.BACKWARD, OpKind.PROLOGUE_BACKWARD, OpKind.UPDATE, OpKind.STORE)


def happens_before(program: Program) -> list[int]:
    """For each op the set, as a bit mask, of ops that are done when it starts: dependencies and its lane's order."""
    before: list[int] = []
    last_on_lane: dict[Lane, int] = {}
    for op in program.ops:
        mask = 0
        for dep in (*op.deps, *([last_on_lane[op.lane]] if op.lane in last_on_lane else [])):
            mask |= before[dep] | (1 << dep)
        before.append(mask)
        last_on_lane[op.lane] = op.index
    return before


def broken_dependencies(program: Program) -> list[str]:
    """Ops are numbered in order, and depend on earlier ones only."""
    wrong = [f"op {op.index} stands at place {i}" for i, op in enumerate(program.ops) if op.index != i]
    return wrong + [
        f"op {op.index} waits for op {dep}, which comes later"
        for op in program.ops
        for dep in op.deps
        if not 0 <= dep < op.index
    ]


def used_unfetched(program: Program) -> list[str]:
    """A streamed unit is used only after its fetch is done, and never after its eviction began."""
    before = happens_before(program)
    live: dict[int, list[int]] = {}
    users: dict[int, list[int]] = {}
    wrong: list[str] = []
    for op in program.ops:
        name = program.unit_names[op.unit]
        if op.unit not in program.streamed:
            continue
        if op.kind in _FILLS and op.slot >= 0:
            wrong += [
                f"{name}: op {op.index} {op.kind} completes what op {earlier} has not brought yet"
                for earlier in live.get(op.unit, [])
                if program.ops[earlier].part is op.part and not before[op.index] >> earlier & 1
            ]
            live.setdefault(op.unit, []).append(op.index)
        elif op.kind is OpKind.EVICT:
            wrong += [
                f"{name}: op {op.index} evicts it before op {user} is done with it"
                for user in users.pop(op.unit, [])
                if not before[op.index] >> user & 1
            ]
            live.pop(op.unit, None)
        elif op.kind in _USES and (op.kind is not OpKind.UPDATE or op.unit in program.written):
            users.setdefault(op.unit, []).append(op.index)
            fetches = live.get(op.unit, [])
            if not fetches:
                wrong.append(f"{name}: op {op.index} {op.kind} uses it, and it is not fetched")
            wrong += [
                f"{name}: op {op.index} {op.kind} does not wait for its fetch, op {fetch}"
                for fetch in fetches
                if not before[op.index] >> fetch & 1
            ]
    return wrong


def left_behind(program: Program) -> list[str]:
    """What a program takes it gives back: slots are empty at its end, and no pool has grown or gone below its start."""
    held: Counter[Pool] = Counter()
    occupied: dict[int, int] = {}
    for op in program.ops:
        if op.kind in _FILLS and op.slot >= 0:
            occupied[op.slot] = op.unit
        if op.kind is OpKind.EVICT and op.slot >= 0:
            occupied.pop(op.slot, None)
        for pool, nbytes in op.takes:
            held[pool] += nbytes
        for pool, nbytes in op.frees:
            held[pool] -= nbytes
    wrong = [f"slot {slot} still holds {program.unit_names[unit]}" for slot, unit in occupied.items()]
    return wrong + [f"{pool} ends {nbytes:+d} bytes from where it began" for pool, nbytes in held.items() if nbytes]


def shared_slots(program: Program) -> list[str]:
    """A slot is filled only after its last unit was evicted."""
    before = happens_before(program)
    evicted: dict[int, int] = {}
    holder: dict[int, int] = {}
    wrong: list[str] = []
    for op in program.ops:
        if op.slot < 0:
            continue
        if op.kind in _FILLS and holder.get(op.slot) != op.unit:
            if op.slot in holder:
                wrong.append(f"op {op.index} fills slot {op.slot}, which holds {program.unit_names[holder[op.slot]]}")
            if op.slot in evicted and not before[op.index] >> evicted[op.slot] & 1:
                wrong.append(
                    f"op {op.index} fills slot {op.slot} without waiting for its eviction, op {evicted[op.slot]}"
                )
            holder[op.slot] = op.unit
        elif op.kind is OpKind.EVICT:
            evicted[op.slot] = op.index
            holder.pop(op.slot, None)
    return wrong


def shared_buffers(program: Program) -> list[str]:
    """A gradient buffer is filled by one unit at a time, and by the next only after the last reduction that read it."""
    before = happens_before(program)
    fills: dict[int, list[Op]] = {}
    reductions: dict[int, list[Op]] = {}
    wrong: list[str] = []
    for op in program.ops:
        if op.buffer < 0:
            continue
        name = program.unit_names[op.unit]
        if op.kind is OpKind.REDUCE:
            wrong += [
                f"{name}: op {op.index} reduces buffer {op.buffer}, which op {fill.index} fills and it does not wait for"
                for fill in fills.get(op.buffer, [])
                if fill.unit != op.unit or not before[op.index] >> fill.index & 1
            ]
            reductions.setdefault(op.buffer, []).append(op)
            continue
        emptied = reductions.pop(op.buffer, [])
        if emptied:
            fills[op.buffer] = []
        wrong += [
            f"{name}: op {op.index} fills buffer {op.buffer} before op {reduction.index} is done with it"
            for reduction in emptied
            if not before[op.index] >> reduction.index & 1
        ]
        fills.setdefault(op.buffer, []).append(op)
    return wrong


def lost_updates(program: Program) -> list[str]:
    """An update to a streamed unit that is its last of the program reaches the tier, or stays pending in the ledger."""
    stored: dict[int, bool] = {}
    flushes = any(op.kind is OpKind.STORE and op.part is StateKind.TRAINABLE for op in program.ops)
    for op in program.ops:
        if op.unit in program.written and op.kind is OpKind.UPDATE:
            stored[op.unit] = False
        if op.kind is OpKind.STORE and op.part is StateKind.TRAINABLE:
            stored[op.unit] = True
    must = flushes or program.step_kind is StepKind.FLUSH
    return [f"{program.unit_names[u]} is updated and not stored" for u, done in stored.items() if must and not done]


def over_budget(program: Program, budget: int | None) -> list[str]:
    """The device peak stays within the budget."""
    peak = program.peaks().get(Pool.DEVICE, 0)
    if budget is None or peak <= budget:
        return []
    return [f"the step needs {human_bytes(peak)} of device memory, and the budget is {human_bytes(budget)}"]


INVARIANTS = (broken_dependencies, used_unfetched, left_behind, shared_slots, shared_buffers, lost_updates)
"""The rules without a parameter; :func:`check` asserts them all."""


def check(program: Program) -> Program:
    """``program``, if every invariant holds.

    Raises:
        AssertionError: the compiler made a program that breaks a rule; the message lists the broken places.
    """
    wrong = [line for rule in INVARIANTS for line in rule(program)]
    assert not wrong, f"{program.title}: " + "; ".join(wrong[:10])
    return program

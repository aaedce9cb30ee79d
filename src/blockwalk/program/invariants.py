"""The rules that hold of every program, as pure functions over it. Each returns the broken places
in words; none means that it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from blockwalk.plan.placement import StateKind
from blockwalk.program.program import (
    COMPUTES,
    Lane,
    Op,
    OpKind,
    Pool,
    Program,
    StepKind,
    human_bytes,
)

_FILLS = (OpKind.FETCH, OpKind.GATHER)


@dataclass(frozen=True, slots=True)
class Order:
    """The order that lanes and dependencies give a program's ops. On each lane they begin and end
    in their order, so that a number for each lane says which of its ops are done."""

    places: list[tuple[int, int]]
    """The number of each op's lane, and its place there."""
    done: list[tuple[int, ...]]
    """The ops of each lane that are done when an op starts."""

    def __call__(self, earlier: int, later: int) -> bool:
        """Return whether one op is done when another starts."""
        lane, place = self.places[earlier]
        return place < self.done[later][lane]


def happens_before(program: Program) -> Order:
    """Return the order of a program's ops: dependencies and its lanes' order. An op begins after
    the one before it on its lane has begun, and after as many as may be on their way at once have
    ended (:attr:`~blockwalk.program.program.Lane.at_once`)."""
    numbers = {
        lane: number for number, lane in enumerate(dict.fromkeys(op.lane for op in program.ops))
    }
    nothing = (0,) * len(numbers)
    places: list[tuple[int, int]] = []
    done: list[tuple[int, ...]] = []
    ended: list[tuple[int, ...]] = []
    counts = [0] * len(numbers)
    on_lane: dict[Lane, list[int]] = {}
    for op in program.ops:
        lane = numbers[op.lane]
        places.append((lane, counts[lane]))
        counts[lane] += 1
        before = on_lane.setdefault(op.lane, [])
        begun = [done[index] for index in before[-1:]]
        ahead = len(before) - op.lane.at_once
        waits = (*op.deps, *(before[ahead : ahead + 1] if ahead >= 0 else ()))
        before.append(op.index)
        start = tuple(map(max, nothing, nothing, *begun, *(ended[wait] for wait in waits)))
        done.append(start)
        ended.append((*start[:lane], counts[lane], *start[lane + 1 :]))
    return Order(places, done)


def broken_dependencies(program: Program, _: Order | None = None) -> list[str]:
    """Return breaches of the rule that ops are numbered in order, and depend on earlier ones
    only."""
    misplaced = [
        f"op {op.index} stands at place {i}" for i, op in enumerate(program.ops) if op.index != i
    ]
    late = [(op, dep) for op in program.ops for dep in op.deps if not 0 <= dep < op.index]
    return misplaced + [f"op {op.index} waits for op {dep}, which comes later" for op, dep in late]


def used_unfetched(program: Program, order: Order | None = None) -> list[str]:
    """Return breaches of the rule that a streamed unit is used only after its fetch is done, and
    never after its eviction began."""
    order = order or happens_before(program)
    ops = program.ops
    live: dict[int, list[int]] = {}
    users: dict[int, list[int]] = {}
    breaches: list[str] = []
    for op in ops:
        if op.unit not in program.streamed:
            continue
        name = program.unit_names[op.unit]
        text = f"{name}: op {op.index} {op.kind}"
        fetches = live.get(op.unit, [])
        late = [fetch for fetch in fetches if not order(fetch, op.index)]
        if op.kind in _FILLS and op.slot >= 0:
            same_part = [fetch for fetch in late if ops[fetch].part is op.part]
            breaches += [f"{text} completes what op {f} has not brought yet" for f in same_part]
            live.setdefault(op.unit, []).append(op.index)
        elif op.kind is OpKind.EVICT:
            busy = [user for user in users.pop(op.unit, []) if not order(user, op.index)]
            breaches += [
                f"{name}: op {op.index} evicts it before op {user} is done with it" for user in busy
            ]
            live.pop(op.unit, None)
        elif _uses_slot(program, op):
            users.setdefault(op.unit, []).append(op.index)
            breaches += [] if fetches else [f"{text} uses it, and it is not fetched"]
            breaches += [f"{text} does not wait for its fetch, op {fetch}" for fetch in late]
    return breaches


def _uses_slot(program: Program, op: Op) -> bool:
    """Return whether an op reads or writes its unit's slot: gradients and optimizer states are in
    none, nor are trainables that are not written back."""
    if op.kind is OpKind.STORE:
        return op.part not in (StateKind.GRADIENT, StateKind.OPTIMIZER)
    if op.kind is OpKind.UPDATE:
        return op.unit in program.written
    return op.kind in COMPUTES


def left_behind(program: Program, _: Order | None = None) -> list[str]:
    """Return breaches of the rule that a program gives back all memory that it takes: slots are
    empty at its end, and no pool has grown or gone below its start."""
    growth: Counter[Pool] = Counter()
    occupants: dict[int, int] = {}
    for op in program.ops:
        if op.kind in _FILLS and op.slot >= 0:
            occupants[op.slot] = op.unit
        if op.kind is OpKind.EVICT and op.slot >= 0:
            occupants.pop(op.slot, None)
        for pool, nbytes in op.takes:
            growth[pool] += nbytes
        for pool, nbytes in op.frees:
            growth[pool] -= nbytes
    full = [
        f"slot {slot} still holds {program.unit_names[unit]}" for slot, unit in occupants.items()
    ]
    return full + [
        f"{pool} ends {nbytes:+d} bytes from where it began"
        for pool, nbytes in growth.items()
        if nbytes
    ]


def shared_slots(program: Program, order: Order | None = None) -> list[str]:
    """Return breaches of the rule that a slot is filled only after its last unit was evicted."""
    order = order or happens_before(program)
    evictions: dict[int, int] = {}
    occupants: dict[int, int] = {}
    breaches: list[str] = []
    for op in program.ops:
        text = f"op {op.index} fills slot {op.slot}"
        if op.kind in _FILLS and op.slot >= 0 and occupants.get(op.slot) != op.unit:
            if op.slot in occupants:
                breaches.append(f"{text}, which holds {program.unit_names[occupants[op.slot]]}")
            eviction = evictions.get(op.slot)
            if eviction is not None and not order(eviction, op.index):
                breaches.append(f"{text} without waiting for its eviction, op {eviction}")
            occupants[op.slot] = op.unit
        elif op.kind is OpKind.EVICT and op.slot >= 0:
            evictions[op.slot] = op.index
            occupants.pop(op.slot, None)
    return breaches


def shared_buffers(program: Program, order: Order | None = None) -> list[str]:
    """Return breaches of the rule that a gradient buffer is filled by one unit at a time, and by
    the next only after the last reduction that read it."""
    order = order or happens_before(program)
    fills: dict[int, list[Op]] = {}
    reductions: dict[int, list[Op]] = {}
    breaches: list[str] = []
    for op in program.ops:
        if op.buffer < 0:
            continue
        text = f"{program.unit_names[op.unit]}: op {op.index}"
        if op.kind is OpKind.REDUCE:
            breaches += [
                f"{text} reduces buffer {op.buffer}, which op {fill.index} fills and it does not"
                " wait for"
                for fill in fills.get(op.buffer, [])
                if fill.unit != op.unit or not order(fill.index, op.index)
            ]
            reductions.setdefault(op.buffer, []).append(op)
            continue
        if readers := reductions.pop(op.buffer, []):
            fills[op.buffer] = []
        breaches += [
            f"{text} fills buffer {op.buffer} before op {reader.index} is done with it"
            for reader in readers
            if not order(reader.index, op.index)
        ]
        fills.setdefault(op.buffer, []).append(op)
    return breaches


def lost_updates(program: Program, _: Order | None = None) -> list[str]:
    """Return breaches of the rule that an update to a streamed unit that is its last of the program
    reaches the tier, or stays pending in the ledger."""
    stored: dict[int, bool] = {}
    flushes = any(op.kind is OpKind.STORE and op.part is StateKind.TRAINABLE for op in program.ops)
    for op in program.ops:
        if op.unit in program.written and op.kind is OpKind.UPDATE:
            stored[op.unit] = False
        if op.kind is OpKind.STORE and op.part is StateKind.TRAINABLE:
            stored[op.unit] = True
    if not flushes and program.step_kind is not StepKind.FLUSH:
        return []
    lost = [unit for unit, is_stored in stored.items() if not is_stored]
    return [f"{program.unit_names[unit]} is updated and not stored" for unit in lost]


def over_budget(program: Program, budget: int | None) -> list[str]:
    """Return a breach of the rule that the device peak stays within the budget."""
    peak = program.peaks()[Pool.DEVICE]
    if budget is None or peak <= budget:
        return []
    return [
        f"the step needs {human_bytes(peak)} of device memory, and the budget is"
        f" {human_bytes(budget)}"
    ]


INVARIANTS = (
    broken_dependencies,
    used_unfetched,
    left_behind,
    shared_slots,
    shared_buffers,
    lost_updates,
)
"""The rules without a parameter; :func:`check` asserts them all."""


def check(program: Program) -> Program:
    """Return ``program``, if every invariant holds.

    Raises:
        AssertionError: the compiler made a program that breaks a rule; the message lists the broken
            places.
    """
    order = happens_before(program)
    breaches = [breach for rule in INVARIANTS for breach in rule(program, order)]
    assert not breaches, f"{program.title}: " + "; ".join(breaches[:10])
    return program

"""The rules that hold of every program, as pure functions over it. Each returns the broken places
in words; none means that it holds."""

from __future__ import annotations

from collections import Counter

from blockwalk.plan.placement import StateKind
from blockwalk.program.program import COMPUTES, Op, OpKind, Pool, Program, StepKind, human_bytes

# ---------------------------------------------------------------------------------------------------------------------
# What must hold of every program. Each function returns the broken places in words; none means that
# it holds.
# ---------------------------------------------------------------------------------------------------------------------

_FILLS = (OpKind.FETCH, OpKind.GATHER)
_USES = (*COMPUTES, OpKind.UPDATE, OpKind.STORE)


def happens_before(program: Program) -> list[int]:
    """Return the set of ops, as a bit mask, that are done when each op starts: dependencies and its
    lane's order."""
    before: list[int] = []
    for _, earlier in program.waits():
        mask = 0
        for dep in earlier:
            mask |= before[dep] | (1 << dep)
        before.append(mask)
    return before


def broken_dependencies(program: Program) -> list[str]:
    """Ops are numbered in order, and depend on earlier ones only."""
    wrong = [
        f"op {op.index} stands at place {i}" for i, op in enumerate(program.ops) if op.index != i
    ]
    late = [(op, dep) for op in program.ops for dep in op.deps if not 0 <= dep < op.index]
    return wrong + [f"op {op.index} waits for op {dep}, which comes later" for op, dep in late]


def used_unfetched(program: Program) -> list[str]:
    """A streamed unit is used only after its fetch is done, and never after its eviction began."""
    before = happens_before(program)
    ops = program.ops
    live: dict[int, list[int]] = {}
    users: dict[int, list[int]] = {}
    wrong: list[str] = []
    for op in ops:
        name = program.unit_names[op.unit]
        fetches = live.get(op.unit, [])
        late = [fetch for fetch in fetches if not before[op.index] >> fetch & 1]
        if op.unit not in program.streamed:
            continue
        if op.kind in _FILLS and op.slot >= 0:
            same = [fetch for fetch in late if ops[fetch].part is op.part]
            wrong += [
                f"{name}: op {op.index} {op.kind} completes what op {each} has not brought yet"
                for each in same
            ]
            live.setdefault(op.unit, []).append(op.index)
        elif op.kind is OpKind.EVICT:
            early = [user for user in users.pop(op.unit, []) if not before[op.index] >> user & 1]
            wrong += [
                f"{name}: op {op.index} evicts it before op {user} is done with it"
                for user in early
            ]
            live.pop(op.unit, None)
        elif op.kind is OpKind.STORE and op.part in (StateKind.GRADIENT, StateKind.OPTIMIZER):
            continue  # they are in no slot
        elif op.kind in _USES and (op.kind is not OpKind.UPDATE or op.unit in program.written):
            users.setdefault(op.unit, []).append(op.index)
            wrong += (
                []
                if fetches
                else [f"{name}: op {op.index} {op.kind} uses it, and it is not fetched"]
            )
            wrong += [
                f"{name}: op {op.index} {op.kind} does not wait for its fetch, op {fetch}"
                for fetch in late
            ]
    return wrong


def left_behind(program: Program) -> list[str]:
    """Return breaches of the rule that a program gives back all memory that it takes: slots are
    empty at its end, and no pool has grown or gone below its start."""
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
    wrong = [
        f"slot {slot} still holds {program.unit_names[unit]}" for slot, unit in occupied.items()
    ]
    return wrong + [
        f"{pool} ends {nbytes:+d} bytes from where it began"
        for pool, nbytes in held.items()
        if nbytes
    ]


def shared_slots(program: Program) -> list[str]:
    """A slot is filled only after its last unit was evicted."""
    before = happens_before(program)
    evicted: dict[int, int] = {}
    holder: dict[int, int] = {}
    wrong: list[str] = []
    for op in program.ops:
        fills = f"op {op.index} fills slot {op.slot}"
        if op.kind in _FILLS and op.slot >= 0 and holder.get(op.slot) != op.unit:
            if op.slot in holder:
                wrong.append(f"{fills}, which holds {program.unit_names[holder[op.slot]]}")
            if op.slot in evicted and not before[op.index] >> evicted[op.slot] & 1:
                wrong.append(f"{fills} without waiting for its eviction, op {evicted[op.slot]}")
            holder[op.slot] = op.unit
        elif op.kind is OpKind.EVICT and op.slot >= 0:
            evicted[op.slot] = op.index
            holder.pop(op.slot, None)
    return wrong


def shared_buffers(program: Program) -> list[str]:
    """A gradient buffer is filled by one unit at a time, and by the next only after the last
    reduction that read it."""
    before = happens_before(program)
    fills: dict[int, list[Op]] = {}
    reductions: dict[int, list[Op]] = {}
    wrong: list[str] = []
    for op in program.ops:
        if op.buffer < 0:
            continue
        name = program.unit_names[op.unit]
        done = before[op.index]
        if op.kind is OpKind.REDUCE:
            late = [
                each
                for each in fills.get(op.buffer, [])
                if each.unit != op.unit or not done >> each.index & 1
            ]
            said = f"{name}: op {op.index} reduces buffer {op.buffer}, which op"
            wrong += [f"{said} {fill.index} fills and it does not wait for" for fill in late]
            reductions.setdefault(op.buffer, []).append(op)
            continue
        if emptied := reductions.pop(op.buffer, []):
            fills[op.buffer] = []
        said = f"{name}: op {op.index} fills buffer {op.buffer} before op"
        wrong += [
            f"{said} {each.index} is done with it" for each in emptied if not done >> each.index & 1
        ]
        fills.setdefault(op.buffer, []).append(op)
    return wrong


def lost_updates(program: Program) -> list[str]:
    """Return an update to a streamed unit that is its last of the program reaches the tier, or
    stays pending in the ledger."""
    stored: dict[int, bool] = {}
    flushes = any(op.kind is OpKind.STORE and op.part is StateKind.TRAINABLE for op in program.ops)
    for op in program.ops:
        if op.unit in program.written and op.kind is OpKind.UPDATE:
            stored[op.unit] = False
        if op.kind is OpKind.STORE and op.part is StateKind.TRAINABLE:
            stored[op.unit] = True
    must = flushes or program.step_kind is StepKind.FLUSH
    return [
        f"{program.unit_names[u]} is updated and not stored"
        for u, done in stored.items()
        if must and not done
    ]


def over_budget(program: Program, budget: int | None) -> list[str]:
    """The device peak stays within the budget."""
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
    wrong = [line for rule in INVARIANTS for line in rule(program)]
    assert not wrong, f"{program.title}: " + "; ".join(wrong[:10])
    return program

"""The values that stages of a pipeline hand each other: the ops that bring a hidden state, or its
gradient, to a stage, and send those that it makes; none where one stage walks the whole model.

A value is named by the unit that made it, or of whose answer it is the gradient, and its
micro-batch. Each way has buffers for the values of ``prefetch`` + 1 visits, two at most: those that
are used or made, and those that travel beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from blockwalk.plan.placement import StateKind
from blockwalk.program.lower import Builder, visits_at_once
from blockwalk.program.program import Lane, OpKind
from blockwalk.program.stages import Visit

SENDS = {StateKind.ACTIVATION: Lane.SEND, StateKind.GRADIENT: Lane.SEND_BACK}
RECEIVES = {StateKind.ACTIVATION: Lane.RECEIVE, StateKind.GRADIENT: Lane.RECEIVE_BACK}


Value = tuple[StateKind, int, int]
"""A value by its kind, its unit and its micro-batch."""


@dataclass(slots=True)
class Handover:
    """The ops of one stage's program that go over its borders."""

    b: Builder
    order: Sequence[Visit]
    """The visits that emit something, in order."""
    groups: Sequence[Sequence[int]]
    """The micro-batches of each group."""
    firsts: frozenset[int] = field(init=False)
    """The first unit of each chunk."""
    lasts: frozenset[int] = field(init=False)
    """The last unit of each chunk."""
    _borders: frozenset[int] = field(init=False)
    """The units at which values may come and go."""
    _begun: int = 0
    """Visits that have begun."""
    _asked: int = 0
    """Visits whose values were asked for: those that have begun, and one ahead of them."""
    _came: dict[Value, int] = field(default_factory=dict)
    """The op that receives each value which nothing has used."""
    _used: dict[StateKind, list[int]] = field(default_factory=dict)
    """The ops that used received values, in order."""
    _received: dict[StateKind, int] = field(default_factory=dict)
    """Values received, each way."""
    _sent: dict[StateKind, list[int]] = field(default_factory=dict)
    """The sends, in order, each way."""

    def __post_init__(self) -> None:
        self.firsts = frozenset(chunk[0] for chunk in self.b.stage.chunks)
        self.lasts = frozenset(chunk[-1] for chunk in self.b.stage.chunks)
        self._borders = self.firsts | self.lasts if self.b.stage.count > 1 else frozenset()

    @property
    def _buffers(self) -> int:
        """The values that a lane has room for."""
        return visits_at_once(self.b.places.plan) * max(map(len, self.groups))

    def begin(self, *, backwards: bool) -> None:
        """Begin the next visit: make its blocks' arguments where the stage has no prologue, and
        receive its values, with those of the visit after it where there is room."""
        b = self.b
        if b.stage.count == 1:
            return
        visit = self.order[self._begun]
        assert visit.backwards == backwards, f"{visit} is not what begins"
        if not (visit.backwards or visit.chunk or b.stage.is_first):
            for m in self.groups[visit.group]:
                b.op(OpKind.ARGUMENTS, 0, Lane.COMPUTE, micro_batch=m)
        self._begun += 1
        ahead = visits_at_once(b.places.plan) - 1
        for coming in self.order[self._asked : self._begun + ahead]:
            self._receive(coming)
            self._asked += 1

    def _receive(self, visit: Visit) -> None:
        chunk = self.b.stage.chunks[visit.chunk]
        part = StateKind.GRADIENT if visit.backwards else StateKind.ACTIVATION
        unit = chunk[-1] if visit.backwards else chunk[0] - 1
        if not 0 <= unit < self.b.places.last:
            return  # the model begins, or ends, here
        for m in self.groups[visit.group]:
            count = self._received.get(part, 0)
            self._received[part] = count + 1
            freed_by = count - self._buffers
            waits = [self._used[part][freed_by]] if freed_by >= 0 else []
            self._came[part, unit, m] = self._travels(OpKind.RECV, part, unit, m, waits)

    def came(self, unit: int, micro_batch: int, *, backwards: bool = False) -> list[int]:
        """Return the op that receives what a walk of a unit begins with, if another stage made
        it."""
        op = self._came.get(_given(unit, micro_batch, backwards))
        return [] if op is None else [op]

    @property
    def latest(self) -> list[int]:
        """The last compute op: what arrives ahead of its turn is stored no earlier."""
        ops = reversed(self.b.draft.ops)
        return list(islice((op.index for op in ops if op.lane is Lane.COMPUTE), 1))

    def waits(self, unit: int, micro_batch: int, *, backwards: bool = False) -> list[int]:
        """Return what a walk of a unit waits for at a border: its value's arrival, and the send by
        which the buffer of the value that it makes was emptied."""
        if unit not in self._borders:
            return []
        deps = self.came(unit, micro_batch, backwards=backwards)
        part, made_by, _ = _made(unit, micro_batch, backwards)
        sent = self._sent.get(part, [])
        if self._leaves(part, made_by) and len(sent) >= self._buffers:
            deps.append(sent[-self._buffers])
        return deps

    def passed(self, unit: int, micro_batch: int, op: int, *, backwards: bool = False) -> None:
        """Note that the op has walked a unit: the buffer of its value is free, and a value that it
        made for another stage is sent."""
        if unit not in self._borders:
            return
        given = _given(unit, micro_batch, backwards)
        if self._came.pop(given, None) is not None:
            self._used.setdefault(given[0], []).append(op)
        part, made_by, _ = _made(unit, micro_batch, backwards)
        if self._leaves(part, made_by):
            sent = self._travels(OpKind.SEND, part, made_by, micro_batch, [op])
            self._sent.setdefault(part, []).append(sent)

    def _leaves(self, part: StateKind, unit: int) -> bool:
        """Return whether the value of a unit is for another stage."""
        if part is StateKind.ACTIVATION:
            return unit in self.lasts and unit < self.b.places.last
        return unit >= self.b.stage.lowest and unit + 1 in self.firsts

    def _travels(
        self, kind: OpKind, part: StateKind, unit: int, micro_batch: int, after: Sequence[int]
    ) -> int:
        lane = (SENDS if kind is OpKind.SEND else RECEIVES)[part]
        nbytes = self.b.hidden_bytes
        details = {"part": part, "micro_batch": micro_batch, "nbytes": nbytes}
        return self.b.op(kind, unit, lane, after, **details)


def _given(unit: int, micro_batch: int, backwards: bool) -> Value:
    """Return the value that a walk of a unit begins with."""
    if backwards:
        return StateKind.GRADIENT, unit, micro_batch
    return StateKind.ACTIVATION, unit - 1, micro_batch


def _made(unit: int, micro_batch: int, backwards: bool) -> Value:
    """Return the value that a walk of a unit makes."""
    if backwards:
        return StateKind.GRADIENT, unit - 1, micro_batch
    return StateKind.ACTIVATION, unit, micro_batch

"""The search over all axes of plans over ranks together: branch and bound.

Choices grow by an axis at a time (:data:`blockwalk.simulate.axes.AXES`). One that cannot fit,
whatever the axes to come are, is left with all that would grow of it. Whole choices wait by their
least seconds a token (:mod:`blockwalk.simulate.bounds`), and come to be compiled and simulated in
that order, until none that waits is expected among the :data:`KEPT` fastest configurations, or
:data:`MOST_LOOKS` were looked at. What a look takes beyond its bound is expected of all choices
that differ from it in where state lies alone.

With n whole choices the tree takes O(n) bounds of O(1), the queue O(n log n), and the programs,
which are nearly all of it, at most MOST_LOOKS times that of two short steps
(:mod:`blockwalk.simulate.long_steps`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from blockwalk.plan.methods import METHODS
from blockwalk.plan.plan import Plan
from blockwalk.program.program import human_bytes
from blockwalk.simulate.axes import (
    AXES,
    Choice,
    Value,
    kind_of,
    label_of,
    layout_of,
    plan_of,
    row_of,
)
from blockwalk.simulate.bounds import Bounds, Least
from blockwalk.simulate.candidate import Candidate
from blockwalk.simulate.task import Task

KEPT = 5
"""Configurations that are looked for."""

ALIKE = 0.01
"""Steps that differ by a smaller share are alike, as far as can be foreseen: of plans whose steps
are alike, the one that moves the fewest seconds over links comes first."""

SAME = 0.02
"""The share of the device that choices may hold more or less of and have as much room for
graphs."""

MOST_LOOKS = 16
"""Whole choices that are compiled and simulated."""

Look = Callable[[str, Plan], Candidate]
"""A function that compiles and simulates a plan with a label."""


@dataclass(frozen=True, slots=True)
class Left:
    """A choice that no program was compiled for, and the reason."""

    label: str
    reason: str


@dataclass(slots=True)
class Outcome:
    """The outcome of the choices with one value of an axis."""

    seconds: float = math.inf
    """The least seconds a token of a simulated step with it."""
    least: float = math.inf
    """The lowest bound of those that fit by their bound."""
    expected: float = math.inf
    """The least seconds a token that are expected of those that fit and were not looked at."""
    nbytes: float = math.inf
    """The least device bytes of those that do not."""


@dataclass(frozen=True, slots=True)
class Found:
    """The findings of a search."""

    best: tuple[Candidate, ...] = ()
    """The fastest plan of each configuration that was looked at and fits, fastest first."""
    refused: tuple[Candidate, ...] = ()
    """Plans that were looked at and do not fit."""
    variants: tuple[Candidate, ...] = ()
    """Plans that were looked at, of configurations whose fastest another one is."""
    waiting: tuple[tuple[float, Choice], ...] = ()
    """Choices that fit by their bound, whose least seconds a token spoke against them, with these,
    the least first."""
    values: dict[str, dict[Value, Outcome]] = field(default_factory=dict)
    """The outcome of each value, by the axis's name."""

    @property
    def leanest(self) -> float:
        """The least device bytes of the choices that do not fit."""
        outcomes = (outcome for of_axis in self.values.values() for outcome in of_axis.values())
        return min((outcome.nbytes for outcome in outcomes), default=math.inf)


def rows_over_ranks() -> Iterator[str]:
    """Yield the methods that spread state over ranks and compute exact gradients."""
    for name, row in METHODS.items():
        if "gradient" in row().sharded_kinds:
            yield name


def whole_choices(
    task: Task, bounds: Bounds, values: dict[str, dict[Value, Outcome]]
) -> Iterator[tuple[Least, Choice]]:
    """Yield every choice of all axes that fits by its bound, with what it needs at the least; note
    what falls out, and where."""
    room = task.room
    host_room = task.hardware.host_room / task.hardware.devices_per_node

    def grow(choice: dict[str, Value], depth: int) -> Iterator[tuple[Least, Choice]]:
        least = bounds.least(choice)
        if least.device > room or (task.hardware.device != "cpu" and least.host > host_room):
            for name, value in choice.items():
                noted = _noted(values, name, value)
                noted.nbytes = min(noted.nbytes, least.device)
            return
        if depth == len(AXES):
            for name, value in choice.items():
                noted = _noted(values, name, value)
                noted.least = min(noted.least, least.a_token)
            yield least, choice
            return
        axis = AXES[depth]
        row = row_of(choice)
        for value in axis.values(task, row, choice):
            yield from grow({**choice, axis.name: value}, depth + 1)

    for name in rows_over_ranks() if task.hardware.world > 1 else ():
        yield from grow({"method": name}, 0)


def _noted(values: dict[str, dict[Value, Outcome]], name: str, value: Value) -> Outcome:
    return values.setdefault(name, {}).setdefault(value, Outcome())


def search(task: Task, look: Look) -> Found:
    """Return the fastest configurations of a task over ranks.

    Args:
        look: compiles and simulates one plan.
    """
    values: dict[str, dict[Value, Outcome]] = {}
    choices = list(whole_choices(task, Bounds(task), values))
    lowest = min((least.a_token for least, _ in choices), default=1.0)
    beyond: dict[tuple[Value, ...], list[tuple[float, float]]] = {}

    def expect(number: int) -> float:
        """Return the seconds a token that are expected of a choice: those of its bound, and as many
        more as a look at one of its kind took that holds no more of the device."""
        least, choice = choices[number]
        looks = beyond.get(kind_of(choice), ())
        leaner = [ratio for nbytes, ratio in looks if nbytes <= least.device + SAME * task.room]
        return least.a_token * min(leaner, default=1.0)

    def key(number: int) -> tuple[int, float, int]:
        least, _ = choices[number]
        return (*_order(expect(number), lowest, least.moves / least.tokens), number)

    queue = [key(number) for number in range(len(choices))]
    heapify(queue)
    fastest: dict[tuple[Value, ...], _Looked] = {}
    looked_at: list[_Looked] = []
    waiting: list[tuple[float, Choice]] = []
    while queue:
        entry = heappop(queue)
        number = entry[-1]
        least, choice = choices[number]
        if key(number) > entry:  # its kind was looked at since
            heappush(queue, key(number))
            continue
        expected = expect(number)
        if len(looked_at) >= MOST_LOOKS or _is_behind(expected, layout_of(choice), fastest):
            waiting.append((expected, choice))
            for name, value in choice.items():
                noted = _noted(values, name, value)
                noted.expected = min(noted.expected, expected)
            continue
        looked = _Looked(look(label_of(choice), plan_of(task, choice)), choice, least)
        looked_at.append(looked)
        if looked.candidate.simulation is None:
            continue
        ratio = looked.a_token / least.a_token
        beyond.setdefault(kind_of(choice), []).append((least.device, ratio))
        leader = fastest.get(layout_of(choice))
        if leader is None or _comes_before(looked, leader):
            fastest[layout_of(choice)] = looked
        for name, value in choice.items():
            noted = _noted(values, name, value)
            noted.seconds = min(noted.seconds, looked.a_token)
    best = sorted(fastest.values(), key=lambda looked: looked.a_token)
    chosen = [looked.candidate for looked in best]
    variants = [looked.candidate for looked in looked_at if looked.candidate not in chosen]
    return Found(
        tuple(chosen),
        tuple(candidate for candidate in variants if not candidate.simulation),
        tuple(candidate for candidate in variants if candidate.simulation),
        tuple(waiting),
        values,
    )


@dataclass(frozen=True, slots=True)
class _Looked:
    """A choice that was looked at."""

    candidate: Candidate
    choice: Choice
    least: Least

    @property
    def a_token(self) -> float:
        """Seconds of a token."""
        return self.candidate.a_token

    @property
    def moves(self) -> float:
        """Seconds of links a token."""
        return self.least.moves / self.least.tokens


def _is_behind(
    expected: float, layout: tuple[Value, ...], fastest: dict[tuple[Value, ...], _Looked]
) -> bool:
    """Return whether a step of so many seconds a token is alike or slower than the fastest of its
    configuration, or than all that are kept."""
    leader = fastest.get(layout)
    seconds = sorted(looked.a_token for looked in fastest.values())
    enough = seconds[KEPT - 1] if len(seconds) >= KEPT else math.inf
    limit = min(enough, leader.a_token if leader else math.inf)
    return expected >= limit * (1 - ALIKE)


def _comes_before(one: _Looked, other: _Looked) -> bool:
    """Return whether a plan is faster than another, or alike and moves less."""
    if one.a_token < other.a_token * (1 - ALIKE):
        return True
    return one.a_token < other.a_token / (1 - ALIKE) and one.moves < other.moves


def _order(a_token: float, lowest: float, moves: float) -> tuple[int, float]:
    """Return a key by which plans come: those that are alike by what they move."""
    return int(math.log(a_token / lowest) / math.log1p(ALIKE)), moves


def explained(found: Found) -> Iterator[str]:
    """Yield, for each axis with more values than one, the best step with each, and why a value fell
    out. Seconds are for the tokens of the best plan's step."""
    if not found.best:
        return
    simulation = found.best[0].simulation
    assert simulation is not None
    tokens = simulation.tokens
    yield "-- by axis: the fastest step with each value, for the tokens of the best plan's step"
    for name, noted in found.values.items():
        if len(noted) < 2:
            continue
        yield f"   {name}"
        for value, outcome in noted.items():
            if outcome.seconds < math.inf:
                words = f"{outcome.seconds * tokens:.4g} s"
            elif outcome.least < math.inf:
                words = f"left out: {outcome.expected * tokens:.4g} s are expected of it"
                words += f", {outcome.least * tokens:.4g} at the least"
            else:
                words = f"left out: {human_bytes(int(outcome.nbytes))} a device at the least"
            yield f"      {value!s:<10} {words}"

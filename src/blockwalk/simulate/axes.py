"""The axes of a plan over ranks, as rows of an open table: the values that a machine and a model
have room for, and the settings that a value stands for.

A *choice* has a value for each axis. An axis may look at the values of those before it: gradients
are spread over no fewer ranks than parameters, chunks are of stages. A further axis is a further
row; the search over all of them (:mod:`blockwalk.simulate.search`) knows none by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from blockwalk.plan.codecs import CODECS
from blockwalk.plan.methods import method
from blockwalk.plan.placement import NODE, WORLD
from blockwalk.plan.plan import Plan
from blockwalk.simulate.task import Task

PARTS_FROM = 2048
"""Sequences of more tokens are looked at in parts over ranks as well."""

CHUNKS = (1, 2, 4)
"""Numbers of chunks of a stage that are looked at."""

Value = int | str
Choice = Mapping[str, Value]
"""Values by the name of their axis, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that a plan over ranks may have otherwise."""

    name: str
    values: Callable[[Task, Plan, Choice], Iterable[Value]]
    """The values for a task under a method's row, beside those of the axes before it; the first is
    the one that the label leaves out."""
    settings: Callable[[Task, Choice], Mapping[str, Any]]
    """The settings that the value of a choice stands for, by dotted name."""
    words: Callable[[Choice], str]
    """The words of a label for a choice's value; empty for the usual one."""
    is_layout: bool = False
    """Whether plans with other values are other configurations, over which work is shared in
    another way. Else they are variants of one, of which the fastest counts."""
    shares_gap: bool = False
    """Whether what a bound leaves out of a step, such as waits at its ends, is taken to be equal
    for all values: they say where state lies, not what is computed when."""


_method = cache(method)


def row_of(choice: Choice) -> Plan:
    """Return the row of a choice's method."""
    return _method(str(choice["method"]))


def stage_ranks(task: Task, choice: Choice) -> int:
    """Return the ranks of a stage."""
    return task.hardware.world // int(choice.get("stages", 1))


def _node(task: Task, choice: Choice) -> int:
    """Return the ranks of a stage that share a node."""
    return min(task.hardware.devices_per_node, stage_ranks(task, choice))


def _stages(task: Task, _row: Plan, _choice: Choice) -> Iterator[int]:
    """Yield numbers of stages that a step's micro-batches fill, each stage a part of a node or
    whole ones."""
    node = task.hardware.devices_per_node
    yield 1
    for stages in (2, 3, 4, 6, 8, 12, 16):
        ranks, remainder = divmod(task.hardware.world, stages)
        if remainder or not ranks or max(ranks, node) % min(ranks, node):
            continue
        # More ranks to a sequence mean more micro-batches: parts decide whether a stage is idle.
        widest = math.gcd(node, 8) if _cuts_sequences(task) else 1
        if stages <= min(task.steps(stages, widest), len(task.model.blocks)):
            yield stages


def _cuts_sequences(task: Task) -> bool:
    return task.in_parts and task.shape.sequence > PARTS_FROM


def _parts(task: Task, _row: Plan, choice: Choice) -> Iterator[int]:
    """Yield numbers of ranks of a node that hold parts of a long sequence, as many as eight."""
    stages = int(choice["stages"])
    for parts in (1, 2, 4, 8) if _cuts_sequences(task) else (1,):
        if _node(task, choice) % parts == 0 and task.steps(stages, parts) >= stages:
            yield parts


_WAYS = ("auto", "keys")


def _ways(task: Task, _row: Plan, choice: Choice) -> Iterator[str]:
    """Yield ways in which parts attend: the one that sends fewer bytes, and keys of all parts where
    that is another."""
    yield _WAYS[0]
    parts = int(choice["parts"])
    if parts == 1:
        return
    mesh = {
        "mesh.world": task.hardware.world,
        "mesh.ranks_per_node": task.hardware.devices_per_node,
        "mesh.context": parts,
    }
    plans = [_method(str(choice["method"]), **mesh, **{"context.way": way}) for way in _WAYS]
    costs = [task.costs(plan, task.shape.part(parts)) for plan in plans]
    for way, cost in zip(_WAYS[1:], costs[1:], strict=True):
        if cost.units != costs[0].units:
            yield way


def _is_free(row: Plan) -> bool:
    """Return whether a row's groups are its user's: where parameters lie over fewer ranks than
    states, and no cache keeps slices of them."""
    return bool(row.slice_group) and not row.cache.keeps


def _group_size(task: Task, choice: Choice, group: str) -> int:
    """Return the ranks of one of a row's own groups."""
    return {NODE: _node(task, choice), WORLD: stage_ranks(task, choice)}[group]


def _over(kind: str, inner: str) -> Callable[[Task, Plan, Choice], Iterator[int]]:
    """Return the values of the axis of a kind of state: ranks that it is spread over, no fewer than
    the kind before it: half a node, a node, four, sixteen, or all of a stage."""

    def values(task: Task, row: Plan, choice: Choice) -> Iterator[int]:
        if not _is_free(row):
            yield _group_size(task, choice, getattr(row, kind).group)
            return
        ranks = stage_ranks(task, choice)
        node = _node(task, choice)
        sizes = {node // 2, node, 4 * node, 16 * node, ranks}
        fewest = int(choice.get(inner, 1))
        for size in sorted(sizes):
            nests = size and ranks % size == 0 and max(size, node) % min(size, node) == 0
            if nests and size > 1 and size % fewest == 0:
                yield size

    return values


def _spread(task: Task, choice: Choice) -> dict[str, Any]:
    """Return the settings of all three kinds of state; of a row with groups of its own the codec
    alone."""
    row = row_of(choice)
    codec = choice["codec"]
    if not _is_free(row):
        return {} if codec == "raw" else {"frozen": f"device × {codec} × {row.frozen.group}"}
    names = {stage_ranks(task, choice): WORLD, _node(task, choice): NODE}
    sizes = [int(choice[axis]) for axis in ("parameters", "gradients", "states")]
    group = {size: names.get(size, f"group{size}") for size in sizes}
    return {
        "mesh.groups": [f"group{size}={size}" for size in sorted({*sizes} - {*names})],
        "frozen": f"device × {codec} × {group[sizes[0]]}",
        "trainable": f"device × raw × {group[sizes[0]]}",
        "gradient.group": group[sizes[1]],
        "optimizer_state.group": group[sizes[2]],
    }


def _spread_words(choice: Choice) -> str:
    """Return the sizes of a free row's groups, those of equal ones once."""
    if not _is_free(row_of(choice)):
        return ""
    parameters, gradients, states = (choice[axis] for axis in ("parameters", "gradients", "states"))
    inner = f"{parameters}" if parameters == gradients else f"{parameters}, {gradients}"
    return f"over {inner} and {states}"


_HOSTS = {
    "device": ({}, ""),
    "host": ({"activation": "host"}, "activations on the host"),
    "states": ({"optimizer_state.tier": "host"}, "states on the host"),
    "all": (
        {"activation": "host", "optimizer_state.tier": "host"},
        "activations and states on the host",
    ),
}
"""State in host memory behind an accelerator: settings and words by name."""


def _memory(task: Task, _row: Plan, _choice: Choice) -> Iterator[str]:
    yield from _HOSTS if task.hardware.device == "cuda" else ("device",)


def _codecs(task: Task, row: Plan, _choice: Choice) -> Iterator[str]:
    """Yield forms of frozen weights: of rows that gather what they keep, codes too."""
    yield "raw"
    if task.adapters and not row.slice_group:
        yield from (str(codec) for codec in reversed(CODECS.tried("gathered")))


def _thresholds(task: Task, row: Plan, _choice: Choice) -> Iterator[str]:
    yield "none"
    if row.cache.off_device and task.budget is not None:
        yield "adaptive"


def _chunks(task: Task, _row: Plan, choice: Choice) -> Iterator[int]:
    """Yield numbers of chunks of a stage: several where micro-batches go in whole rounds."""
    stages = int(choice["stages"])
    in_rounds = task.steps(stages, int(choice["parts"])) % stages == 0
    for chunks in CHUNKS if stages > 1 and in_rounds else (1,):
        if chunks == 1 or stages * chunks <= len(task.model.blocks):
            yield chunks


def _sums(task: Task, row: Plan, choice: Choice) -> Iterator[str]:
    yield "each"
    if int(choice["stages"]) > 1 and int(choice["gradients"]) > 1:
        yield "shared"


def _together(task: Task, _row: Plan, choice: Choice) -> Iterator[int]:
    """Yield numbers of micro-batches that visit a block together, where there are no stages."""
    stages = int(choice["stages"])
    steps = task.steps(stages, int(choice["parts"]))
    yield 1
    power = 2
    while stages == 1 and power <= steps:
        yield power
        power *= 2


def _nothing(_task: Task, _choice: Choice) -> dict[str, Any]:
    return {}


def _silent(_choice: Choice) -> str:
    return ""


def _usual(axis: str, usual: Value, text: str) -> Callable[[Choice], str]:
    """Return the words of an axis for other values than the usual one, which stand at {}."""
    return lambda choice: "" if choice[axis] == usual else text.format(choice[axis])


def _set(axis: str, name: str, usual: Value) -> Callable[[Task, Choice], dict[str, Any]]:
    """Return the settings of an axis whose value is a setting's."""
    return lambda _, choice: {} if choice[axis] == usual else {name: choice[axis]}


AXES: tuple[Axis, ...] = (
    Axis(
        "stages",
        _stages,
        _set("stages", "mesh.pipeline", 1),
        _usual("stages", 1, "{} stages"),
        is_layout=True,
    ),
    Axis(
        "parts",
        _parts,
        _set("parts", "mesh.context", 1),
        _usual("parts", 1, "sequences in {} parts"),
        is_layout=True,
    ),
    Axis("way", _ways, _set("way", "context.way", "auto"), _usual("way", "auto", "by {}")),
    Axis("parameters", _over("trainable", ""), _nothing, _silent, shares_gap=True),
    Axis("gradients", _over("gradient", "parameters"), _nothing, _silent, shares_gap=True),
    Axis("states", _over("optimizer_state", "gradients"), _nothing, _spread_words, shares_gap=True),
    Axis(
        "memory",
        _memory,
        lambda _, choice: _HOSTS[str(choice["memory"])][0],
        lambda choice: _HOSTS[str(choice["memory"])][1],
        shares_gap=True,
    ),
    Axis("codec", _codecs, _spread, _usual("codec", "raw", "{}")),
    Axis(
        "cache",
        _thresholds,
        lambda task, choice: (
            {"cache.threshold": 0.9, "budget": task.budget} if choice["cache"] == "adaptive" else {}
        ),
        _usual("cache", "none", "{} cache"),
    ),
    Axis(
        "chunks",
        _chunks,
        _set("chunks", "pipeline.chunks", 1),
        _usual("chunks", 1, "{} chunks"),
    ),
    Axis(
        "sums",
        _sums,
        lambda _, choice: {"pipeline.shared_sums": True} if choice["sums"] == "shared" else {},
        _usual("sums", "each", "{} sums"),
        shares_gap=True,
    ),
    Axis(
        "together",
        _together,
        _set("together", "together", 1),
        _usual("together", 1, "{} micro-batches together"),
    ),
)
"""The axes, outermost first."""


_LAYOUT = tuple(axis.name for axis in AXES if axis.is_layout)
_KIND = tuple(axis.name for axis in AXES if not axis.shares_gap)


def layout_of(choice: Choice) -> tuple[Value, ...]:
    """Return what tells one configuration from another."""
    return tuple(choice[name] for name in _LAYOUT)


def kind_of(choice: Choice) -> tuple[Value, ...]:
    """Return what is equal for choices that differ in where state lies, by whatever method."""
    return tuple(choice[name] for name in _KIND)


def label_of(choice: Choice) -> str:
    """Return the method of a choice, and every value that is not the usual one."""
    words = (axis.words(choice) for axis in AXES)
    return ", ".join(filter(None, (str(choice["method"]), *words)))


def plan_of(task: Task, choice: Choice) -> Plan:
    """Return the plan of a whole choice. As many blocks recompute as memory asks for."""
    hardware = task.hardware
    settings: dict[str, Any] = {
        "mesh.world": hardware.world,
        "mesh.ranks_per_node": hardware.devices_per_node,
        "gradient_accumulation_steps": task.steps(int(choice["stages"]), int(choice["parts"])),
        "recompute": "auto" if hardware.device == "cuda" else "all",
    }
    for axis in AXES:
        settings.update(axis.settings(task, choice))
    return method(str(choice["method"]), **settings)

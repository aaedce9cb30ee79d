"""Named axes of ranks as plain numbers: which ranks share a piece of state or of work, and over
which links it travels.

Ranks are numbered node by node. A mesh has *groups* of neighbouring ranks, by name: ``nobody`` is
one rank, ``node`` those of a machine, ``world`` all of them, and ``mesh.groups`` may name others.
Their sizes 1 = s₀ | s₁ | … | s_K each divide the next, and the step from one to the next is an
:class:`Axis` with the name of the group that it completes: a group is reached over all axes up to
its own. A rank's coordinates, innermost first, place its slice of a flat buffer: the innermost
coordinate is the most significant digit. So a slice over a group is one contiguous piece, made of
the slices over the next larger group in the order of the next coordinate, and neither gathering nor
reducing ever moves an element inside a buffer.

A zeroth-order step's work is shared over two further axes of the same ranks: ``perturb``, inside,
and ``data``. Under backpropagation the ranks of an axis ``context``, neighbours too, hold parts of
the same sequences. Those of the outermost axis, ``pipeline``, are stages, which walk over different
blocks: groups lie inside a stage, whose ranks are all that ``world`` means for state.

Nothing here imports torch: plans are compiled from these numbers, and :mod:`blockwalk.ranks.groups`
makes process groups of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.placement import NOBODY, NODE, WORLD
from blockwalk.plan.words import counted

PERTURB = "perturb"
DATA = "data"
"""The axes that a zeroth-order step's forwards, and the global batch, are shared over."""
CONTEXT = "context"
"""The axis that the tokens of a sequence are shared over, under backpropagation."""
PIPELINE = "pipeline"
"""The axis that the blocks are shared over, under backpropagation: the outermost, whose places are
stages. State is spread over the ranks of a stage."""

ENDS = "ends"
"""The ranks of the first and the last stage that hold the same slices of a tied weight."""
WORK = (PERTURB, DATA, CONTEXT, PIPELINE)
"""The axes that a step's work is shared over."""

Coordinates = tuple[tuple[str, int], ...]
"""A rank's place on each axis, by the axis's name; 0 on those that are left out."""

Piece = tuple[int, int]
"""A part of a zeroth-order step: the numbers of a forward pass and of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One step outwards: groups of ``inner`` ranks become groups of ``outer``."""

    name: str
    inner: int
    outer: int
    crosses_nodes: bool
    """True where the ranks that differ in this coordinate alone are on different nodes."""

    @property
    def length(self) -> int:
        """Ranks that differ in this coordinate alone."""
        return self.outer // self.inner

    def coordinate(self, rank: int) -> int:
        return rank // self.inner % self.length

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` in this coordinate alone, in its order."""
        origin = rank - self.coordinate(rank) * self.inner
        return tuple(origin + i * self.inner for i in range(self.length))


@lru_cache
def group_sizes(mesh: MeshSettings) -> Mapping[str, int]:
    """Return ranks of each group of a mesh, by name.

    Raises:
        ValueError: one of ``mesh.groups`` is no name and number.
    """
    sizes = {NOBODY: 1, NODE: min(mesh.ranks_per_node, mesh.stage_ranks)}
    for text in mesh.groups:
        name, _, ranks = (word.strip() for word in text.partition("="))
        is_new = name not in (*sizes, WORLD, *WORK, ENDS)
        if not ranks.isdecimal() or not int(ranks) or not name or "×" in name or not is_new:
            raise ValueError(
                f"mesh.groups has {text!r}; it takes new names, each with its ranks, such as half=4"
            )
        sizes[name] = int(ranks)
    return {**sizes, WORLD: mesh.stage_ranks}


@lru_cache
def make_axes(mesh: MeshSettings) -> tuple[Axis, ...]:
    """Return the axes that state is spread over, innermost first: the steps between the sizes of a
    mesh's groups. Among groups of one size the first gives the name.

    Raises:
        ValueError: sizes that do not nest; the message names both.
    """
    names: dict[int, str] = {}
    for name, size in group_sizes(mesh).items():
        names.setdefault(size, name)
    steps = list(itertools.pairwise(sorted(names)))
    for small, large in [*steps, (max(names), mesh.stage_ranks)]:
        if large % small:
            raise ValueError(
                f"groups must be nested: {names[small]} has {counted(small, 'rank')}, which do"
                f" not divide the {large} of"
                f" {names[large]}; change mesh.groups, mesh.ranks_per_node or mesh.world"
            )
    return tuple(
        Axis(names[large], small, large, small >= mesh.ranks_per_node) for small, large in steps
    )


def work_axes(mesh: MeshSettings) -> tuple[Axis, ...]:
    """Return the axes that a step's work is shared over, innermost first."""
    axes = (
        (CONTEXT, 1, mesh.context),
        (PERTURB, 1, mesh.perturb),
        (DATA, mesh.perturb, mesh.perturb * mesh.data),
        (PIPELINE, mesh.stage_ranks, mesh.stage_ranks * mesh.pipeline),
    )
    return tuple(
        Axis(name, inner, outer, outer > mesh.ranks_per_node)
        for name, inner, outer in axes
        if inner < outer
    )


def context_axis(mesh: MeshSettings) -> Axis:
    """Return the axis of the ranks that hold parts of the same sequences, also where it is one
    rank long."""
    return Axis(CONTEXT, 1, mesh.context, mesh.context > mesh.ranks_per_node)


def coordinates_of(mesh: MeshSettings, rank: int) -> Coordinates:
    """Return a rank's places on the axes of its work and its state."""
    return tuple(
        (axis.name, axis.coordinate(rank)) for axis in (*work_axes(mesh), *make_axes(mesh))
    )


def between(axes: Sequence[Axis], inner: int, outer: int) -> tuple[Axis, ...]:
    """Return the axes from groups of ``inner`` ranks to groups of ``outer``, innermost first."""
    return tuple(axis for axis in axes if inner <= axis.inner and axis.outer <= outer)


def named(axes: Iterable[Axis], names: Sequence[str]) -> tuple[Axis, ...]:
    """Return the axes of these names, innermost first."""
    return tuple(axis for axis in axes if axis.name in names)


def names_of(axes: Iterable[Axis]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


def reach(axes: Sequence[Axis]) -> tuple[int, int]:
    """Return ranks of the groups that axes begin with, and of those that they complete; one and one
    where there are none."""
    return (axes[0].inner, axes[-1].outer) if axes else (1, 1)


def ranks_over(mesh: MeshSettings, names: Sequence[str]) -> int:
    """Return ranks of one collective over the axes of these names."""
    return math.prod(axis.length for axis in named((*work_axes(mesh), *make_axes(mesh)), names))


def holders(values: Sequence[Any], mesh: MeshSettings, rank: int, ranks: int) -> list[Any]:
    """Return, of every rank's values, those of the ranks that hold one copy of the state together
    with ``rank``, ``ranks`` of each stage, and of their like in the other stages."""
    first = rank % mesh.stage_ranks // ranks * ranks
    starts = range(first, mesh.world, mesh.stage_ranks)
    return [value for start in starts for value in values[start : start + ranks]]


def slice_of(axes: Sequence[Axis], rank: int, numel: int, size: int) -> tuple[int, int]:
    """Return first element and end of a rank's slice of a buffer of ``numel`` elements over its
    group of ``size`` ranks."""
    place = 0
    for axis in between(axes, 1, size):
        place = place * axis.length + axis.coordinate(rank)
    length = numel // size
    assert length * size == numel, f"{numel} elements do not divide into {size} slices"
    return place * length, (place + 1) * length


def gather_bytes(axes: Sequence[Axis], nbytes: int) -> int:
    """Return bytes that one rank sends where slices are gathered over these axes, outermost first,
    into ``nbytes`` over the innermost's group; reducing over them, innermost first, sends as
    many."""
    total = 0
    piece = nbytes
    for axis in axes:
        total += piece * (axis.length - 1) // axis.length
        piece //= axis.length
    return total


def share_by_axis(axes: Sequence[Axis]) -> dict[str, float]:
    """Return the shares of :func:`gather_bytes` that go over each axis, by its name."""
    unit = math.prod(axis.length for axis in axes)
    total = gather_bytes(axes, unit)
    shares = {}
    for axis in axes:
        shares[axis.name] = gather_bytes([axis], unit) / total
        unit //= axis.length
    return shares


def forwards_at(mesh: MeshSettings, coordinates: Mapping[str, int], passes: int) -> range:
    """Return the forward passes of a zeroth-order step that are run at a place on the axis
    ``perturb``: consecutive ones, as many as at the places before it or one less."""
    place = coordinates.get(PERTURB, 0)
    longest = -(-passes // mesh.perturb)
    longer_shares = passes - mesh.perturb * (longest - 1)
    start = place * longest - max(0, place - longer_shares)
    return range(start, start + longest - (place >= longer_shares))


def micro_batches_at(mesh: MeshSettings, coordinates: Mapping[str, int], cuts: int) -> range:
    """Return the parts of a global batch cut into ``cuts`` that are taken at a place on the axis
    ``data``: one of each micro-batch."""
    return range(coordinates.get(DATA, 0), cuts, mesh.data)

"""Nested groups of ranks as plain numbers: which ranks share a piece of state, and over which links it travels.

Ranks are numbered node by node. A chain of group sizes 1 = s₀ | s₁ | … | s_K, each dividing the next, cuts the world into
nested groups of consecutive ranks; the step from s to its successor is an :class:`Axis`. A rank's coordinates, innermost
first, place its slice of a flat buffer: the innermost coordinate is the most significant digit. So a slice over a group is
one contiguous piece, made of the slices over the next larger group in the order of the next coordinate, and neither
gathering nor reducing ever moves an element inside a buffer.

Nothing here imports torch: plans are compiled from these numbers, and :mod:`blockwalk.ranks.groups` makes process groups of
them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from blockwalk.plan.choices import MeshSettings


@dataclass(frozen=True, slots=True)
class Axis:
    """One step outwards: groups of ``inner`` ranks become groups of ``outer``."""

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
        """The ranks that differ from ``rank`` in this coordinate alone, in its order."""
        first = rank - self.coordinate(rank) * self.inner
        return tuple(first + i * self.inner for i in range(self.length))


def make_axes(mesh: MeshSettings) -> tuple[Axis, ...]:
    """The axes between the sizes that a mesh names: its three groups, its node and its world.

    Raises:
        ValueError: sizes that do not nest; the message names the settings.
    """
    named = {
        "z3": mesh.z3,
        "z2": mesh.z2,
        "z1": mesh.z1,
        "ranks_per_node": mesh.ranks_per_node,
        "world": mesh.world,
    }
    sizes = sorted({1, *named.values()})
    for small, large in itertools.pairwise(sizes):
        if large % small:
            what = {size: " = ".join(f"mesh.{key}" for key, value in named.items() if value == size) for size in sizes}
            raise ValueError(
                f"groups must be nested, and {what[small]} = {small} does not divide {what[large]} = {large};"
                " change mesh.z1, mesh.z2 or mesh.z3 so that each divides or is divided by mesh.ranks_per_node"
            )
    return tuple(
        Axis(small, large, crosses_nodes=small >= mesh.ranks_per_node) for small, large in itertools.pairwise(sizes)
    )


def between(axes: Sequence[Axis], inner: int, outer: int) -> tuple[Axis, ...]:
    """The axes from groups of ``inner`` ranks to groups of ``outer``, innermost first."""
    return tuple(axis for axis in axes if inner <= axis.inner and axis.outer <= outer)


def slice_of(axes: Sequence[Axis], rank: int, numel: int, size: int) -> tuple[int, int]:
    """First element and end of a rank's slice of a buffer of ``numel`` elements over its group of ``size`` ranks."""
    place = 0
    for axis in between(axes, 1, size):
        place = place * axis.length + axis.coordinate(rank)
    length = numel // size
    assert length * size == numel, f"{numel} elements do not divide into {size} slices"
    return place * length, (place + 1) * length


def gather_bytes(axes: Sequence[Axis], nbytes: int) -> int:
    """Bytes that one rank sends where slices are gathered over these axes, outermost first, into ``nbytes`` over the
    innermost's group; reducing over them, innermost first, sends as many."""
    total, piece = 0, nbytes
    for axis in axes:
        total += piece * (axis.length - 1) // axis.length
        piece //= axis.length
    return total


def forwards_at(mesh: MeshSettings, place: int, passes: int) -> range:
    """The forward passes of a zeroth-order step that are run at a place on the axis ``perturb``: consecutive ones, as many as
    at the places before it or one less."""
    most = -(-passes // mesh.perturb)
    longer = passes - mesh.perturb * (most - 1)
    first = place * most - max(0, place - longer)
    return range(first, first + most - (place >= longer))


def micro_batches_at(mesh: MeshSettings, place: int, cuts: int) -> range:
    """The parts of a global batch cut into ``cuts`` that are taken at a place on the axis ``data``: one of each micro-batch."""
    return range(place, cuts, mesh.data)

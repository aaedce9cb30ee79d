"""Oracle: closed forms of nested groups: disjoint, covering, each inside the next; and the bytes that a gather sends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.mesh import between, gather_bytes, make_axes, slice_of

pytestmark = pytest.mark.fast


def chain(draw: st.DrawFn) -> MeshSettings:
    z3, step2, step1, replicas = (draw(st.integers(1, 3)) for _ in range(4))
    z2, z1 = z3 * step2, z3 * step2 * step1
    world = z1 * replicas
    return MeshSettings(z1=z1, z2=z2, z3=z3, world=world, ranks_per_node=draw(st.sampled_from([1, z3, z2, z1, world])))


@given(st.composite(chain)())
def test_slices_tile_the_buffer_and_nest(mesh: MeshSettings) -> None:
    """Closed form: the slices of a group are disjoint, cover everything, and each holds those of the next larger group."""
    axes = make_axes(mesh)
    numel = mesh.world * 5
    for size in (mesh.z3, mesh.z2, mesh.z1, mesh.world):
        for lowest in range(0, mesh.world, size):
            pieces = sorted(slice_of(axes, rank, numel, size) for rank in range(lowest, lowest + size))
            assert pieces == [(i * numel // size, (i + 1) * numel // size) for i in range(size)]
    for rank in range(mesh.world):
        inner, outer = slice_of(axes, rank, numel, mesh.z3), slice_of(axes, rank, numel, mesh.z1)
        assert inner[0] <= outer[0] < outer[1] <= inner[1]
    sent = gather_bytes(between(axes, 1, mesh.world), numel)
    assert sent == sum(numel // a.inner - numel // a.outer for a in axes) == numel - numel // mesh.world


def test_groups_that_do_not_nest_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh.z3 = 2 does not divide mesh.ranks_per_node = 3"):
        make_axes(MeshSettings(z3=2, z2=6, z1=6, world=6, ranks_per_node=3))


@given(st.composite(chain)())
def test_ranks_that_differ_in_one_coordinate_are_one_group(mesh: MeshSettings) -> None:
    """Closed form: along each axis the world falls into groups that hold a rank at the place of its own coordinate, inside one
    node unless the axis crosses nodes; the coordinates together are the rank."""
    axes = make_axes(mesh)
    assert math.prod(axis.length for axis in axes) == mesh.world
    for rank in range(mesh.world):
        assert sum(axis.coordinate(rank) * axis.inner for axis in axes) == rank
    for axis in axes:
        groups = {axis.members(rank) for rank in range(mesh.world)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
        for group in groups:
            assert [axis.coordinate(rank) for rank in group] == list(range(axis.length))
            assert (len({rank // mesh.ranks_per_node for rank in group}) > 1) == axis.crosses_nodes

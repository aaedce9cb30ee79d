"""Oracle: closed forms of nested groups: disjoint, covering, each inside the next; and the bytes
that a gather sends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.mesh import (
    between,
    coordinates_of,
    gather_bytes,
    group_sizes,
    make_axes,
    named,
    names_of,
    ranks_over,
    reach,
    share_by_axis,
    slice_of,
    work_axes,
)
from tests.support.messages import refused

pytestmark = pytest.mark.fast


def chain(draw: st.DrawFn) -> MeshSettings:
    small, step2, step1, replicas = (draw(st.integers(1, 3)) for _ in range(4))
    middle = small * step2
    large = small * step2 * step1
    world = large * replicas
    return MeshSettings(
        groups=(f"small={small}", f"middle={middle}", f"large = {large}"),
        world=world,
        ranks_per_node=draw(st.sampled_from([1, small, middle, large, world])),
    )


@given(st.composite(chain)())
def test_slices_tile_the_buffer_and_nest(mesh: MeshSettings) -> None:
    """Closed form: the slices of a group are disjoint, cover everything, and each holds those of
    the next larger group."""
    axes = make_axes(mesh)
    numel = mesh.world * 5
    sizes = group_sizes(mesh)
    for size in sizes.values():
        for lowest in range(0, mesh.world, size):
            pieces = sorted(
                slice_of(axes, rank, numel, size) for rank in range(lowest, lowest + size)
            )
            assert pieces == [(i * numel // size, (i + 1) * numel // size) for i in range(size)]
    for rank in range(mesh.world):
        inner, outer = (slice_of(axes, rank, numel, sizes[name]) for name in ("small", "large"))
        assert inner[0] <= outer[0] < outer[1] <= inner[1]
    sent = gather_bytes(between(axes, 1, mesh.world), numel)
    assert (
        sent
        == sum(numel // a.inner - numel // a.outer for a in axes)
        == numel - numel // mesh.world
    )
    shares = share_by_axis(axes)
    for axis in axes:
        over = numel // axis.inner - numel // axis.outer
        assert shares[axis.name] * sent == pytest.approx(over)


def test_groups_that_do_not_nest_are_refused() -> None:
    with refused(ValueError, "pair 2 node 3"):
        make_axes(MeshSettings(groups=("pair=2",), world=6, ranks_per_node=3))
    with refused(ValueError, "many 12 6 world"):
        make_axes(MeshSettings(groups=("many=12",), world=6, ranks_per_node=3))
    for wrong in ("pair", "pair=0", "=2", "node=2", "data=2", "pair=²", "a×b=2"):
        with refused(ValueError, f"mesh.groups {wrong}"):
            make_axes(MeshSettings(groups=(wrong,), world=6, ranks_per_node=3))


@given(st.composite(chain)())
def test_an_axis_has_the_name_of_the_group_that_it_completes(mesh: MeshSettings) -> None:
    """Closed form: all axes up to a group's reach that group, and of those of one name the product
    is its ranks."""
    axes = make_axes(mesh)
    sizes = group_sizes(mesh)
    for axis in axes:
        assert sizes[axis.name] == axis.outer
        assert reach(between(axes, 1, axis.outer)) == (1, axis.outer)
    assert named(axes, names_of(axes)) == axes
    assert ranks_over(mesh, names_of(axes)) == mesh.world
    assert reach(()) == (1, 1)


def test_work_is_shared_over_axes_of_its_own() -> None:
    """Closed form: neighbours share the forwards; each pair of places on both axes is one
    rank's."""
    mesh = MeshSettings(world=6, ranks_per_node=3, perturb=3, data=2)
    assert names_of(work_axes(mesh)) == ("perturb", "data")
    places = [dict(coordinates_of(mesh, rank)) for rank in range(6)]
    assert [(place["perturb"], place["data"]) for place in places] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (0, 1),
        (1, 1),
        (2, 1),
    ]
    assert [(place["node"], place["world"]) for place in places] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (0, 1),
        (1, 1),
        (2, 1),
    ]


@given(st.composite(chain)())
def test_ranks_that_differ_in_one_coordinate_are_one_group(mesh: MeshSettings) -> None:
    """Closed form: along each axis the world falls into groups that hold a rank at the place of its
    own coordinate, inside one node unless the axis crosses nodes; the coordinates together are the
    rank."""
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

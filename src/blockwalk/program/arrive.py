"""The ways in which a part of a unit comes into its slot, and what is where in between.

:class:`Residency` is a value. An arrival writes the ops that bring one part, and answers the
residency after them; it depends on what came before (a slice that an update left out of date, one
that is kept on the device) and on facts of the plan. Rows of :mod:`blockwalk.program.residence`
name theirs. There are three ways:

- **fetched**: FETCH, from the host, the disk or a file map (*mapped*);
- **sliced** (zeroth order over a group): FETCH of this rank's slice, UPDATE, STORE (of
  trainables), then GATHER;
- **gathered** (backpropagation over ranks). A unit's parameters of one part are one flat buffer of
  n elements. Between uses a rank keeps its slice over the group of ``trainable`` (the *node slice*,
  where that is a node: on the device, or with ``cache.tier: host`` in host memory) and the slice
  over the group of ``optimizer_state`` beside its moments. Node slices are refreshed from the wider
  slices behind the update of their unit (:func:`refresh`): by ops without a slot, which may run on
  when the program has ended, until the next one's first use of the unit. Those that the adaptive
  cache keeps on the device are refreshed at that use instead, on their way to the slot; so are, by
  :func:`refresh`, those whose masters were changed from outside. Which of them are out of date
  (*dirty*) is known when the program is compiled, so that all ranks agree. Where parameters are
  spread as widely as optimizer states there is no node slice, and every use gathers the slices that
  are updated.

Source: Rajbhandari et al., "ZeRO" (2020); Wang et al., "ZeRO++" (2023); Zhang et al., "MiCS"
(2022)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.mesh import Axis, between, gather_bytes, make_axes, names_of, reach
from blockwalk.plan.placement import StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.costs import Pending
from blockwalk.program.flat_layout import has_node_slice, hosts_node_slice
from blockwalk.program.program import Bytes, Draft, Lane, OpKind, Pool, Sent
from blockwalk.program.unit_sizes import UnitSizes


@dataclass(frozen=True, slots=True)
class Occupant:
    """A unit in its slot."""

    slot: int
    emptied: tuple[int, ...] = ()
    """The op that emptied the slot for it."""
    ready: tuple[int, ...] = ()
    """The ops after which its parts are there, whole and up to date."""
    fills: tuple[int, ...] = ()
    """The ops that must be done with the slot before it is emptied, beside those that compute."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The places of parameters at one point of a program."""

    occupants: Mapping[int, Occupant] = field(default_factory=dict)
    """Units that have a slot."""
    emptied: Mapping[int, int] = field(default_factory=dict)
    """The op that last emptied each slot."""
    dirty: frozenset[int] = frozenset()
    """Units whose trainables were updated since their node slice was gathered."""
    kept: frozenset[tuple[int, StateKind]] = frozenset()
    """Node slices that stay on the device from their first use to their last."""
    refreshed: Mapping[int, int] = field(default_factory=dict)
    """The op that last refreshed each unit's trainable node slice."""

    def takes(self, unit: int, slot: int) -> Residency:
        """Return the residency once a unit has taken a slot."""
        emptied = (self.emptied[slot],) if slot in self.emptied else ()
        return replace(self, occupants={**self.occupants, unit: Occupant(slot, emptied)})

    def arrived(self, unit: int, ready: int, *others: int) -> Residency:
        """Return the residency once a part of a unit is in its slot, after the op ``ready``; the
        other ops read the slot too."""
        occupant = self.occupants[unit]
        occupant = replace(
            occupant,
            ready=(*occupant.ready, ready),
            fills=(*occupant.fills, ready, *others),
        )
        return replace(self, occupants={**self.occupants, unit: occupant})

    def updated(self, unit: int) -> Residency:
        """Return the residency once a unit's trainables are newer than their node slice."""
        return replace(self, dirty=self.dirty | {unit})

    def brought_up_to_date(self, unit: int, op: int) -> Residency:
        """Return the residency once an op has refreshed a unit's trainable node slice."""
        return replace(self, dirty=self.dirty - {unit}, refreshed={**self.refreshed, unit: op})

    def left(self, unit: int, op: int, freed: Collection[StateKind]) -> Residency:
        """Return the residency once ``op`` has emptied a unit's slot and freed those of its
        parts that stayed on the device."""
        return replace(
            self,
            occupants={u: occupant for u, occupant in self.occupants.items() if u != unit},
            emptied={**self.emptied, self.occupants[unit].slot: op},
            kept=self.kept - {(unit, part) for part in freed},
        )


@dataclass(frozen=True, slots=True)
class Ways:
    """The facts that decide how parts arrive."""

    sizes: UnitSizes
    pending: Pending = Pending()
    gathers: bool = True
    """False where nothing computes: a flush brings slices up to date, and nobody needs the
    others'."""
    keeps: frozenset[tuple[int, StateKind]] = frozenset()
    """The adaptive cache: node slices that stay on the device
    (:mod:`blockwalk.program.adaptive_cache`)."""


def fetched(
    ways: Ways, unit: int, part: StateKind, residency: Residency, draft: Draft, takes: Bytes = ()
) -> Residency:
    """FETCH a part from its tier; it ``takes`` memory beside the slot."""
    sizes = ways.sizes
    occupant = residency.occupants[unit]
    fetch = draft.op(
        OpKind.FETCH,
        unit,
        Lane.FETCH,
        occupant.emptied,
        part=part,
        nbytes=sizes.part_bytes(sizes.reads(unit), part),
        slot=occupant.slot,
        takes=takes,
    )
    return residency.arrived(unit, fetch)


def mapped(ways: Ways, unit: int, part: StateKind, residency: Residency, draft: Draft) -> Residency:
    """FETCH the pages of a part in a file map."""
    nbytes = ways.sizes.part_bytes(ways.sizes.reads(unit), part)
    return fetched(ways, unit, part, residency, draft, ((Pool.MAPPED, nbytes),))


def sliced(ways: Ways, unit: int, part: StateKind, residency: Residency, draft: Draft) -> Residency:
    """FETCH this rank's slice of a part, apply the updates that wait for it, and GATHER the
    others'."""
    sizes = ways.sizes
    occupant = residency.occupants[unit]
    ranks = sizes.ranks(part)
    entries = ways.pending.entries if part is StateKind.TRAINABLE else 0
    nbytes, gathered_bytes = sizes.slice_bytes(sizes.model.units[unit], part)
    ready = draft.op(
        OpKind.FETCH,
        unit,
        Lane.FETCH,
        occupant.emptied,
        part=part,
        nbytes=nbytes,
        slot=occupant.slot,
    )
    stores = []
    if entries:
        ready = draft.op(OpKind.UPDATE, unit, Lane.INTRA, [ready], part=part, entries=entries)
        if ways.pending.flush or not ways.gathers:
            store = draft.op(OpKind.STORE, unit, Lane.STORE, [ready], part=part, nbytes=nbytes)
            stores.append(store)
    if ways.gathers:
        ready = draft.op(
            OpKind.GATHER,
            unit,
            Lane.INTRA,
            [ready],
            part=part,
            nbytes=(ranks - 1) * gathered_bytes,
            slot=occupant.slot,
            axes=names_of(between(make_axes(sizes.plan.mesh), 1, ranks)),
        )
    return residency.arrived(unit, ready, *stores)


def gathered(
    ways: Ways, unit: int, part: StateKind, residency: Residency, draft: Draft
) -> Residency:
    """GATHER a part from slices of groups of ranks, the nearest that is up to date."""
    plan = ways.sizes.plan
    key = (unit, part)
    occupant = residency.occupants[unit]
    hosted = hosts_node_slice(plan)
    trains = part is StateKind.TRAINABLE
    nbytes = ways.sizes.node_bytes(unit, part)
    op = partial(draft.op, unit=unit, part=part, slot=occupant.slot)
    gather = partial(_gather, ways, unit, part, draft)
    node_slice = list(occupant.emptied)  # the ops after which it may be read
    if key in residency.kept:
        whole_part = gather(node_slice, (1, plan.parameter_ranks), occupant.slot, from_device=True)
        return residency.arrived(unit, whole_part)
    caches = []
    dirty = has_node_slice(plan) and trains and unit in residency.dirty
    if dirty and key in ways.keeps:  # it stays out of date on the host
        node_slice = [gather(node_slice, node_span(plan), occupant.slot)]
    else:
        if dirty:
            residency = residency.brought_up_to_date(unit, refresh(ways, unit, draft, ()))
        if trains and unit in residency.refreshed:
            node_slice.append(residency.refreshed[unit])
        if hosted:
            node_slice = [op(OpKind.FETCH, lane=Lane.FETCH, deps=node_slice, nbytes=nbytes)]
    if key in ways.keeps:
        residency = replace(residency, kept=residency.kept | {key})
        takes = ((Pool.DEVICE, nbytes),)
        caches.append(
            op(OpKind.CACHE, lane=Lane.STORE, deps=node_slice, takes=takes, device_slice=True)
        )
    whole_part = gather(node_slice, (1, plan.parameter_ranks), occupant.slot)
    return residency.arrived(unit, whole_part, *caches)


def node_span(plan: Plan) -> tuple[int, int]:
    """Return the ranks that parameters are spread over, and those that masters are: a node slice is
    gathered from the first to the second."""
    return plan.parameter_ranks, plan.optimizer_ranks


def refresh(ways: Ways, unit: int, draft: Draft, after: Sequence[int]) -> int:
    """Gather a unit's trainable node slice from the wider slices to where it lies, and return the
    op that completes it. Behind an accelerator a slice of host memory is gathered on the device, in
    room of its own for that time."""
    return _gather(ways, unit, StateKind.TRAINABLE, draft, after, node_span(ways.sizes.plan), -1)


def _gather(
    ways: Ways,
    unit: int,
    part: StateKind,
    draft: Draft,
    after: Sequence[int],
    span: tuple[int, int],
    slot: int,
    *,
    from_device: bool = False,
) -> int:
    """Gather slices over groups of the second size of a span into those over its first, outermost
    axes first, and return the op that completes them."""
    sizes = ways.sizes
    nbytes = sizes.layout(unit, part).nbytes
    axes_of_span = between(make_axes(sizes.plan.mesh), *span)
    apart = slot < 0 and hosts_node_slice(sizes.plan) and sizes.device != "cpu"
    deps = list(after)
    for lane, axes in reversed(by_lane(axes_of_span) or [(Lane.INTRA, ())]):
        inner, outer = reach(axes)
        op = draft.op(
            OpKind.GATHER,
            unit,
            lane,
            deps,
            part=part,
            nbytes=gather_bytes(axes, nbytes // inner),
            slot=slot,
            axes=names_of(axes),
            device_slice=from_device and outer == span[1],
            transient=nbytes // inner if apart else 0,
        )
        deps = [op]
    return deps[0]


def exchanged(mesh: MeshSettings, axis: Axis, nbytes: int) -> tuple[Sent, ...]:
    """Return the bytes of a rank that sends every other of an axis as many, by the lanes on the way
    to those of its node and of other nodes."""
    others = axis.length - 1
    near = min(axis.outer, mesh.ranks_per_node) // axis.inner - 1
    inside = nbytes * near // others
    over = ((Lane.INTRA, near, inside), (Lane.INTER, others - near, nbytes - inside))
    return tuple(Sent(axis.name, lane, sent) for lane, ranks, sent in over if ranks)


def by_lane(axes: Sequence[Axis]) -> list[tuple[Lane, tuple[Axis, ...]]]:
    """Return axes, innermost first, in pieces that one lane serves."""
    pieces = groupby(axes, key=lambda axis: axis.crosses_nodes)
    return [(Lane.INTER if crosses else Lane.INTRA, tuple(piece)) for crosses, piece in pieces]

"""The ways in which a part of a unit comes into its slot, and what is where in between.

:class:`Residency` is a value. :func:`arrive` answers the ops that bring one part, and the residency
after them; it depends on what came before (a slice that an update left out of date, one that is
kept on the device) and on facts of the plan, and changes nothing. There are three ways:

- **fetched**: FETCH, from the host, the disk or a file map;
- **in slices** (zeroth order over a group): FETCH of this rank's slice, UPDATE, STORE (of
  trainables), then GATHER;
- **gathered** (backpropagation over ranks). A unit's parameters of one part are one flat buffer of
  n elements. Between uses a rank keeps its slice over the group of ``trainable`` (the *node slice*,
  where that is a node: on the device, or with ``cache.tier: host`` in host memory) and the slice
  over the group of ``optimizer_state`` beside its moments. Node slices are refreshed from the wider
  slices at the first use after an update, and never else: which of them are out of date (*dirty*)
  is known when the program is compiled, so that all ranks agree. Where parameters are spread as
  widely as optimizer states there is no node slice, and every use gathers the slices that are
  updated.

Source: Rajbhandari et al., "ZeRO" (2020); Wang et al., "ZeRO++" (2023); Zhang et al., "MiCS"
(2022)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from blockwalk.plan.mesh import Axis, between, gather_bytes, make_axes, names_of, reach
from blockwalk.plan.placement import StateKind
from blockwalk.program.costs import Pending
from blockwalk.program.flat_layout import has_node_slice, hosts_node_slice
from blockwalk.program.placements import Placements
from blockwalk.program.program import Draft, Lane, Op, OpKind, Pool


@dataclass(frozen=True, slots=True)
class Held:
    """A unit in its slot."""

    slot: int
    after: tuple[int, ...] = ()
    """The op that emptied the slot."""
    ready: tuple[int, ...] = ()
    """The ops after which its parts are there, whole and up to date."""
    fills: tuple[int, ...] = ()
    """The ops that must be done with the slot before it is emptied, beside those that compute."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The places of parameters at one point of a program."""

    held: Mapping[int, Held] = field(default_factory=dict)
    """Units that have a slot."""
    emptied: Mapping[int, int] = field(default_factory=dict)
    """The op that last emptied each slot."""
    dirty: frozenset[int] = frozenset()
    """Units whose trainables were updated since their node slice was gathered."""
    kept: frozenset[tuple[int, StateKind]] = frozenset()
    """Node slices that stay on the device from their first use to their last."""
    cached: Mapping[int, int] = field(default_factory=dict)
    """The op that last wrote each unit's trainable node slice to the host."""

    def takes(self, unit: int, slot: int) -> Residency:
        after = (self.emptied[slot],) if slot in self.emptied else ()
        return replace(self, held={**self.held, unit: Held(slot, after)})

    def arrived(self, unit: int, ready: int, *others: int) -> Residency:
        held = self.held[unit]
        held = replace(held, ready=(*held.ready, ready), fills=(*held.fills, ready, *others))
        return replace(self, held={**self.held, unit: held})

    def updated(self, unit: int) -> Residency:
        return replace(self, dirty=self.dirty | {unit})

    def left(self, unit: int, op: int, freed: Collection[StateKind]) -> Residency:
        held = {each: its for each, its in self.held.items() if each != unit}
        kept = self.kept - {(unit, part) for part in freed}
        return replace(
            self, held=held, emptied={**self.emptied, self.held[unit].slot: op}, kept=kept
        )


@dataclass(frozen=True, slots=True)
class Ways:
    """The facts that decide how parts arrive."""

    places: Placements
    pending: Pending = Pending()
    gathers: bool = True
    """False where nothing computes: a flush brings slices up to date, and nobody needs the
    others'."""
    keeps: frozenset[tuple[int, StateKind]] = frozenset()
    """The adaptive cache: node slices that stay on the device
    (:mod:`blockwalk.program.adaptive_cache`)."""


def arrive(
    ways: Ways, unit: int, part: StateKind, residency: Residency, start: int
) -> tuple[list[Op], Residency]:
    """Return the ops, numbered from ``start``, that bring a part of a unit into the slot that the
    unit holds, and the residency after them."""
    draft = Draft(start)
    places = ways.places
    own = _in_slices if places.ranks(part) > 1 else _fetched
    way = _gathered if places.sharded else own
    return draft.ops, way(ways, unit, part, residency, draft)


def _fetched(
    ways: Ways, unit: int, part: StateKind, residency: Residency, draft: Draft
) -> Residency:
    places = ways.places
    held = residency.held[unit]
    nbytes = places.part_bytes(places.reads(unit), part)
    takes = ((Pool.MAPPED, nbytes),) if places.mapped(part) else ()
    fetch = draft.op(
        OpKind.FETCH,
        unit,
        Lane.FETCH,
        held.after,
        part=part,
        nbytes=nbytes,
        slot=held.slot,
        takes=takes,
    )
    return residency.arrived(unit, fetch)


def _in_slices(
    ways: Ways, unit: int, part: StateKind, residency: Residency, draft: Draft
) -> Residency:
    places = ways.places
    held = residency.held[unit]
    ranks = ways.places.ranks(part)
    entries = ways.pending.entries if part is StateKind.TRAINABLE else 0
    own, gathered = places.slice_bytes(places.model.units[unit], part)
    done = draft.op(
        OpKind.FETCH, unit, Lane.FETCH, held.after, part=part, nbytes=own, slot=held.slot
    )
    stored = []
    if entries:
        done = draft.op(OpKind.UPDATE, unit, Lane.INTRA, [done], part=part, entries=entries)
        if ways.pending.flush or not ways.gathers:
            stored = [draft.op(OpKind.STORE, unit, Lane.STORE, [done], part=part, nbytes=own)]
    if ways.gathers:
        nbytes = (ranks - 1) * gathered
        axes = names_of(between(make_axes(places.plan.mesh), 1, ranks))
        done = draft.op(
            OpKind.GATHER,
            unit,
            Lane.INTRA,
            [done],
            part=part,
            nbytes=nbytes,
            slot=held.slot,
            axes=axes,
        )
    return residency.arrived(unit, done, *stored)


def _gathered(
    ways: Ways, unit: int, part: StateKind, residency: Residency, draft: Draft
) -> Residency:
    places = ways.places
    plan = ways.places.plan
    key = (unit, part)
    held = residency.held[unit]
    hosted = hosts_node_slice(plan)
    trains = part is StateKind.TRAINABLE
    nbytes = places.node_bytes(unit, part)
    at = list(held.after)
    caches = []

    def gather(
        after: Sequence[int], inner: int, outer: int, slot: int, *, kept: bool = False
    ) -> int:
        whole = places.layout(unit, part).nbytes
        at = list(after)
        for lane, axes in reversed(
            by_lane(between(make_axes(plan.mesh), inner, outer)) or [(Lane.INTRA, ())]
        ):
            few, many = reach(axes)
            moved = gather_bytes(axes, whole // few)
            names = names_of(axes)
            first = kept and many == outer
            op = draft.op(
                OpKind.GATHER,
                unit,
                lane,
                at,
                part=part,
                nbytes=moved,
                slot=slot,
                axes=names,
                kept=first,
            )
            at = [op]
        return at[0]

    if key in residency.kept:
        return residency.arrived(unit, gather(at, 1, plan.parameter_ranks, held.slot, kept=True))
    if has_node_slice(plan) and trains and unit in residency.dirty:
        slot = held.slot if hosted else -1
        at = [gather(at, plan.parameter_ranks, plan.optimizer_ranks, slot), *(() if hosted else at)]
        if key not in ways.keeps:  # else it stays out of date on the host
            residency = replace(residency, dirty=residency.dirty - {unit})
            if hosted:
                caches = [
                    draft.op(
                        OpKind.CACHE, unit, Lane.STORE, at, part=part, nbytes=nbytes, slot=held.slot
                    )
                ]
                residency = replace(residency, cached={**residency.cached, unit: caches[0]})
    elif hosted:
        after = [*at, *([residency.cached[unit]] if trains and unit in residency.cached else [])]
        at = [
            draft.op(
                OpKind.FETCH, unit, Lane.FETCH, after, part=part, nbytes=nbytes, slot=held.slot
            )
        ]
    if key in ways.keeps:
        residency = replace(residency, kept=residency.kept | {key})
        takes = ((Pool.DEVICE, nbytes),)
        caches.append(
            draft.op(
                OpKind.CACHE,
                unit,
                Lane.STORE,
                at,
                part=part,
                slot=held.slot,
                takes=takes,
                kept=True,
            )
        )
    return residency.arrived(unit, gather(at, 1, plan.parameter_ranks, held.slot), *caches)


def by_lane(axes: Sequence[Axis]) -> list[tuple[Lane, tuple[Axis, ...]]]:
    """Return axes, innermost first, in pieces that one lane serves."""
    pieces = groupby(axes, key=lambda axis: axis.crosses_nodes)
    return [(Lane.INTER if crosses else Lane.INTRA, tuple(each)) for crosses, each in pieces]

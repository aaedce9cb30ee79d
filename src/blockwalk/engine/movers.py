"""Movers: the work of the ops that bring a part of a unit to its turn, and let it go again.

The row of a residence names its mover (:attr:`blockwalk.program.residence.ResidenceFacts.mover`).
The engine looks it up for the unit and the kind of state that an op names, and hands it the home of
that state. A home has what movers work on: slots, file maps, copies, groups of ranks. It does not
ask how a unit lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from blockwalk.engine.home import NO_JOB, Job
from blockwalk.program.program import Op, OpKind

Mover = Callable[[Any, Op], Job]
"""A function of a home and an op that returns the op's work. Where it moves to is settled at
once."""


class Visited(Protocol):
    """A home of which units visit slots."""

    def bring(self, op: Op) -> Job:
        """FETCH: copy to the slot what this process has of the unit."""

    def write_back(self, op: Op) -> Job:
        """STORE: copy it from the slot to where it lies between turns."""

    def leave(self, op: Op) -> Job:
        """EVICT: let go of the slot, and of pages that were read for it."""


class Gathered(Visited, Protocol):
    """A home of which ranks hold slices."""

    def complete(self, op: Op) -> Job:
        """GATHER: complete a unit, or a slice of it, from the slices of other ranks."""


class Cached(Gathered, Protocol):
    """A home that keeps slices near the device."""

    def keep(self, op: Op) -> Job:
        """CACHE: copy a slice from the slot to where it is kept."""


class Paged(Protocol):
    """A home of which units are used where they lie in file maps."""

    def will_need(self, op: Op) -> Job:
        """FETCH: make pages resident, and put together what no file has whole."""

    def dont_need(self, op: Op) -> Job:
        """STORE: hand pages that were written to the kernel."""

    def leave(self, op: Op) -> Job:
        """EVICT: give the pages back."""


class Landed(Protocol):
    """A home of masters behind an accelerator, of which the device has copies."""

    def bring(self, op: Op) -> Job:
        """FETCH: copy masters to the device."""

    def land(self, op: Op) -> Job:
        """STORE: copy gradients to their place in host memory."""


def stays(_home: object, _op: Op) -> Job:
    """Move nothing: a part is where it is used."""
    return NO_JOB


def mapped(home: Paged, op: Op) -> Job:
    """Ask for the pages of a file map, and let them go."""
    match op.kind:
        case OpKind.FETCH:
            return home.will_need(op)
        case OpKind.STORE:
            return home.dont_need(op)
    return home.leave(op)


def streamed(home: Visited, op: Op) -> Job:
    """Copy a part to its slot, and back where it was changed there."""
    match op.kind:
        case OpKind.FETCH:
            return home.bring(op)
        case OpKind.STORE:
            return home.write_back(op)
    return home.leave(op)


def sliced(home: Gathered, op: Op) -> Job:
    """Copy this rank's slice to its slot and back, and complete the part from the others'."""
    return home.complete(op) if op.kind is OpKind.GATHER else streamed(home, op)


def gathered(home: Cached, op: Op) -> Job:
    """Complete a part from slices of groups of ranks, and keep a slice of it."""
    return home.keep(op) if op.kind is OpKind.CACHE else sliced(home, op)


def landed(home: Landed, op: Op) -> Job:
    """Copy masters to the device, where they are not changed, and gradients from it."""
    match op.kind:
        case OpKind.FETCH:
            return home.bring(op)
        case OpKind.STORE:
            return home.land(op)
    return NO_JOB

"""Lower turns to ops where the ranks of a node hold one copy of the streamed trainables, each a slice of every bucket.

A rank fetches its own slice into the slot, with the states beside it, brings both up to date, stores them, and then the
slices are gathered: no rank fetches, updates or stores more than M/n. All of it runs ahead of the unit's turn, the update
and the gather on the intra-node lane, so that the compute lane waits for nothing but the gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockwalk.compile.builder import Builder
from blockwalk.compile.inputs import Pending
from blockwalk.compile.placement import section_bytes
from blockwalk.program import Lane, OpKind
from blockwalk.state import StateKind, UnitSpec


@dataclass(slots=True)
class SliceBuilder(Builder):
    """FETCH → UPDATE → STORE and GATHER for each streamed bucket of trainables; everything else as in :class:`Builder`."""

    pending: Pending = Pending()
    gathers: bool = True
    """False where nothing computes: a flush brings slices up to date, and nobody needs the others'."""

    def arrives_updated(self, unit: int) -> bool:
        return self.streams(unit, StateKind.TRAINABLE)

    def _fetch(self, unit: int, part: StateKind, slot: int, after: Sequence[int]) -> int:
        """The op after which a part is there, whole and up to date."""
        if part is not StateKind.TRAINABLE:
            return Builder._fetch(self, unit, part, slot, after)
        ranks = self.plan.mesh.slice
        own, share = section_bytes(self.plan, self.model.units[unit])
        done = self.op(OpKind.FETCH, unit, Lane.FETCH, after, part=part, nbytes=own, slot=slot)
        if self.pending.entries:
            done = self.op(OpKind.UPDATE, unit, Lane.INTRA, [done], part=part, entries=self.pending.entries)
            if self.pending.flush or not self.gathers:
                self.op(OpKind.STORE, unit, Lane.STORE, [done], part=part, nbytes=own)
        if not self.gathers:
            return done
        return self.op(
            OpKind.GATHER, unit, Lane.INTRA, [done], part=part, nbytes=(ranks - 1) * share, slot=slot, span=(1, ranks)
        )

    def slot_part(self, unit: UnitSpec, part: StateKind) -> int:
        """The bucket; with scales a row the stage beside it; with states the section."""
        if part is not StateKind.TRAINABLE:
            return Builder.slot_part(self, unit, part)
        section, share = section_bytes(self.plan, unit)
        scaled = self.plan.trainable.codec.encoded
        return self.plan.mesh.slice * share * (2 if scaled else 1) + (section if section > share else 0)

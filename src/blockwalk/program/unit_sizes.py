"""Bytes of a model's parts under a plan: on their tiers, in slots, in slices, and of what is kept
beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockwalk.plan.estimators import HomeFacts
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.plan.placement import DTYPE_BYTES, Placement, StateKind
from blockwalk.plan.plan import Plan
from blockwalk.program.flat_layout import FlatLayout, part_layout
from blockwalk.program.slicing import slice_size
from blockwalk.program.state_sizes import (
    bucket_bytes,
    compute_dtype,
    epilogue_reads,
    slice_bytes,
)


@dataclass(slots=True)
class UnitSizes:
    """The sizes of one plan and one model on a device."""

    plan: Plan
    model: ModelSpec
    device: str
    """``cpu`` or ``cuda``. On a CPU, files are mapped instead of copied."""
    last: int = field(init=False)
    """The epilogue's index."""
    home: HomeFacts = field(init=False)
    """The row of the home that trainables have between their turns."""
    few: bool = field(init=False)
    """True where the trainables of all blocks together are fewer than one block's parameters
    (adapters are): they stay on the device whatever their tier, for less than a slot, instead of
    travelling with their blocks."""
    kept: frozenset[int] = field(init=False)
    """Blocks that stay on the device for good: ``mezo`` is the end where that is all of them,
    ``zo2`` the one with none."""
    _layouts: dict[tuple[int, StateKind], FlatLayout] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.last = len(self.model.blocks) + 1
        self.home = self.plan.home
        largest = max(block.numel() for block in self.model.blocks)
        self.few = self.model.numel(trainable=True) < largest
        resident = evenly(len(self.model.blocks))[: max(self.plan.resident, 0)]
        self.kept = frozenset(1 + block for block in resident)

    @property
    def trained(self) -> list[int]:
        """Units with trainable parameters."""
        return [u for u, unit in enumerate(self.model.units) if unit.numel(trainable=True)]

    def placement(self, part: StateKind) -> Placement:
        """Return the placement of frozen or of trainable parameters."""
        return self.plan.frozen if part is StateKind.FROZEN else self.plan.trainable

    def ranks(self, part: StateKind) -> int:
        """Return ranks that hold one copy of a part of the streamed units together, each a slice; 1
        where none do."""
        return self.home.slice_ranks(self.plan, part)

    def reads(self, index: int) -> UnitSpec:
        """Return a unit with all that its turn reads: an epilogue whose head is tied reads the
        prologue's weight as well."""
        return self.model.units[index] if index != self.last else epilogue_reads(self.model)

    def slice_bytes(self, unit: UnitSpec, part: StateKind) -> tuple[int, int]:
        """Return bytes of one rank's slice of a part that ranks hold together, and of the
        parameters in it, which are gathered."""
        if part is StateKind.TRAINABLE:
            return slice_bytes(self.plan, unit)
        nbytes = slice_size(self.memory_bytes(unit), self.ranks(part))
        return nbytes, nbytes

    def assembled_bytes(self, unit: int) -> int:
        """Return bytes of a slot for those of a block's parameters in file maps that are assembled
        at its turn."""
        if unit in (0, self.last):
            return 0
        codec = self.plan.frozen.codec
        return self._computed([p for p in self.model.units[unit].params if p.whole_in(codec)])

    def layout(self, unit: int, part: StateKind) -> FlatLayout:
        """Return the places of a part's parameters in its flat buffer over ranks."""
        if (unit, part) not in self._layouts:
            layout = part_layout(self.plan, self.model, self.model.units[unit], part)
            self._layouts[unit, part] = layout
        return self._layouts[unit, part]

    def node_bytes(self, unit: int, part: StateKind) -> int:
        """Return bytes of one rank's slice of a part over the group of its parameters."""
        return self.layout(unit, part).nbytes // self.plan.parameter_ranks

    def _computed(self, params: Sequence[ParamSpec]) -> int:
        """Return bytes of parameters in the compute dtype."""
        return sum(p.numel for p in params) * DTYPE_BYTES[compute_dtype(self.plan, self.model)]

    def part_bytes(self, unit: UnitSpec, part: StateKind) -> int:
        """Return bytes of a unit's frozen or trainable parameters on their tier: encoded; in memory
        see :meth:`memory_bytes`."""
        placement = self.placement(part)
        if part is StateKind.FROZEN and not placement.tier.facts.mapped:
            return self.memory_bytes(unit)
        if part is StateKind.TRAINABLE and self.home.states_inside:
            return bucket_bytes(self.plan, unit)
        return unit.nbytes(placement.codec, trainable=part is StateKind.TRAINABLE)

    def memory_bytes(self, unit: UnitSpec) -> int:
        """Return bytes of a unit's frozen parameters in memory (slot or resident): experts that are
        not encoded take the compute dtype."""
        codec = self.plan.frozen.codec
        dense = [p for p in unit.part(False) if not p.stored_in(codec).encoded]
        experts = [p for p in dense if p.assembled or len(p.shape) > 2]
        as_stored = sum(p.nbytes_in(codec) for p in unit.part(False) if p not in experts)
        return self._computed(experts) + as_stored

    def state_bytes(self, unit: int) -> int:
        """Return bytes of a unit's optimizer states."""
        return 4 * len(self.plan.update_rule.states) * self.model.units[unit].numel(trainable=True)

    def master_bytes(self, unit: int) -> int:
        """Return bytes of a unit's masters: its trainables in their codec."""
        return self.model.units[unit].nbytes(self.plan.trainable.codec, trainable=True)

    def undo_bytes(self, unit: int) -> int:
        """Return bytes that a unit's update at its turn copies, for a step that may still be
        refused."""
        if not self.plan.update.at_turn:
            return 0
        return self.master_bytes(unit) + self.state_bytes(unit)

    def gradient_bytes(self, unit: int) -> int:
        """Float32 bytes of the gradients that a turn of a unit adds to: a tied head's are the
        prologue's own too."""
        return 4 * self.reads(unit).numel(trainable=True)


def evenly(count: int) -> list[int]:
    """Return 0 to ``count`` − 1 in van der Corput's order: every prefix is evenly spread, so
    resident blocks alternate with fetched ones, and transfers hide behind them.

    >>> evenly(6)
    [0, 3, 1, 4, 2, 5]
    """
    bits = max(count - 1, 0).bit_length()
    mirrored = (int(f"{k:0{bits}b}"[::-1], 2) if bits else 0 for k in range(1 << bits))
    return list(dict.fromkeys(place * count >> bits for place in mirrored))[:count]

"""Units whose trainables the ranks of a node hold together: each rank a section of every unit.

    section    a share of the parameters, and behind it the states beside that share: what one rank fetches, updates, stores
    stage      the ranks' shares side by side, as they are gathered; a state is read by the update alone and stays at home
    bucket     the parameters as a forward reads them

Plain numbers are cut at equal bytes of the bucket, so that the stage is the bucket. A codec with a scale a row is cut
between rows, since a scale belongs to one update: there the stage is copied into the bucket after the gather.

S bytes of a section, G of its share of the parameters, n ranks, P bytes of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from blockwalk.engine.cells import STATE, Cell, Initial, fill
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from blockwalk.tiers.block_store.store import ALIGN, StoredParam, StoredUnit

if TYPE_CHECKING:
    from blockwalk.numerics.codecs.weights import Weight


SECTION = f"{STATE}section"
"""Behind a unit's name: its section as one parameter of a store."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive elements of one tensor in a section."""

    param: StoredParam
    """The tensor, where it lies in the unit's own bucket, in which each parameter's states follow it."""
    first: int
    last: int
    """Elements; of a codec with scales whole rows."""
    at: int
    """Where they begin in the section."""

    @property
    def layout(self) -> Layout:
        """Of the piece by itself."""
        whole, count = self.param.layout(32), self.last - self.first
        return replace(whole, shape=(count // whole.columns, whole.columns) if whole.groups else (count,))

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def runs(self, start: int) -> Iterator[tuple[int, int, int]]:
        """(place in the section, place in a bucket whose tensor begins at ``start``, bytes): its scales, and its codes."""
        whole, own = self.param.layout(32), self.layout
        scale, size = own.groups * own.scale_dtype.itemsize, own.code_dtype.itemsize
        if scale:
            yield self.at, start + self.first // whole.columns * scale, own.scale_bytes
        yield self.at + own.scale_bytes, start + whole.scale_bytes + self.first * size, own.nbytes - own.scale_bytes


class Sections:
    """How one unit is cut.

    Args:
        unit: as one process would hold it, states beside their parameters.
        count: ranks.
    """

    def __init__(self, unit: StoredUnit, count: int) -> None:
        self.unit, self.count = unit, count
        params = [param for param in unit.params if STATE not in param.name]
        self.apart = not all(param.dense for param in params)
        """Whether the stage is not the bucket."""
        step = ALIGN if self.apart else ALIGN * count
        placed, end = [], 0
        for param in params:
            placed.append(replace(param, offset=end))
            end = _aligned(end + param.nbytes)
        self.bucket = replace(unit, nbytes=-(-end // step) * step, params=tuple(placed))
        shares = [self._share(place) for place in range(count)]
        self.gathered = max((_aligned(share[-1].at + share[-1].nbytes) for share in shares if share), default=0)
        if not self.apart:
            self.gathered = self.bucket.nbytes // count
        self.pieces = [[*share, *self._states(share)] for share in shares]
        ends = [_aligned(each[-1].at + each[-1].nbytes) for each in self.pieces if each]
        self.nbytes = max([self.gathered, *ends])
        """S."""

    def _share(self, place: int) -> list[Piece]:
        """A rank's share of the parameters."""
        own = {param.name: param for param in self.unit.params}
        low, high = place * self.bucket.nbytes // self.count, (place + 1) * self.bucket.nbytes // self.count
        pieces, end = [], 0
        for param in self.bucket.params:
            layout = param.layout(32)
            if self.apart:
                first, last = (layout.rows * i // self.count * layout.columns for i in (place, place + 1))
                at = end
            else:
                size = layout.code_dtype.itemsize
                first = max(low - param.offset, 0) // size
                last = min(high - param.offset, param.nbytes) // size
                at = param.offset + first * size - low
            if first < last:
                pieces.append(Piece(own[param.name], first, last, at))
                end = _aligned(at + pieces[-1].nbytes)
        return pieces

    def _states(self, share: Sequence[Piece]) -> list[Piece]:
        """The states beside a share."""
        pieces, end = [], self.gathered
        for piece in share:
            for param in self.unit.params:
                if param.name.startswith(piece.param.name + STATE):
                    pieces.append(Piece(param, piece.first, piece.last, end))
                    end = _aligned(end + pieces[-1].nbytes)
        return pieces

    # ---- in a slot --------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes of a slot: the bucket, the stage where it is another, and the section where it is more than a share."""
        stage = self.count * self.gathered if self.apart else 0
        return self.bucket.nbytes + stage + (self.nbytes if self.nbytes > self.gathered else 0)

    def stage(self, slot_P: torch.Tensor) -> torch.Tensor:
        start = self.bucket.nbytes if self.apart else 0
        return slot_P[start : start + self.count * self.gathered]

    def section(self, slot_P: torch.Tensor, place: int) -> torch.Tensor:
        """A rank's section in a slot (uint8 [room])."""
        if self.nbytes > self.gathered:
            return slot_P[self.room - self.nbytes : self.room]
        return self.stage(slot_P)[place * self.gathered : (place + 1) * self.gathered]

    def lend(self, slot_P: torch.Tensor, place: int) -> torch.Tensor:
        """The stage with this rank's share in it, ready to be gathered."""
        stage_P = self.stage(slot_P)
        if self.nbytes > self.gathered:
            own_G = self.section(slot_P, place)[: self.gathered]
            stage_P[place * self.gathered : (place + 1) * self.gathered].copy_(own_G)
        return stage_P

    def assemble(self, slot_P: torch.Tensor) -> None:
        """Make the bucket of a gathered stage."""
        if self.apart:
            offsets = {param.name: param.offset for param in self.bucket.params}
            for place, stage_G in enumerate(self.stage(slot_P).chunk(self.count)):
                for piece in self.pieces[place]:
                    if piece.param.name in offsets:
                        _copy(piece.runs(offsets[piece.param.name]), stage_G, slot_P)

    # ---- between a section and the whole unit -----------------------------------------------------------------------

    def cut(self, whole_P: torch.Tensor, place: int) -> torch.Tensor:
        """A rank's section, uint8 [S], of a unit as one process would hold it."""
        section_S = torch.zeros(self.nbytes, dtype=torch.uint8)
        for piece in self.pieces[place]:
            for at, there, nbytes in piece.runs(piece.param.offset):
                section_S[at : at + nbytes] = whole_P[there : there + nbytes]
        return section_S

    def join(self, sections_P: torch.Tensor) -> torch.Tensor:
        """The unit as one process would hold it, of all sections side by side (uint8 [n·S])."""
        whole_P = torch.zeros(self.unit.nbytes, dtype=torch.uint8)
        for place, section_S in enumerate(sections_P.chunk(self.count)):
            for piece in self.pieces[place]:
                _copy(piece.runs(piece.param.offset), section_S, whole_P)
        return whole_P

    def updates(self, section_S: torch.Tensor, place: int, largest: int) -> Iterator[tuple[str, dict[str, Cell]]]:
        """What a section holds of each parameter and its states: pieces of at most ``largest`` elements, or of one row."""
        pieces: dict[str, dict[str, Piece]] = {}
        for piece in self.pieces[place]:
            name, _, state = piece.param.name.partition(STATE)
            pieces.setdefault(name, {})[state] = piece
        for name, of_states in pieces.items():
            whole = of_states[""]
            some = whole.last - whole.first if whole.layout.groups else largest  # scaled rows are cut by the update
            for first in range(whole.first, whole.last, some):
                last = min(first + some, whole.last)
                shape = whole.layout.shape if whole.layout.groups else (last - first,)
                yield name, {s: _cell(piece, first, shape, section_S) for s, piece in of_states.items()}


def _cell(piece: Piece, first: int, shape: tuple[int, ...], section_S: torch.Tensor) -> Cell:
    """A piece from element ``first`` on, in the shape that its parameter is updated in."""
    layout = replace(piece.layout, shape=shape)
    at = piece.at + (first - piece.first) * layout.code_dtype.itemsize
    return Cell(layout, section_S[at : at + layout.nbytes], origin=first)


class Cut:
    """A source of weights (a :class:`~blockwalk.tiers.protocols.WeightSource`) in which each unit that is cut is one
    parameter: a rank's section. What it is asked for it fills, with checksums of the whole, in ``units``."""

    def __init__(self, source: Initial, units: Sequence[StoredUnit], cuts: Mapping[int, Sections], place: int) -> None:
        self._source, self._cuts, self._place = source, cuts, place
        self.units = list(units)
        self._number = {units[number].name + SECTION: number for number in cuts}
        gone = {param.name for number in cuts for param in units[number].params}
        self._names = [*(name for name in source.names() if name not in gone), *self._number]

    def spec(self, model: ModelSpec) -> ModelSpec:
        """The trainables of ``model``, states included, as this source has them."""

        def cut(number: int) -> UnitSpec:
            unit, sections = model.units[number], self._cuts.get(number)
            if sections is None:
                return unit
            return replace(unit, params=(ParamSpec(self.units[number].name + SECTION, (sections.nbytes,), "uint8"),))

        prologue, *blocks, epilogue = map(cut, range(len(model.units)))
        return replace(model, prologue=prologue, blocks=tuple(blocks), epilogue=epilogue)

    def section(self, number: int) -> torch.Tensor:
        """A unit's section, uint8 [S]."""
        whole_P = torch.zeros(self.units[number].nbytes, dtype=torch.uint8)
        self.units[number] = fill(self.units[number], self._source, whole_P)
        return self._cuts[number].cut(whole_P, self._place)

    def names(self) -> Sequence[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return (self._cuts[self._number[name]].nbytes,) if name in self._number else self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if name in self._number else self._source.dtype(name)

    def weights(self, names: Iterable[str]) -> dict[str, torch.Tensor | Weight]:
        out: dict[str, torch.Tensor | Weight] = {}
        for name in names:
            out |= {name: self.section(self._number[name])} if name in self._number else self._source.weights([name])
        return out

    def release(self, names: Iterable[str]) -> None:
        self._source.release([name for name in names if name not in self._number])

    def stored_nbytes(self, name: str) -> int:
        return self.shape(name)[0] if name in self._number else self._source.stored_nbytes(name)

    def in_place(self, name: str) -> bool:
        return False

    def read_into(self, name: str, out: torch.Tensor) -> None:
        weight = self.weights([name])[name]
        out.copy_(weight if isinstance(weight, torch.Tensor) else weight.rows(0, weight.shape[0]))

    def prefetch(self, names: Iterable[str]) -> int:
        return 0

    def close(self) -> None:
        """The source is its owner's to close."""


class Together:
    """Whole units that ranks bring together when they are read, the one read last kept: all ranks read them in one order."""

    def __init__(self, bring: Callable[[int], torch.Tensor]) -> None:
        """``bring`` makes a unit as one process would hold it, uint8 [P], from every rank's section."""
        self._bring, self._number = bring, -1
        self._whole_P = torch.empty(0, dtype=torch.uint8)

    def unit(self, number: int) -> torch.Tensor:
        if number != self._number:
            self._whole_P = torch.empty(0, dtype=torch.uint8)  # let go of one before the next comes
            self._whole_P, self._number = self._bring(number), number
        return self._whole_P


@dataclass(frozen=True, slots=True)
class Lent:
    """A tensor of such a unit, or all of its bytes: brought together when its rows are read."""

    together: Together
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    open: Callable[[torch.Tensor], torch.Tensor | Weight]
    """Takes it from the unit's bytes."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows of a matrix, elements of a vector."""
        value = self.open(self.together.unit(self.number))
        return value[start:stop] if isinstance(value, torch.Tensor) else value.rows(start, stop)


def _copy(runs: Iterable[tuple[int, int, int]], section_S: torch.Tensor, out_P: torch.Tensor) -> None:
    for at, there, nbytes in runs:
        out_P[there : there + nbytes].copy_(section_S[at : at + nbytes])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN

"""The trainables of a zeroth-order run: each unit's bucket, resident on the device or on a tier that it is fetched from.

Every bucket knows the step that it is up to date with. What brings it further is the estimator's; this moves bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blockwalk.state import Codec, ModelSpec, Tier, Weight
from blockwalk.tiers.host import HostTier, Staged
from blockwalk.tiers.slots import (
    STATE,
    Cell,
    Cells,
    Initial,
    SliceGroup,
    Slots,
    UnitTier,
    cells_of,
    fill,
    pieces_of,
    trainable_spec,
)
from blockwalk.tiers.store import ALIGN, BlockStore, StoredUnit
from blockwalk.tiers.store_writer import plan_units
from blockwalk.tiers.writable import WritableStore

PREFIX = "bucket\0"
"""Before a unit's name in a state dict."""


class Buckets:
    """Where trainables and the states beside them live, and how they come to the device.

    Args:
        model: the model; its trainables are what is kept here.
        codec: of the quantizable trainables (a plain dtype: of all).
        states: the codec of each state kept beside a trainable, and the value that it begins with.
        initial: (source, parameters in memory): where trainables come from at the start.
        tier: where the streamed units are between their turns.
        streamed: the units that visit slots; the others stay on the device.
        slots: device buffers for streamed units.
        device: where blocks compute.
        path: the writable store of the disk tier. One that is there already is taken up where it stands.
        group: the ranks that hold the streamed buckets together, each its slice; None: this process holds all of them.
        keep: leave that store on the disk when this is closed; only then can a state be saved without it.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        codec: Codec,
        states: Mapping[str, tuple[Codec, float]],
        initial: tuple[Any, Mapping[str, torch.Tensor]],
        tier: Tier,
        streamed: frozenset[int],
        slots: int,
        device: torch.device,
        path: Path,
        keep: bool,
        group: SliceGroup | None = None,
    ) -> None:
        self._group = group if group is not None and group.slices > 1 else None
        self._keep = keep
        spec, written_as = trainable_spec(model, codec, {name: codec for name, (codec, _) in states.items()})
        source = Initial(spec, *initial, {name: begin for name, (_, begin) in states.items()})
        self.streamed, self.device = streamed, device
        self.units = self._cut(plan_units(source, spec, written_as, group_size=32))
        self.home: dict[str, int] = {
            param.name: number for number, unit in enumerate(model.units) for param in unit.params if param.trainable
        }
        """The unit of each trainable."""
        self.tier: UnitTier | None = None
        self._durable: WritableStore | None = None
        self._resident: dict[int, torch.Tensor] = {}
        self._steps = [0] * len(self.units)
        self._slot_of: dict[int, int] = {}
        largest = max((self.units[unit].nbytes for unit in streamed), default=0)
        if tier is Tier.DISK:
            self._open_disk(path, source, spec, written_as, largest)
        else:
            self._fill(source)
        self.slots = Slots(slots if largest else 0, largest, device)
        self._cells = {unit: cells_of(self.units[unit], bytes_P) for unit, bytes_P in self._resident.items()}

    def _cut(self, units: tuple[StoredUnit, ...]) -> tuple[StoredUnit, ...]:
        """Buckets as long as whole slices of 64 bytes make them."""
        step = ALIGN * (1 if self._group is None else self._group.slices)
        return tuple(dataclasses.replace(unit, nbytes=-(-unit.nbytes // step) * step) for unit in units)

    def _own(self, unit: int) -> slice:
        """What this process holds of a unit's bucket where it stays."""
        nbytes = self.units[unit].nbytes
        return slice(0, nbytes) if self._group is None or unit not in self.streamed else self._group.own(nbytes)

    def _fill(self, source: Initial) -> None:
        owns = [self._own(number) for number in range(len(self.units))]
        host = HostTier([own.stop - own.start if n in self.streamed else 0 for n, own in enumerate(owns)], self.device)
        filled = []
        for number, unit in enumerate(self.units):
            in_place = number in self.streamed and self._group is None
            into_P = host.bucket(number) if in_place else torch.zeros(unit.nbytes, dtype=torch.uint8)
            filled.append(fill(unit, source, into_P))
            if number not in self.streamed:
                self._resident[number] = into_P.to(self.device)
            elif not in_place:
                host.bucket(number).copy_(into_P[owns[number]])
        self.units, self.tier = tuple(filled), host

    def _open_disk(self, path: Path, source: Initial, spec: ModelSpec, codec: Codec, largest: int) -> None:
        store = WritableStore(path) if path.exists() else WritableStore.create(path, source, spec, codec)
        self.units, self._durable, self.tier = store.units[: len(self.units)], store, store
        if self.device.type == "cuda":
            self.tier = Staged(store, largest, self.device)
        for number, unit in enumerate(self.units):
            if number not in self.streamed:
                bytes_P = torch.empty(unit.nbytes, dtype=torch.uint8)
                self._steps[number] = store.read_unit(number, bytes_P)
                self._resident[number] = bytes_P.to(self.device)

    @property
    def checksum(self) -> str:
        """Of the trainables as they began."""
        return checksum(self.units)

    # ---- moving -----------------------------------------------------------------------------------------------------

    def fetch(self, unit: int, slot: int) -> None:
        """Bring a streamed unit, or this process's slice of it, into a slot."""
        assert self.tier is not None
        bytes_P = self.slots.view(slot, self.units[unit].nbytes)[self._own(unit)]
        self.slots.await_vacant(slot)
        self._steps[unit] = self.tier.read_unit(unit, bytes_P)
        self._slot_of[unit] = slot

    def store(self, unit: int) -> None:
        """Write a streamed unit, or this process's slice of it, back from its slot."""
        assert self.tier is not None
        bytes_P = self.slots.view(self._slot_of[unit], self.units[unit].nbytes)[self._own(unit)]
        self.tier.write_unit(unit, bytes_P, self._steps[unit])

    def gather(self, unit: int) -> None:
        """Complete a unit of which every rank's slice is in its slot."""
        assert self._group is not None
        self._group.gather_(self.slots.view(self._slot_of[unit], self.units[unit].nbytes))

    def vacate(self, slot: int) -> None:
        """The unit in a slot is done with, in this lane's order: a later program's fetch waits for that."""
        if self.slots.count:
            self.slots.vacate(slot)

    def settle(self) -> None:
        """Write the resident units to the disk tier, where that is the run's."""
        if self._durable is None:
            return
        for unit, bytes_P in self._resident.items():
            if bytes_P.numel() and self._durable.step(unit) < self._steps[unit]:
                self._durable.write_unit(unit, bytes_P.cpu(), self._steps[unit])

    # ---- what is there ----------------------------------------------------------------------------------------------

    def cells(self, unit: int) -> Cells:
        """A unit's trainables where they lie on the device: resident, or in the slot that it was fetched into."""
        if unit in self._cells:
            return self._cells[unit]
        return cells_of(self.units[unit], self.slots.view(self._slot_of[unit], self.units[unit].nbytes))

    def sliced(self, unit: int) -> bool:
        """Whether this process holds a slice of the unit's bucket alone."""
        return self._group is not None and unit in self.streamed

    def pieces(self, unit: int, largest: int) -> Iterator[tuple[str, Cell]]:
        """This process's slice of a unit in its slot: pieces of its parameters, of at most ``largest`` elements."""
        stored = self.units[unit]
        return pieces_of(stored, self.slots.view(self._slot_of[unit], stored.nbytes), self._own(unit), largest)

    def step(self, unit: int) -> int:
        """The step that the copy on the device is up to date with."""
        return self._steps[unit]

    def stored_step(self, unit: int) -> int:
        """The step that a unit is up to date with where it stays between its turns."""
        if unit not in self.streamed:
            return self._steps[unit]
        assert self.tier is not None
        return self.tier.step(unit)

    def advance(self, unit: int, step: int) -> None:
        """Say that the copy on the device was brought up to date with ``step``."""
        self._steps[unit] = step

    # ---- what outlives a run ----------------------------------------------------------------------------------------

    def weights(self) -> dict[str, torch.Tensor | Weight]:
        """Every trainable where it stays between its turns, as it stands there; nothing may be in flight or waiting."""
        out: dict[str, torch.Tensor | Weight] = {}
        for number, unit in enumerate(self.units):
            names = [param.name for param in unit.params if STATE not in param.name]
            if self._durable is not None and number in self.streamed:
                stored = BlockStore(self._durable.path)
                out |= stored.weights(names)
                stored.close()  # its maps live as long as what was taken from them
                continue
            bytes_P = self._resident[number] if number in self._resident else self._whole(number)
            out |= {name: states[""].value for name, states in cells_of(unit, bytes_P).items()}
        return out

    def state_dict(self) -> dict[str, Any]:
        """Every bucket that no disk keeps, as bytes, and the step of each; nothing may be in flight.

        Raises:
            ValueError: the weights are in a store on the disk that goes when the run ends.
        """
        if self._durable is not None and not self._keep:
            raise ValueError("weights on the disk tier are saved by the run's ledger: give the walker one (ledger=...)")
        out: dict[str, Any] = {}
        for number, bytes_P in self._held().items():
            unit = self.units[number]
            whole_P = self._whole(number) if self.sliced(number) else bytes_P
            out[PREFIX + unit.name] = whole_P[: _used(unit)]
        out["bucket_steps"] = [self.stored_step(number) for number in range(len(self.units))]
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. Raises ValueError where it does not fit."""
        held = {PREFIX + self.units[number].name: (number, bytes_P) for number, bytes_P in self._held().items()}
        found = {name for name in state if name.startswith(PREFIX)}
        if different := sorted(held.keys() ^ found):
            raise ValueError(f"the saved state does not fit this model and plan; it differs in {different[:5]}")
        for name, (number, bytes_P) in held.items():
            unit, saved_P = self.units[number], state[name]
            used = _used(unit)
            if saved_P.shape != (used,):
                raise ValueError(
                    f"{unit.name} has {saved_P.numel()} bytes in the saved state and {used} here: model, codec or rule differ"
                )
            part_P = saved_P[self._own(number)]
            bytes_P[: len(part_P)].copy_(part_P)
            step = int(state["bucket_steps"][number])
            if number in self.streamed:
                assert isinstance(self.tier, HostTier)
                self.tier.set_step(number, step)
            else:
                self._steps[number] = step

    def _held(self) -> dict[int, torch.Tensor]:
        held = {} if self._durable is not None else dict(self._resident)
        if isinstance(self.tier, HostTier):
            held |= {unit: self.tier.bucket(unit) for unit in self.streamed}
        return {number: bytes_P for number, bytes_P in held.items() if bytes_P.numel()}

    def _whole(self, unit: int) -> torch.Tensor:
        """A unit's bucket where it stays between its turns; of slices a copy, gathered by all ranks together."""
        held_P = self._held()[unit]
        if not self.sliced(unit):
            return held_P
        assert self._group is not None
        whole_P = torch.empty(self.units[unit].nbytes, dtype=torch.uint8, device=self.device)
        whole_P[self._own(unit)] = held_P.to(self.device)
        self._group.gather_(whole_P)
        return whole_P.cpu()

    def sums(self) -> tuple[dict[str, int], dict[str, int]]:
        """A checksum of each unit where it stays between its turns: of those held whole, and of the slices of the others.
        Nothing may be in flight."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        whole: dict[str, int] = {}
        slices: dict[str, int] = {}
        for number, unit in enumerate(self.units):
            if not unit.nbytes:
                continue
            if number in self._resident:
                bytes_P = self._resident[number]
            elif isinstance(self.tier, HostTier):
                bytes_P = self.tier.bucket(number)
            else:
                assert self._durable is not None
                bytes_P = torch.empty(unit.nbytes, dtype=torch.uint8)
                self._durable.read_unit(number, bytes_P)
            (slices if self.sliced(number) else whole)[unit.name] = word_sum(bytes_P)
        return whole, slices

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        if self._durable is not None and not self._keep:
            shutil.rmtree(self._durable.path)


def _used(unit: StoredUnit) -> int:
    """Bytes of a bucket without what makes it divide into slices."""
    return -(-max(param.offset + param.nbytes for param in unit.params) // ALIGN) * ALIGN


def word_sum(bytes_P: torch.Tensor) -> int:
    """A checksum of bytes (a multiple of 8): Σ wᵢ·(2i + 1) mod 2⁶⁴ over their 64-bit words. One changed word always shows."""
    words_N, total, some = bytes_P.view(torch.int64), 0, 1 << 20
    for first in range(0, len(words_N), some):
        part_N = words_N[first : first + some]
        odd_N = torch.arange(2 * first + 1, 2 * (first + len(part_N)) + 1, 2, device=bytes_P.device)
        total += int((part_N * odd_N).sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def checksum(units: Sequence[StoredUnit]) -> str:
    """Of trainables as they were encoded: what a ledger's entries build on."""
    facts = [
        (param.name, str(param.codec), list(param.shape), param.dtype, param.crc32) for unit in units for param in unit.params
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

"""The trainables of a zeroth-order run: each unit's bucket, resident on the device or on a tier that it is fetched from.

Every bucket knows the step that it is up to date with. What brings it further is the estimator's; this moves bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blockwalk.state import Codec, ModelSpec, Tier, Weight
from blockwalk.tiers.host import HostTier, Staged
from blockwalk.tiers.slots import STATE, Cells, Initial, Slots, UnitTier, cells_of, fill, trainable_spec
from blockwalk.tiers.store import BlockStore, StoredUnit
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
    ) -> None:
        self._keep = keep
        spec, written_as = trainable_spec(model, codec, {name: codec for name, (codec, _) in states.items()})
        source = Initial(spec, *initial, {name: begin for name, (_, begin) in states.items()})
        self.streamed, self.device = streamed, device
        self.units = plan_units(source, spec, written_as, group_size=32)
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

    def _fill(self, source: Initial) -> None:
        sizes = [unit.nbytes if number in self.streamed else 0 for number, unit in enumerate(self.units)]
        host = HostTier(sizes, self.device)
        filled = []
        for number, unit in enumerate(self.units):
            into_P = host.bucket(number) if number in self.streamed else torch.empty(unit.nbytes, dtype=torch.uint8)
            filled.append(fill(unit, source, into_P))
            if number not in self.streamed:
                self._resident[number] = into_P.to(self.device)
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
        """Bring a streamed unit into a slot."""
        assert self.tier is not None
        bytes_P = self.slots.view(slot, self.units[unit].nbytes)
        self.slots.await_vacant(slot)
        self._steps[unit] = self.tier.read_unit(unit, bytes_P)
        self._slot_of[unit] = slot

    def store(self, unit: int) -> None:
        """Write a streamed unit back from its slot."""
        assert self.tier is not None
        bytes_P = self.slots.view(self._slot_of[unit], self.units[unit].nbytes)
        self.tier.write_unit(unit, bytes_P, self._steps[unit])

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
            bytes_P = self._resident[number] if number in self._resident else self._held()[number]
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
            out[PREFIX + self.units[number].name] = bytes_P
        out["bucket_steps"] = [self.stored_step(number) for number in range(len(self.units))]
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. Raises ValueError where it does not fit."""
        held = {PREFIX + self.units[number].name: (number, bytes_P) for number, bytes_P in self._held().items()}
        found = {name for name in state if name.startswith(PREFIX)}
        if different := sorted(held.keys() ^ found):
            raise ValueError(f"the saved state does not fit this model and plan; it differs in {different[:5]}")
        for name, (number, bytes_P) in held.items():
            if state[name].shape != bytes_P.shape:
                raise ValueError(
                    f"{self.units[number].name} has {state[name].numel()} bytes in the saved state and"
                    f" {bytes_P.numel()} here: model, codec or rule differ"
                )
            bytes_P.copy_(state[name])
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

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        if self._durable is not None and not self._keep:
            shutil.rmtree(self._durable.path)


def checksum(units: Sequence[StoredUnit]) -> str:
    """Of trainables as they were encoded: what a ledger's entries build on."""
    facts = [
        (param.name, str(param.codec), list(param.shape), param.dtype, param.crc32) for unit in units for param in unit.params
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

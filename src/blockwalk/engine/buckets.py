"""The trainables of a zeroth-order run: each unit's bucket, resident on the device or on a tier
that it is fetched from.

Every bucket knows the step that it is up to date with. Updates are the estimator's; this moves
bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockwalk.engine.assembled import Assembled, Assembler
from blockwalk.engine.bucket_tensors import (
    STATE,
    BucketTensor,
    BucketTensors,
    Initial,
    fill,
    tensors_in,
    trainable_spec,
)
from blockwalk.engine.home import Job
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.slices import BucketSlices
from blockwalk.engine.slots import Slots
from blockwalk.numerics.codecs.weights import Value
from blockwalk.numerics.device import is_cpu
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import Codec, StateKind
from blockwalk.plan.zeroth_order_kinds import states_beside
from blockwalk.program.placements import Placements
from blockwalk.program.program import Op
from blockwalk.ranks.ranks import Ranks
from blockwalk.system.atomic_files import discard
from blockwalk.tiers.block_store.store import BlockStore, StoredParam, StoredUnit
from blockwalk.tiers.block_store.writable import WritableStore
from blockwalk.tiers.block_store.writer import plan_units, write_store
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.protocols import UnitTier

PREFIX = "bucket\0"
"""The beginning of a bucket's name in a state dict; the unit's name follows."""


class Buckets:
    """The trainables and the states beside them: where they live, and how they come to the device.

    Args:
        model: the model; its trainables are kept here.
        path: the writable store of the disk tier. One that is there already is taken up where it
            stands.
        keep: leave that store on the disk when this is closed; only then can a state be saved
            without it.
        group: the ranks that hold the streamed buckets together, each rank a slice.
        memories: where streamed buckets are kept on a tier that does not outlive the run.
    """

    def __init__(
        self,
        model: ModelHandle,
        path: Path,
        group: Ranks,
        memories: Memories,
        *,
        keep: bool,
    ) -> None:
        plan = model.plan
        self._keep = keep
        self.device = model.device
        self._group = group
        states = states_beside(plan.zo, plan.optimizer)
        codecs = {name: codec for name, (codec, _) in states.items()}
        spec, written_as = trainable_spec(model.spec, plan.trainable.codec, codecs)
        source = Initial(
            spec,
            model.source,
            model.in_memory,
            {name: begin for name, (_, begin) in states.items()},
        )
        places = Placements(plan, model.spec, self.device.type)
        units = range(len(model.spec.units))
        self.streamed = frozenset(
            unit for unit in units if StateKind.TRAINABLE in places.parts(unit)
        )
        """The units that visit slots; the others stay on the device."""
        self.units = [*plan_units(source, spec, written_as, group_size=32)]
        """The units as one process would hold them."""
        sliced = self.streamed if group.slices > 1 else ()
        self._slices = {n: BucketSlices(self.units[n], group.slices) for n in sliced}
        self.home = {
            p.name: number for number, unit in enumerate(model.spec.units) for p in unit.part(True)
        }
        """The unit of each trainable."""
        self.tier: UnitTier
        self._durable: WritableStore | None = None
        self._resident: dict[int, Tensor] = {}
        self._steps = [0] * len(self.units)
        largest = max(map(self._room, self.streamed), default=0)
        if plan.home.outlives(plan):
            store = self._open_store(path, source, spec, written_as)
            self.tier = memories.visited(store, largest)
        else:
            self.tier = memories.buckets(plan.trainable.tier, StateKind.TRAINABLE, largest)
            self._fill(source)
        self.slots = Slots([largest] * places.slot_count, self.device)
        self.tensors = {
            unit: tensors_in(self.units[unit], bytes_P) for unit, bytes_P in self._resident.items()
        }
        """Each unit's trainables where they lie on the device: resident, or in the slot that it was
        last fetched into."""
        self._views: dict[tuple[int, int], BucketTensors] = {}
        """The trainables of a unit in a slot, by both numbers: a unit comes to the same few."""

    def _room(self, unit: int) -> int:
        """Return bytes of a slot that a unit takes."""
        return self._slices[unit].room if self.sliced(unit) else self.units[unit].nbytes

    def _fill(self, source: Initial) -> None:
        """Encode every unit, into the memory that it streams from or on the device."""
        for number, unit in enumerate(self.units):
            if self.sliced(number):
                self.tier.write_unit(number, self._slice(number, source), 0)
                continue
            bytes_P = torch.zeros(unit.nbytes, dtype=torch.uint8)
            self.units[number] = fill(unit, source, bytes_P)
            if number in self.streamed:
                self.tier.write_unit(number, bytes_P, 0)
            else:
                self._resident[number] = bytes_P.to(self.device)

    def _open_store(
        self, path: Path, source: Initial, spec: ModelSpec, codec: Codec
    ) -> WritableStore:
        """Open the store of the trainables, written where there is none, and read what stays."""
        if self._group.slices > 1:
            path = path.with_name(f"{path.name}-{self._group.place}-of-{self._group.slices}")
        resumed = path.exists()
        if not resumed:
            runs = {number: slices.stored for number, slices in self._slices.items()}
            makers = {run.name: partial(self._slice, n, source) for n, run in runs.items()}
            write_store(path, source, spec, codec, generations=2, runs=runs, made=makers)
        store = WritableStore(path)
        for number in range(len(self.units)):
            if self.sliced(number) and resumed:
                self._slice(number, source)  # for its checksums
            elif not self.sliced(number):
                self.units[number] = store.units[number]
        self._durable = store
        for number, unit in enumerate(self.units):
            if number not in self.streamed:
                bytes_P = torch.empty(unit.nbytes, dtype=torch.uint8)
                self._steps[number] = store.read_unit(number, bytes_P)
                self._resident[number] = bytes_P.to(self.device)
        return store

    def _slice(self, number: int, source: Initial) -> Tensor:
        """Return this process's slice of a unit as it begins, uint8 [S]; the checksums of the whole
        unit are noted."""
        whole_P = torch.zeros(self.units[number].nbytes, dtype=torch.uint8)
        self.units[number] = fill(self.units[number], source, whole_P)
        return self._slices[number].cut(whole_P, self._group.place)

    @property
    def durable(self) -> bool:
        """True where weights outlive this process."""
        return self._durable is not None

    @property
    def checksum(self) -> str:
        """A checksum of the trainables as they began."""
        return checksum(self.units)

    # ---- residency -------------------------------------------------------------------------------

    def bring(self, op: Op) -> Job:
        return partial(self.fetch, op.unit, op.slot)

    def write_back(self, op: Op) -> Job:
        return partial(self.store, op.unit)

    def complete(self, op: Op) -> Job:
        return partial(self.gather, op.unit)

    def leave(self, op: Op) -> Job:
        return partial(self.vacate, op.slot)

    def values(self, unit: int) -> dict[str, Value]:
        return {}  # an estimator binds them, perturbed

    def value(self, name: str) -> Value:
        return self.tensors[self.home[name]][name][""].value

    def fetch(self, unit: int, slot: int) -> None:
        """Bring a streamed unit, or this process's slice of it, into a slot."""
        self.slots.await_vacant(slot)
        slot_P = self.slots.enter(unit, slot, self._room(unit))
        if (unit, slot) not in self._views:
            bucket = self._slices[unit].bucket if self.sliced(unit) else self.units[unit]
            self._views[unit, slot] = tensors_in(bucket, slot_P)
        self.tensors[unit] = self._views[unit, slot]
        self._steps[unit] = self.tier.read_unit(unit, self._moved(unit))

    def store(self, unit: int) -> None:
        """Write a streamed unit, or this process's slice of it, back from its slot."""
        self.tier.write_unit(unit, self._moved(unit), self._steps[unit])

    def gather(self, unit: int) -> None:
        """Complete a unit of which every rank has its slice in a slot."""
        slices = self._slices[unit]
        slot_P = self._in_slot(unit)
        self._group.gather_(slices.to_gather(slot_P, self._group.place), slices.count)
        slices.assemble(slot_P)

    def _in_slot(self, unit: int) -> Tensor:
        return self.slots.of(unit, self._room(unit))

    def _moved(self, unit: int) -> Tensor:
        """Return the bytes of a unit that this process fetches and stores, in its slot: its slice,
        or all of them."""
        slot_P = self._in_slot(unit)
        return (
            self._slices[unit].in_slot(slot_P, self._group.place) if self.sliced(unit) else slot_P
        )

    def vacate(self, slot: int) -> None:
        """The unit in a slot is done with, in this lane's order: a later program's fetch waits for
        that."""
        self.slots.vacate(slot)

    def settle(self) -> None:
        """Write the resident units to the disk tier, where that is the run's."""
        if self._durable is None:
            return
        for unit in self.streamed:
            self.tier.bucket(unit)  # what is on its way there has come
        for unit, bytes_P in self._resident.items():
            if bytes_P.numel() and self._durable.step(unit) < self._steps[unit]:
                self._durable.write_unit(unit, bytes_P.cpu(), self._steps[unit])

    # ---- what is there ---------------------------------------------------------------------------

    def sliced(self, unit: int) -> bool:
        """Whether this process holds no more than a slice of the unit's bucket."""
        return unit in self._slices

    def ranges(self, unit: int, largest: int) -> Iterator[tuple[str, dict[str, BucketTensor]]]:
        """Return this process's slice of a unit in its slot: ranges of its parameters and their
        states, of at most ``largest`` elements."""
        return self._slices[unit].updates(self._moved(unit), self._group.place, largest)

    def step(self, unit: int) -> int:
        """Return the step that the copy on the device is up to date with."""
        return self._steps[unit]

    def stored_step(self, unit: int) -> int:
        """Return the step that a unit is up to date with where it stays between its turns."""
        return self.tier.step(unit) if unit in self.streamed else self._steps[unit]

    def advance(self, unit: int, step: int) -> None:
        """Say that the copy on the device was brought up to date with ``step``."""
        self._steps[unit] = step

    # ---- what outlives a run ---------------------------------------------------------------------

    def weights(self) -> dict[str, Value]:
        """Return every trainable where it stays between its turns, as it stands there; nothing may
        be in flight or waiting. A unit that ranks hold together is gathered when its rows are read:
        the others then :meth:`join_gathers`, or read it too."""
        out: dict[str, Value] = {}
        assembler = Assembler(self._whole)
        for number, unit in enumerate(self.units):
            params = [param for param in unit.params if STATE not in param.name]
            if self.sliced(number):
                out |= {param.name: self._assembled(assembler, number, param) for param in params}
            elif self._durable is not None and number in self.streamed:
                stored = BlockStore(self._durable.path)
                out |= stored.weights(param.name for param in params)
                stored.close()  # its maps live as long as what was taken from them
            else:
                tensors = tensors_in(unit, self._between_turns(number))
                out |= {name: states[""].value for name, states in tensors.items()}
        return out

    def _assembled(self, assembler: Assembler, number: int, param: StoredParam) -> Any:
        def value(whole_P: Tensor) -> Value:
            return tensors_in(self.units[number], whole_P)[param.name][""].value

        return Assembled(assembler, number, param.shape, param.decoded_dtype(), value)

    def join_gathers(self) -> None:
        """Join the gathers of a rank that reads :meth:`weights` or :meth:`state_dict`, in its
        order."""
        for number in sorted(self._slices):
            self._whole(number)

    def state_dict(self) -> dict[str, Any]:
        """Return every bucket that no disk keeps, as bytes, and the step of each; nothing may be in
        flight. Units that ranks hold together are gathered as in :meth:`weights`.

        Raises:
            ValueError: the weights are in a store on the disk that goes when the run ends.
        """
        if self._durable is not None and not self._keep:
            raise ValueError(
                "weights on the disk tier are saved by the run's ledger: give the walker one"
                " (ledger=...)"
            )
        state: dict[str, Any] = {}
        assembler = Assembler(self._whole)
        for name, number in self._saved_units().items():
            shape = (self.units[number].nbytes,)
            if self.sliced(number):
                state[name] = Assembled(
                    assembler, number, shape, torch.uint8, lambda unit_P: unit_P
                )
            else:
                state[name] = self._between_turns(number)
        state["bucket_steps"] = [self.stored_step(number) for number in range(len(self.units))]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. Raises ValueError where it does not fit."""
        saved = self._saved_units()
        names = {name for name in state if name.startswith(PREFIX)}
        if different := sorted(saved.keys() ^ names):
            raise ValueError(
                f"the saved state does not fit this model and plan; it differs in {different[:5]}"
            )
        for name, number in saved.items():
            unit = self.units[number]
            unit_P = state[name]
            if unit_P.shape != (unit.nbytes,):
                raise ValueError(
                    f"{unit.name} has {unit_P.numel()} bytes in the saved state and {unit.nbytes}"
                    " here: model, codec or rule differ"
                )
            step = int(state["bucket_steps"][number])
            if number not in self.streamed:
                self._resident[number].copy_(unit_P)
                self._steps[number] = step
                continue
            if self.sliced(number):
                unit_P = self._slices[number].cut(unit_P, self._group.place)
            self.tier.write_unit(number, unit_P, step)

    def _saved_units(self) -> dict[str, int]:
        """Return the units that a state dict holds, by the names of their buckets there: those that
        no disk keeps."""
        if self._durable is not None:
            return {}
        return {PREFIX + u.name: number for number, u in enumerate(self.units) if u.nbytes}

    def _whole(self, unit: int) -> Tensor:
        """Return a sliced unit as one process would hold it: a copy, assembled by all ranks
        together."""
        slices = self._slices[unit]
        side_by_side_P = torch.empty(
            slices.count * slices.nbytes, dtype=torch.uint8, device=self.device
        )
        side_by_side_P.chunk(slices.count)[self._group.place].copy_(self._between_turns(unit))
        self._group.gather_(side_by_side_P, slices.count)
        return slices.join(side_by_side_P.cpu())

    def _between_turns(self, unit: int) -> Tensor:
        """Return the bytes of a unit that this process holds between its turns: themselves, or read
        from their tier."""
        bytes_P = self._lying(unit)
        if bytes_P is None:
            bytes_P = torch.empty(
                (self._slices.get(unit) or self.units[unit]).nbytes, dtype=torch.uint8
            )
            (self._durable or self.tier).read_unit(unit, bytes_P)
        return bytes_P

    def _lying(self, unit: int) -> Tensor | None:
        """Return the bytes of a unit where they lie in memory between its turns; None where its
        tier makes a copy of them."""
        return self._resident[unit] if unit in self._resident else self.tier.bucket(unit)

    def sums(self) -> list[tuple[str, int, int]]:
        """Return a checksum of each unit where it stays between its turns, or of this process's
        slice of it: its name, the ranks that hold one copy together, the sum. Nothing may be in
        flight."""
        return [
            (
                unit.name,
                self._group.slices if self.sliced(number) else 1,
                word_sum(self._between_turns(number)),
            )
            for number, unit in enumerate(self.units)
            if unit.nbytes
        ]

    def close(self) -> None:
        self.tier.close()
        if self._durable is not None and not self._keep:
            discard(self._durable.path)


def word_sum(bytes_P: Tensor) -> int:
    """Return a checksum of bytes (a multiple of 8): Σ wᵢ·(2i + 1) mod 2⁶⁴ over their 64-bit words.
    One changed word always shows."""
    words_N = bytes_P.view(torch.int64)
    total = 0
    chunk = min(len(words_N), 1 << 20)
    odd_N = torch.arange(1, 2 * chunk, 2, device=bytes_P.device)
    for start in range(0, len(words_N), max(chunk, 1)):
        part_N = words_N[start : start + chunk]
        weights_N = odd_N[: len(part_N)]
        # dot stores no products, six times as fast; on an accelerator it takes no integers
        weighed = (
            torch.dot(part_N, weights_N) if is_cpu(bytes_P.device) else (part_N * weights_N).sum()
        )
        total += int(weighed) + 2 * start * int(part_N.sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def checksum(units: Sequence[StoredUnit]) -> str:
    """Return a checksum of trainables as they were encoded: a ledger's entries build on them."""
    facts = [
        (param.name, str(param.codec), list(param.shape), param.dtype, param.crc32)
        for unit in units
        for param in unit.params
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

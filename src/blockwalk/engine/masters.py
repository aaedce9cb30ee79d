"""Masters and optimizer states that are whole on this process, each on its tier."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockwalk.checkpoints.pieces import Pieces
from blockwalk.engine.gradients import GradientGroups, NamedGradients
from blockwalk.engine.home import NO_JOB, Change, Job, on_bytes
from blockwalk.engine.joined import Joined
from blockwalk.engine.master_copies import MasterCopies
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.numerics.codecs.layout import dtype_of
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.updates import UPDATE_CHUNK
from blockwalk.plan.placement import StateKind
from blockwalk.program.placements import Placements
from blockwalk.program.program import Op, Pool
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.memory import Memory, Shapes, total_bytes


class Masters:
    """The home of a first-order run's trainables on one process (a
    :class:`~blockwalk.engine.home.Differentiated`).

    A processor updates what is on the disk tier in its file maps. Behind an accelerator masters and
    optimizer states are on the device, or both in host memory and file maps, where the processor
    updates them beside the walk."""

    def __init__(self, model: ModelHandle, memories: Memories) -> None:
        self._model = model
        plan = model.plan
        places = Placements(plan, model.spec, model.device.type)
        codec = plan.trainable.codec
        self._shapes: list[Shapes] = [
            {p.name: (p.shape, dtype_of(codec.dtype_of(p.dtype))) for p in unit.part(True)}
            for unit in model.spec.units
        ]
        """Those of each unit's masters."""
        self._joined: dict[int, Joined] = {}
        """The units whose tensors lie side by side and are worked on as one."""
        self._whole: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
        """The masters of each of these units as one tensor, and its optimizer states."""
        self._copies: MasterCopies | None = None
        self._copied: frozenset[int] = frozenset()
        """The units that the processor behind an accelerator updates, and whose masters have copies
        on the device."""
        self._memories = {
            key: memories[residence.tier] for key, residence in places.residences.items()
        }
        """Those of each unit's kinds of state."""
        self._waits_elsewhere = places.gradient_pool is not Pool.DEVICE
        """True where gradients wait for their update in a memory that is not the device's."""
        if places.landings:
            self._place_on_host(memories, places)
        self.slots = None if self._copies is None else self._copies.slots
        self._reads = model.reads[True]
        for unit in range(len(model.spec.units)):
            numel = model.spec.units[unit].numel(trainable=True)
            few = places.sizes.few or (is_cpu(model.device) and numel <= UPDATE_CHUNK)
            if few and self._may_join(unit):
                self._join(unit)
        self._bytes: dict[StateKind, dict[int, int]] = {
            StateKind.TRAINABLE: {},
            StateKind.OPTIMIZER: {},
        }
        """Bytes of each unit's masters and optimizer states."""
        self.masters: dict[str, Tensor] = {}
        self.moments: dict[str, dict[str, Tensor]] = {}
        for unit in range(len(model.spec.units)):
            self._make(unit)
        if self._copies is not None:
            self._copies.refresh()
        self._gradient_groups: GradientGroups | None = None
        if self._waits_elsewhere:
            self._gradient_groups = GradientGroups(
                memories[plan.gradient.tier],
                [unit.part(True) for unit in model.spec.units],
            )
        self.gradients = NamedGradients(
            self.masters,
            model.device,
            self._gradient_groups,
            landings=places.landings,
            ends=plan.update.at_turn,
            clips=plan.optimizer.max_grad_norm > 0,
            joined=self._joined,
            hooks=model.cut.gradient_hooks,
        )

    def _place_on_host(self, memories: Memories, places: Placements) -> None:
        """Make the copies of masters that the processor behind an accelerator updates."""
        for unit in places.landed:
            if places.residences[unit, StateKind.OPTIMIZER].tier.facts.pinned:
                # no accelerator copies from them
                self._memories[unit, StateKind.OPTIMIZER] = memories.pageable
        self._copied = frozenset(places.landed)
        shapes = [names if n in self._copied else {} for n, names in enumerate(self._shapes)]
        self._copies = MasterCopies(shapes, places, memories)

    def _may_join(self, unit: int) -> bool:
        """Return whether a unit has several masters, in float32 all, that are read in one dtype,
        and no copies of them elsewhere nor places for their gradients."""
        apart = unit in self._copied or self._waits_elsewhere
        dtypes = {dtype for _, dtype in self._shapes[unit].values()}
        read_dtypes = {self._model.compute_dtype_of(name) for name in self._shapes[unit]}
        several = len(self._shapes[unit]) > 1
        return several and not apart and dtypes == {torch.float32} and len(read_dtypes) == 1

    def _join(self, unit: int) -> None:
        """Settle the order of a unit's masters: those that an update treats alike follow each
        other."""
        spared = self._model.cut.spared_by_decay
        shapes = self._shapes[unit]

        def kind(name: str) -> tuple[bool, bool]:
            return name in spared, ".lora_B." in name

        names = [param.name for param in self._reads[unit] if param.name in shapes]
        self._shapes[unit] = {name: shapes[name] for name in sorted(shapes, key=kind)}
        self._joined[unit] = Joined(self._shapes[unit], names)

    def _make(self, unit: int) -> None:
        """Make the masters of a unit, filled from the model, and their optimizer states."""
        model = self._model
        plan = model.plan
        params = model.spec.units[unit].part(True)
        memory = self._memories[unit, StateKind.TRAINABLE]
        self.masters |= memory.zeros(self._shapes[unit], (StateKind.TRAINABLE, unit))
        for param in params:
            model.read_into(param.name, self.masters[param.name])
            model.in_memory.pop(param.name, None)
        states = {
            f"{name}\0{state}": (shape, torch.float32)
            for state in plan.update_rule.states
            for name, (shape, _) in self._shapes[unit].items()
        }
        memory = self._memories[unit, StateKind.OPTIMIZER]
        made = memory.zeros(states, (StateKind.OPTIMIZER, unit))
        self._bytes[StateKind.TRAINABLE][unit] = total_bytes(self._shapes[unit])
        self._bytes[StateKind.OPTIMIZER][unit] = total_bytes(states)
        for key, tensor in made.items():
            name, _, state = key.partition("\0")
            self.moments.setdefault(name, {})[state] = tensor
        if unit in self._joined:
            joined = self._joined[unit]
            names = list(self._shapes[unit])
            master_P = joined.whole([self.masters[name] for name in names])
            moments = {
                state: joined.whole([self.moments[name][state] for name in names])
                for state in plan.update_rule.states
            }
            self._whole[unit] = (master_P, moments)

    # ---- residency -------------------------------------------------------------------------------

    def bring(self, op: Op) -> Job:
        """FETCH: copy the masters of a unit that the host updates to the device. A processor works
        on others where they lie."""
        if self._copies is not None and op.unit in self._copied:
            return self._copies.fetch(op.unit, op.slot)
        return self.will_need(op)

    def land(self, op: Op) -> Job:
        """STORE: copy the gradients of such a unit from the device to their place."""
        names = [p.name for p in self._model.spec.units[op.unit].part(True)]
        return partial(self.gradients.land, names, op.slot)

    def will_need(self, op: Op) -> Job:
        """FETCH: make the pages of a unit's masters, optimizer states or gradients resident."""
        if op.part is StateKind.GRADIENT:
            return partial(self._gradients_in_maps.will_need, self._read_by(op.unit))
        group, memory, nbytes = self._group_of(op)
        return on_bytes(nbytes, memory.will_need, group)

    def write_back(self, op: Op) -> Job:
        """STORE: hand over masters that a processor changed where they lie."""
        return self.dont_need(op)

    def dont_need(self, op: Op) -> Job:
        """STORE: hand them, written in place, to their memory."""
        if op.part is StateKind.GRADIENT:
            return partial(self._hand_over_gradients, op)
        group, memory, nbytes = self._group_of(op)
        return on_bytes(nbytes, memory.dont_need, group)

    def leave(self, _op: Op) -> Job:
        """EVICT: nothing; the pages went when they were stored."""
        return NO_JOB

    def _group_of(self, op: Op) -> tuple[tuple[StateKind, int], Memory, int]:
        """Return the group of the masters or optimizer states that an op names, its memory, and its
        bytes."""
        assert op.part is not None
        group = (op.part, op.unit)
        return group, self._memories[op.unit, op.part], self._bytes[op.part][op.unit]

    @property
    def _gradients_in_maps(self) -> GradientGroups:
        assert self._gradient_groups is not None
        return self._gradient_groups

    def _read_by(self, unit: int) -> list[str]:
        """Return the trainables that a turn of a unit adds gradients to, by name."""
        return [p.name for p in self._reads[unit]]

    def _hand_over_gradients(self, op: Op) -> None:
        """Hand the gradients that a turn of a unit added to, to the kernel."""
        if op.last:
            self.gradients.put_away(p.name for p in self._model.spec.units[op.unit].part(True))
        self._gradients_in_maps.dont_need(self._read_by(op.unit))

    def values(self, unit: int) -> dict[str, Tensor]:
        if unit in self._joined:
            joined = self._joined[unit]
            dtype = self._model.compute_dtype_of(joined.names[0])
            master_P, _ = self._whole[unit]
            # leaves of a new graph as they are: each was made for this turn
            leaves = [part.requires_grad_() for part in joined.tensors(master_P.to(dtype))]
            return dict(zip(joined.names, leaves, strict=True))
        compute_dtype_of = self._model.compute_dtype_of
        return {p.name: self.value(p.name).to(compute_dtype_of(p.name)) for p in self._reads[unit]}

    def value(self, name: str) -> Tensor:
        copies = {} if self._copies is None else self._copies.values
        return (copies if name in copies else self.masters)[name].detach()

    # ---- updates ---------------------------------------------------------------------------------

    def changes(self, unit: int) -> Iterator[Change]:
        if (gradient_P := self.gradients.use_up_joined(unit)) is not None:
            master_P, moments = self._whole[unit]
            name = self._model.spec.units[unit].name
            yield Change(name, master_P, gradient_P, moments, self._joined[unit].places)
            return
        for param in self._model.spec.units[unit].params:
            if self.gradients.waits(name := param.name):
                gradient = self.gradients.use_up(name)
                moments = self.moments.get(name, {})
                yield Change(name, self.masters[name], gradient, moments, ((0, name),))

    def changed(self, unit: int) -> None:
        """Free the gradients that a unit's update has used up, and behind an accelerator end the
        turn of what it has changed; parameters are bound from the masters every time."""
        self.gradients.free_joined(unit)
        if self._gradient_groups is not None:
            self._gradient_groups.forget(unit)
        if unit in self._copied:
            for part in (StateKind.TRAINABLE, StateKind.OPTIMIZER):
                self._memories[unit, part].dont_need((part, unit))

    def masters_changed(self) -> frozenset[int]:
        if self._copies is not None:
            self._copies.refresh()
        return frozenset()

    # ---- what outlives a step --------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        return self.masters

    def state_dict(self) -> dict[str, Any]:
        states = {
            f"{name}\0{key}": t for name, inner in self.moments.items() for key, t in inner.items()
        }
        return {**self.masters, **states}

    def join_gathers(self) -> None:
        """Do nothing: no rank gathers for itself alone."""

    def settle(self) -> None:
        """Do nothing: a checkpoint is written from the masters."""

    def sums(self) -> list[tuple[str, int, int]]:
        """Return none: no other rank holds these."""
        return []

    def pieces(self, *, to_write: bool = False) -> dict[str, Pieces]:
        pieces: dict[str, Pieces] = {}
        for name, master in self.masters.items():
            for kind, tensor in (("master", master), *self.moments.get(name, {}).items()):
                pieces[f"{name}/{kind}"] = Pieces(tensor.numel(), {0: tensor.view(-1)})
        return pieces

    def close(self) -> None:
        """Let go of threads: scratch maps go with their last tensor."""
        if self._copies is not None:
            self._copies.close()

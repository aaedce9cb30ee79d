"""Masters and optimizer states that are whole on this process, each on its tier."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockwalk.checkpoints.pieces import Pieces
from blockwalk.engine.gradients import GradientMaps, NamedGradients
from blockwalk.engine.home import Change, Job
from blockwalk.engine.master_copies import MasterCopies
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.numerics.codecs.layout import dtype_of
from blockwalk.numerics.device import is_cpu
from blockwalk.plan.placement import StateKind, Tier
from blockwalk.program.placements import Placements
from blockwalk.program.program import Op, OpKind, Pool
from blockwalk.program.state_sizes import gradient_pool
from blockwalk.tiers.scratch_maps import ScratchMaps


class Masters:
    """The home of a first-order run's trainables on one process (a
    :class:`~blockwalk.engine.home.Differentiated`).

    A processor updates what is on the disk tier in its file maps. Behind an accelerator masters and
    optimizer states are on the device, or both in host memory and file maps, where the processor
    updates them beside the walk."""

    def __init__(self, model: ModelHandle, scratch: ScratchMaps) -> None:
        self._model = model
        self._scratch = scratch
        plan = model.plan
        places = Placements(plan, model.spec, model.device.type)
        self._places = places
        self._copies = MasterCopies(model, places, scratch) if places.updates_on_host else None
        self.slots = None if self._copies is None else self._copies.slots
        self._reads = model.reads[True]
        self.masters: dict[str, Tensor] = {}
        self.moments: dict[str, dict[str, Tensor]] = {}
        for unit, spec in enumerate(model.spec.units):
            params = spec.part(True)
            kept: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
                p.name: (p.shape, dtype_of(plan.trainable.codec.dtype_of(p.dtype))) for p in params
            }
            copies = self._copies
            self.masters |= (
                self._allocate(plan.trainable.tier, kept, unit)
                if copies is None
                else copies.masters(unit)
            )
            for p in params:
                model.read_into(p.name, self.masters[p.name])
                model.in_memory.pop(p.name, None)
            states = {
                f"{p.name}\0{s}": (p.shape, torch.float32)
                for p in params
                for s in plan.update_rule.states
            }
            for key, tensor in self._allocate(
                plan.optimizer_state.tier, states, ("optimizer", unit)
            ).items():
                name, _, state = key.partition("\0")
                self.moments.setdefault(name, {})[state] = tensor
        if self._copies is not None:
            self._copies.refresh()
        self._gradient_maps: GradientMaps | None = None
        if gradient_pool(plan, model.device.type) is Pool.MAPPED:
            self._gradient_maps = GradientMaps(
                scratch, [unit.part(True) for unit in model.spec.units]
            )
        self.gradients = NamedGradients(
            self.masters,
            model.device,
            self._gradient_maps,
            landings=places.landings,
            ends=plan.update.at_turn,
            clips=plan.optimizer.max_grad_norm > 0,
        )

    def _allocate(
        self, tier: Tier, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], group: Hashable
    ) -> dict[str, Tensor]:
        """Return zeros on a tier, by name; in file maps those of a group together."""
        device = self._model.device
        if self._places.states_on_disk or (tier is Tier.DISK and is_cpu(device)):
            return self._scratch.zeros(shapes, group)
        where = torch.device("cpu") if self._copies is not None else device
        return {
            name: torch.zeros(shape, dtype=dtype, device=where)
            for name, (shape, dtype) in shapes.items()
        }

    # ---- residency -------------------------------------------------------------------------------

    def prepare(self, op: Op) -> Job:
        """FETCH: make the pages of a unit's masters, optimizer states or gradients resident. STORE:
        hand them, written in place, to the kernel. Behind an accelerator FETCH copies masters to
        the device, and STORE gradients from there."""
        if self._copies is not None:
            if op.kind is OpKind.FETCH:
                return self._copies.fetch(op.unit, op.slot)
            if op.kind is OpKind.STORE:
                names = [p.name for p in self._model.spec.units[op.unit].part(True)]
                return partial(self.gradients.land, names, op.slot)
            return lambda: None
        move = {OpKind.FETCH: self._scratch.will_need, OpKind.STORE: self._scratch.dont_need}.get(
            op.kind
        )
        if move is None:
            return lambda: None
        if op.part is StateKind.GRADIENT:
            return partial(self._move_gradients, op)
        group = ("optimizer", op.unit) if op.part is StateKind.OPTIMIZER else op.unit

        def work() -> None:
            move(group)
            if op.kind is OpKind.STORE:
                self._scratch.dont_need(("before", op.unit))

        return work

    def _move_gradients(self, op: Op) -> None:
        """Bring the gradients that a turn of a unit adds to, or hand them to the kernel."""
        names = [p.name for p in self._reads[op.unit]]
        maps = self._gradient_maps
        assert maps is not None
        if op.kind is OpKind.FETCH:
            maps.will_need(names)
            return
        if op.last:
            self.gradients.put_away(p.name for p in self._model.spec.units[op.unit].part(True))
        maps.dont_need(names)

    def values(self, unit: int) -> dict[str, Tensor]:
        compute_dtype_of = self._model.compute_dtype_of
        return {p.name: self.value(p.name).to(compute_dtype_of(p.name)) for p in self._reads[unit]}

    def value(self, name: str) -> Tensor:
        return (self.masters if self._copies is None else self._copies.values)[name].detach()

    # ---- updates ---------------------------------------------------------------------------------

    def changes(self, unit: int) -> Iterator[Change]:
        for param in self._model.spec.units[unit].params:
            if self.gradients.waits(name := param.name):
                gradient = self.gradients.use_up(name)
                moments = self.moments.get(name, {})
                yield Change(name, self.masters[name], gradient, moments, ((0, name),))

    def changed(self, unit: int) -> None:
        """Let go of the gradients that a unit's update has used up; parameters are bound from the
        masters every time."""
        if self._gradient_maps is not None:
            self._gradient_maps.drop(unit)
        if self._places.masters_on_disk or self._places.states_on_disk:
            for group in (unit, ("optimizer", unit), ("before", unit)):
                self._scratch.dont_need(group)

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

    def pieces(self, *, to_write: bool = False) -> dict[str, Pieces]:
        found: dict[str, Pieces] = {}
        for name, master in self.masters.items():
            for kind, tensor in (("master", master), *self.moments.get(name, {}).items()):
                found[f"{name}/{kind}"] = Pieces(tensor.numel(), {0: tensor.view(-1)})
        return found

    def close(self) -> None:
        """Let go of threads: scratch maps go with their last tensor."""
        if self._copies is not None:
            self._copies.close()

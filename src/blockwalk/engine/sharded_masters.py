"""Masters, optimizer states and gradients of which each rank holds a slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from blockwalk.checkpoints.pieces import Pieces
from blockwalk.engine.buckets import word_sum
from blockwalk.engine.gradients import FlatGradients, MasterSlices
from blockwalk.engine.home import Change
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.sharded_part import ShardedPart
from blockwalk.plan.placement import StateKind, Tier
from blockwalk.program.flat_layout import accumulates, has_node_slice, hosts_node_slice
from blockwalk.program.slicing import share
from blockwalk.ranks.groups import Groups
from blockwalk.tiers.scratch_maps import ScratchMaps


class ShardedMasters:
    """The masters of a first-order run over ranks (a
    :class:`~blockwalk.engine.home.Differentiated`); ``part`` is their home as far as parameters
    come and go."""

    def __init__(self, model: ModelHandle, groups: Groups, scratch: ScratchMaps) -> None:
        self.part = ShardedPart(model, groups, StateKind.TRAINABLE)
        self._model = model
        self._groups = groups
        self._scratch = scratch
        self._plan = model.plan
        self.units = {
            unit: self._make(unit) for unit, slices in enumerate(self.part.units) if slices.numel
        }
        self.gradients = FlatGradients(model, self.part, self.units)

    def _make(self, unit: int) -> MasterSlices:
        """Return a unit's masters with what is kept beside them, and what gathers of its parameters
        begin with."""
        plan = self._plan
        part = self.part
        slices = part.units[unit]
        ranks = plan.optimizer_ranks
        tier = plan.optimizer_state.tier
        names = ("master", *plan.update_rule.states)
        own = slices.numel // ranks
        if tier is Tier.DISK:  # updated there by the CPU
            held = self._scratch.zeros(dict.fromkeys(names, ((own,), torch.float32)), group=unit)
        else:
            held = {name: part.zeros(own, torch.float32, tier) for name in names}
        master = held.pop("master")
        part.cut_masters(slices, ranks, master)
        if has_node_slice(plan) and not hosts_node_slice(plan):
            assert slices.node is not None
            slices.source = part.inside(slices.node, slices.numel, plan.parameter_ranks, ranks)
        elif self._model.compute_dtype == torch.float32 and tier is Tier.DEVICE:
            slices.source = master
        else:
            slices.source = master.to(self._model.device, slices.dtype)
            if slices.source is not master:
                part.round_masters(slices, ranks, master, slices.source)
        accumulator = None
        in_place = accumulates(plan) and plan.gradient.on_device
        if accumulates(plan):
            accumulator = part.zeros(
                slices.numel // plan.gradient_ranks, torch.float32, plan.gradient.tier
            )
        if accumulator is not None and in_place:
            gradient = part.inside(accumulator, slices.numel, plan.gradient_ranks, ranks)
        else:
            gradient = part.zeros(own, torch.float32, Tier.DEVICE)
        return MasterSlices(master, held, gradient, accumulator)

    # ---- updates ---------------------------------------------------------------------------------

    def changes(self, unit: int) -> Iterator[Change]:
        own = self.units[unit]
        name = self._model.spec.units[unit].name
        places = self._places(unit)
        yield Change(name, own.master, own.gradient, own.moments, places)

    def _places(self, unit: int) -> list[tuple[int, str]]:
        """Return the parameters in this rank's slice of a unit: the first element of each in the
        slice, and its name."""
        runs = self.part.runs(self.part.units[unit], self._plan.optimizer_ranks)
        return [(run.place, run.name) for run in runs]

    def changed(self, unit: int) -> None:
        """Bring the slice that gathers of a unit begin with up to date with its master."""
        slices = self.part.units[unit]
        master = self.units[unit].master
        assert slices.source is not None
        if slices.source is not master:
            self.part.round_masters(slices, self._plan.optimizer_ranks, master, slices.source)
        if self._plan.optimizer_state.on_disk:
            self._scratch.dont_need(unit)

    def masters_changed(self) -> frozenset[int]:
        for unit in self.units:
            self.changed(unit)
        return frozenset(self.units if has_node_slice(self._plan) else ())

    # ---- what outlives a step --------------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        return self.part.assembled(
            lambda unit: (self.units[unit].master, self._plan.optimizer_ranks)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices, by unit and kind."""
        return {
            f"{unit}\0{kind}": tensor
            for unit, own in self.units.items()
            for kind, tensor in own.kept.items()
        }

    def sums(self) -> list[tuple[str, int, int]]:
        """Return a checksum of this rank's slice of each master and optimizer state, where others
        hold copies of it: its name, the ranks that hold one copy together, the sum."""
        units = self._model.spec.units
        ranks = self._plan.optimizer_ranks
        if ranks == self._plan.mesh.world:
            return []
        sums = [
            (f"{units[unit].name} ({kind})", ranks, word_sum(tensor))
            for unit, masters in self.units.items()
            for kind, tensor in masters.kept.items()
        ]
        if self._plan.optimizer_state.on_disk:
            for unit in self.units:
                self._scratch.dont_need(unit)
        return sums

    def pieces(self, *, to_write: bool = False) -> dict[str, Pieces]:
        pieces: dict[str, Pieces] = {}
        ranks = self._plan.optimizer_ranks
        copies = self._plan.mesh.world // ranks if to_write else 1
        copy = self._groups.rank // ranks if to_write else 0
        for unit, masters in self.units.items():
            slices = self.part.units[unit]
            own = self._groups.slice(slices.numel, ranks)
            # between pairs of elements: an exact parameter takes the first of each
            start, stop = (2 * pair for pair in share((own.stop - own.start) // 2, copies, copy))
            runs = {
                run.name: run
                for run in slices.layout.slicing.runs(own.start + start, own.start + stop)
            }
            for name, param in slices.params.items():
                width = slices.width(name)
                run = runs.get(name)
                for kind, tensor in masters.kept.items():
                    elements = {}
                    if run is not None:
                        part_P = tensor[start + run.place : start + run.end : width]
                        elements[run.start // width] = part_P
                    pieces[f"{name}/{kind}"] = Pieces(param.numel, elements)
        return pieces

    def close(self) -> None:
        self._groups.close()

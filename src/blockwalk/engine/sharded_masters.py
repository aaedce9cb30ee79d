"""Masters, optimizer states and gradients of which each rank holds a slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blockwalk.checkpoints.pieces import Pieces
from blockwalk.engine.buckets import word_sum
from blockwalk.engine.gradients import FlatGradients, MasterSlices
from blockwalk.engine.home import Change
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.sharded_part import ShardedPart
from blockwalk.plan.placement import StateKind
from blockwalk.program.flat_layout import accumulates, has_node_slice, hosts_node_slice
from blockwalk.program.slicing import share
from blockwalk.ranks.groups import Groups
from blockwalk.tiers.memories import Memories


class ShardedMasters:
    """The masters of a first-order run over ranks (a
    :class:`~blockwalk.engine.home.Differentiated`); ``part`` is their home as far as parameters
    come and go."""

    def __init__(self, model: ModelHandle, groups: Groups, memories: Memories) -> None:
        self.part = ShardedPart(model, groups, StateKind.TRAINABLE, memories)
        self._model = model
        self._groups = groups
        self._plan = model.plan
        self._memories = memories
        self._states = memories[model.plan.optimizer_state.tier]
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
        names = ("master", *plan.update_rule.states)
        shapes = dict.fromkeys(names, ((slices.numel // ranks,), torch.float32))
        moments = self._states.zeros(shapes, (StateKind.OPTIMIZER, unit))
        master = moments.pop("master")
        part.cut_masters(slices, ranks, master)
        if has_node_slice(plan) and not hosts_node_slice(plan):
            assert slices.node is not None
            slices.source = part.inside(slices.node, slices.numel, plan.parameter_ranks, ranks)
        else:  # the master itself, where it is on the device and computed with
            slices.source = master.to(self._model.device, slices.dtype)
            if slices.source is not master:
                part.round_masters(slices, ranks, master, slices.source)
        return MasterSlices(master, moments, *self._make_gradients(unit))

    def _make_gradients(self, unit: int) -> tuple[Tensor, Tensor | None]:
        """Return the sum of a unit's gradients that this rank's update reads, and the accumulator
        of several micro-batches, None without any. The first lies in the second where both are on
        the device."""
        plan = self._plan
        numel = self.part.units[unit].numel
        ranks = plan.optimizer_ranks
        group = (StateKind.GRADIENT, unit)
        accumulator = None
        if accumulates(plan):
            shapes = {"sum": ((numel // plan.gradient_ranks,), torch.float32)}
            accumulator = self._memories[plan.gradient.tier].zeros(shapes, group)["sum"]
            if plan.gradient.tier.facts.resident:
                own_P = self.part.inside(accumulator, numel, plan.gradient_ranks, ranks)
                return own_P, accumulator
        shapes = {"sum": ((numel // ranks,), torch.float32)}
        return self._memories["device"].zeros(shapes, group)["sum"], accumulator

    @property
    def _kinds(self) -> tuple[str, ...]:
        """The kinds of state that outlive a step."""
        return ("master", *self._plan.update_rule.states)

    def _is_copy(self, unit: int) -> bool:
        """Return whether another stage holds a unit as well, and answers for it."""
        return self._model.stage_of(unit) != self._model.stage.number

    # ---- updates ---------------------------------------------------------------------------------

    def changes(self, unit: int) -> Iterator[Change]:
        masters = self.units[unit]
        name = self._model.spec.units[unit].name
        places = self._places(unit)
        yield Change(name, masters.master, masters.gradient, masters.moments, places)

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
        self._states.dont_need((StateKind.OPTIMIZER, unit))

    def masters_changed(self) -> frozenset[int]:
        for unit in self.units:
            self.changed(unit)
        return frozenset(self.units if has_node_slice(self._plan) else ())

    # ---- what outlives a step --------------------------------------------------------------------

    def weights(self) -> dict[str, Any]:
        return self.part.assembled(
            lambda unit: (self.units[unit].master, self._plan.optimizer_ranks), torch.float32
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices, by unit and kind."""
        return {
            f"{unit}\0{kind}": tensor
            for unit, masters in self.units.items()
            for kind, tensor in masters.kept.items()
        }

    def join_gathers(self) -> None:
        """Do nothing: no rank gathers for itself alone."""

    def settle(self) -> None:
        """Do nothing: a checkpoint is written from the masters."""

    def sums(self) -> list[tuple[str, int, int]]:
        """Return a checksum of this rank's slice of each master and optimizer state, where others
        hold copies of it: its name, the ranks that hold one copy together, the sum; 0 of what
        another stage holds."""
        units = self._model.spec.units
        ranks = self._plan.optimizer_ranks
        if ranks == self._plan.mesh.stage_ranks:
            return []
        sums = []
        for unit, slices in enumerate(self.part.all_units):
            for kind in self._kinds if slices.numel else ():
                masters = self.units.get(unit)
                total = 0 if masters is None else word_sum(masters.kept[kind])
                sums.append((f"{units[unit].name} ({kind})", ranks, total))
        for unit in self.units:
            self._states.dont_need((StateKind.OPTIMIZER, unit))
        return sums

    def pieces(self, *, to_write: bool = False) -> dict[str, Pieces]:
        pieces: dict[str, Pieces] = {}
        ranks = self._plan.optimizer_ranks
        copies = self._plan.mesh.stage_ranks // ranks if to_write else 1
        copy = self._groups.rank % self._plan.mesh.stage_ranks // ranks if to_write else 0
        for unit, slices in enumerate(self.part.all_units):
            held_here = unit in self.units and not (to_write and self._is_copy(unit))
            for name, param in slices.params.items() if not held_here else ():
                pieces |= {f"{name}/{kind}": Pieces(param.numel, {}) for kind in self._kinds}
        for unit, masters in self.units.items():
            if to_write and self._is_copy(unit):
                continue
            slices = self.part.units[unit]
            span = self._groups.slice(slices.numel, ranks)
            # between pairs of elements: an exact parameter takes the first of each
            pairs = (span.stop - span.start) // 2
            start, stop = (2 * pair for pair in share(pairs, copies, copy))
            runs_in = slices.layout.slicing.runs
            runs = {run.name: run for run in runs_in(span.start + start, span.start + stop)}
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

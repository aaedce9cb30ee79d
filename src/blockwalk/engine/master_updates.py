"""Updates of masters: the rule applied to what their home hands out, and taken back where the step
does not count.

A home keeps masters and optimizer states and says what a unit's gradients change
(:class:`~blockwalk.engine.home.Change`). This applies the rule, remembers what a step that may
still be refused has changed, and is what a checkpoint is written from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from blockwalk.checkpoints.pieces import Pieces
from blockwalk.engine.engine import Engine
from blockwalk.engine.home import Change, Differentiated
from blockwalk.engine.undo import Undo
from blockwalk.numerics.device import host_buffers, is_cpu, recorded
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.updates import UPDATE_CHUNK, Rule
from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.update_rules import ELEMENTS


class MasterUpdates:
    """The updates of a first-order run's masters.

    Args:
        engine: the cut model.
        home: its masters and optimizer states.
    """

    def __init__(self, engine: Engine, home: Differentiated) -> None:
        self.engine = engine
        self.home = home
        self._plan = engine.plan
        self.rule = Rule(engine.plan.optimizer)
        self._plain_rule = Rule(replace(engine.plan.optimizer, weight_decay=0.0))
        """The rule of parameters that weight decay spares."""
        self._spared_rate: float | None = None
        """The learning rate of these parameters; None: that of the others."""
        self._undo = Undo(engine.memories.scratch, engine.device)
        self._landing: Tensor | None = None
        self.keeps_decay_of_all = False
        """True where the run began when weight decay reached norms and biases too: it goes on so,
        whatever the plan says."""

    def use(
        self, settings: OptimizerSettings, spared: OptimizerSettings, spared_rate: float
    ) -> None:
        """Take other numbers for the rule from the next step on, and for that of parameters which
        weight decay spares, whose learning rate may be another too. Raises ValueError for one out
        of range."""
        self.rule = Rule(settings)
        self._plain_rule = Rule(spared)
        self._spared_rate = spared_rate

    def apply(
        self, unit: int, *, step: int, learning_rate: float, coefficient: float = 1.0
    ) -> None:
        """UPDATE: apply the rule to a unit's masters, as far as this rank holds them, with their
        gradients."""
        plan = self._plan
        changes = list(self.home.changes(unit))
        by_elements = self.rule.facts.needs == ELEMENTS
        if not by_elements:
            changes = [part for change in changes for part in self._by_parameter(change)]
        if plan.update.at_turn:  # whether the step counts is known only at its end
            states = [(change.master, *change.moments.values()) for change in changes]
            self._undo.remember(unit, [tensor for tensors in states for tensor in tensors])
        together = _Together(step)
        for change in changes:
            on_device = not is_cpu(change.gradient.device)
            if coefficient != 1.0 and on_device:
                change.gradient.mul_(coefficient)
            rounding = None
            if plan.update.rounding == "stochastic" and change.master.dtype != torch.float32:
                rounding = NoiseKey(plan.seed, step, 0, change.name, "rounding")
            gradient = self._landed(change.gradient, change.master.device)
            scale = 1.0 if on_device else coefficient
            for rule, rate, part in self._parts(change.places, learning_rate):
                moments = {name: _range(moment, part) for name, moment in change.moments.items()}
                master = _range(change.master, part)
                piece = _range(gradient, part)
                if len(changes) > 1 and by_elements and together.takes(master):
                    together.add((rule, rate, scale), master, piece, moments)
                    continue
                rule.apply_(
                    master, piece, moments, step=step, lr=rate, rounding=rounding, scale=scale
                )
        together.apply()
        self.home.changed(unit)

    def _by_parameter(self, change: Change) -> Iterator[Change]:
        """Yield a change of each parameter in its shape, where small ones lie in one tensor."""
        shapes = {param.name: param.shape for param in self.engine.spec.params(trainable=True)}
        for start, name in change.places:
            part = slice(start, start + prod(shapes[name]))

            def shaped(tensor: Tensor, part: slice = part, name: str = name) -> Tensor:
                return tensor.view(-1)[part].view(shapes[name])

            moments = {state: shaped(moment) for state, moment in change.moments.items()}
            gradient = shaped(change.gradient)
            yield Change(name, shaped(change.master), gradient, moments, ((0, name),))

    def _parts(
        self, places: Sequence[tuple[int, str]], learning_rate: float
    ) -> list[tuple[Rule, float, slice | None]]:
        """Return the ranges of a master under one rule and learning rate each: None for all of it.
        Rules work element by element, so that ranges of a slice which cuts through parameters are
        exact."""
        optimizer = self._plan.optimizer
        usual = (self.rule, learning_rate)
        spared = usual
        if optimizer.decay == "matrices" and not self.keeps_decay_of_all:
            rate = learning_rate if self._spared_rate is None else self._spared_rate
            spared = (self._plain_rule, rate)
        changes: list[tuple[int, Rule, float]] = []
        for start, name in places:
            differs = spared != usual and name in self.engine.cut.spared_by_decay
            rule, rate = spared if differs else usual
            if ".lora_B." in name:
                rate *= optimizer.lora_b_ratio
            if not changes or (rule, rate) != changes[-1][1:]:
                changes.append((start, rule, rate))
        if len(changes) < 2:  # a slice without a parameter is padding
            return [(*(changes[0][1:] if changes else usual), None)]
        ends = [start for start, _, _ in changes[1:]]
        return [
            (rule, rate, slice(start, end))
            for (start, rule, rate), end in zip(changes, [*ends, None], strict=True)
        ]

    def _landed(self, gradient: Tensor, where: torch.device) -> Tensor:
        """Return a gradient where its master is: on the host behind an accelerator in staging that
        the next one takes."""
        if gradient.device == where:
            return gradient
        if self._landing is None or len(self._landing) < gradient.numel():
            (landing_P,) = host_buffers([4 * gradient.numel()], self.engine.device)
            self._landing = landing_P.view(torch.float32)
        landed = (
            self._landing[: gradient.numel()]
            .view(gradient.shape)
            .copy_(gradient, non_blocking=True)
        )
        recorded(self.engine.device).synchronize()
        return landed

    def commit(self) -> None:
        """Keep the changes of a step that counts."""
        self._undo.commit()

    def undo(self) -> None:
        """Give masters and optimizer states the values back that they had before a step that does
        not count."""
        if self._undo.put_back():
            self.masters_changed()

    def masters_changed(self) -> None:
        """Note that the masters of a first-order run have new values from outside."""
        self.engine.dirty = self.home.masters_changed()

    # ---- checkpoints -----------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        """Return the facts that a checkpoint's tensors were made by."""
        return {} if self.keeps_decay_of_all else {"decay": self._plan.optimizer.decay}

    def resume_facts(self, facts: Mapping[str, str]) -> None:
        """Go on as a checkpoint's facts say: one that has no ``decay`` is of a run whose norms and
        biases decayed."""
        self.keeps_decay_of_all = "decay" not in facts

    def notes(self) -> list[str]:
        """Return sentences on what a resumed run does otherwise than its plan says."""
        settings = self._plan.optimizer
        asked_for = settings.decay == "all" or not settings.weight_decay
        if asked_for or not self.keeps_decay_of_all:
            return []
        return [
            "weight decay reaches norms and biases too, as when this run began; a new run spares"
            " them (optimizer.decay)"
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy in the tensors that the home's ``state_dict`` gave. Raises ValueError where names or
        shapes differ: another model or mesh."""
        tensors: dict[str, Tensor] = self.home.state_dict()
        if missing := sorted(tensors.keys() ^ state.keys()):
            raise ValueError(
                f"the saved state does not fit this model and plan; it differs in {missing[:5]}"
            )
        for name, tensor in tensors.items():
            if tensor.shape != state[name].shape:
                shapes = (
                    f"{tuple(state[name].shape)} in the saved state and {tuple(tensor.shape)} here"
                )
                raise ValueError(f"{name!r} is {shapes}")
            tensor.copy_(state[name])
        self.masters_changed()

    def pieces(self, *, to_write: bool = False) -> dict[str, Pieces]:
        """Return the pieces of a checkpoint that this rank holds, or writes."""
        return self.home.pieces(to_write=to_write)


class _Together:
    """Small changes of one rule, rate and scale on a processor, applied at once."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._settings: tuple[Rule, float, float] | None = None
        self._parts: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
        self._elements = 0

    def takes(self, master: Tensor) -> bool:
        """Return whether a master is one of those: in float32, where stochastic rounding has
        nothing to do, and less than a chunk."""
        small = master.numel() < UPDATE_CHUNK
        return small and master.dtype == torch.float32 and is_cpu(master.device)

    def add(
        self,
        settings: tuple[Rule, float, float],
        master: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
    ) -> None:
        """Add a change, after those that wait where they are of other settings or fill a chunk."""
        if settings != self._settings or self._elements + master.numel() > UPDATE_CHUNK:
            self.apply()
        self._settings = settings
        self._parts.append((master, gradient, moments))
        self._elements += master.numel()

    def apply(self) -> None:
        """Apply the changes that wait."""
        if self._settings is None:
            return
        rule, rate, scale = self._settings
        masters, gradients, moments = zip(*self._parts, strict=True)
        rule.apply_together_(masters, gradients, moments, step=self._step, lr=rate, scale=scale)
        self._settings = None
        self._parts = []
        self._elements = 0


def _range(tensor: Tensor, part: slice | None) -> Tensor:
    """Return a range of a contiguous tensor's elements; the tensor itself where ``part`` is
    None."""
    return tensor if part is None else tensor.view(-1)[part]

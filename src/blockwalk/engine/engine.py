"""The state that a walk works on: an opened model, and a home for each part of its state.

The engine answers the ops that move state by asking the home of the part that they name, binds what
estimators compute with, and applies update rules to what a home hands out. It never decides when
something happens: the program does. The homes are chosen here, by the plan's facts, and described
in :mod:`blockwalk.engine.home`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockwalk.checkpoints.pieces import Pieces
from blockwalk.cutting.adapters import save_adapter, unfuse
from blockwalk.engine.buckets import Buckets
from blockwalk.engine.frozen import Frozen
from blockwalk.engine.home import Differentiated, Gradients, Home, Job, Trained
from blockwalk.engine.masters import Masters
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.sharded_masters import ShardedMasters
from blockwalk.engine.sharded_part import ShardedPart, sharded_frozen
from blockwalk.engine.slots import saved_by_place
from blockwalk.engine.undo import Undo
from blockwalk.numerics.codecs.weights import DenseWeight, Value, Weight
from blockwalk.numerics.device import host_buffers, is_cpu, recorded
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.updates import Rule
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import StateKind
from blockwalk.program.program import Op, OpKind
from blockwalk.ranks.groups import Groups, make_groups
from blockwalk.ranks.shared_forwards import SharedForwards
from blockwalk.system.heap import Slack, give_back
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.model_folder import safetensors

MOVES = (OpKind.FETCH, OpKind.GATHER, OpKind.CACHE, OpKind.REDUCE, OpKind.STORE, OpKind.EVICT)
"""The ops that an engine answers; the others are its estimator's."""


class Engine:
    """A cut model and the homes of its state.

    Args:
        opened: the model, the plan and the device.
        run: names the store of a zeroth-order run's weights in the model's working folder; one that
            is there is taken up. Without a name it goes when the engine is closed.
        slices: zeroth order: the ranks that hold streamed units together.

    Raises:
        ValueError: weights do not fit the plan; the message says why.
    """

    def __init__(self, opened: ModelHandle, run: str, slices: SharedForwards) -> None:
        self.model = opened
        self.plan = opened.plan
        self.device = opened.device
        plan = opened.plan
        device = opened.device
        self._differentiates = not plan.zeroth_order
        self._groups: Groups | None = (
            make_groups(plan.mesh, device, sums_apart=plan.sums_apart) if plan.sharded else None
        )
        self.rank = 0 if self._groups is None else self._groups.rank
        self.memories = Memories(device, opened.workdir)
        self.module = opened.module
        self.cut = opened.cut
        self.spec = opened.spec
        self.source = opened.source
        self.compute_dtype = opened.compute_dtype
        self.compute_dtype_of = opened.compute_dtype_of
        self.rule, self._undo = Rule(plan.optimizer), Undo(self.memories.scratch, device)
        self.keeps_decay_of_all = False
        """True where the run began when weight decay reached norms and biases too: it goes on so,
        whatever the plan says."""
        self._plain_rule = Rule(replace(plan.optimizer, weight_decay=0.0))
        """The rule of parameters that weight decay spares."""
        self.dirty: frozenset[int] = frozenset()
        """Sharded over ranks: units whose node slices are out of date, as the last program left
        them."""
        self._landing: Tensor | None = None
        self.first_order: Differentiated
        """The home of a first-order run's masters; a zeroth-order run has buckets instead."""
        self.gradients: Gradients
        """The gradients of a first-order step."""
        self.buckets: Buckets
        """The home of a zeroth-order run's trainables."""
        self.homes: dict[StateKind, Home]
        """The home of each part, as far as its parameters come and go."""
        self.trained: Trained
        """The home of the trainables, as far as they outlive a step."""
        self._bound: Mapping[str, Value] = {}
        """Frozen parameters that stay bound from turn to turn, or are bound when they are
        fetched."""
        self._sharded_homes: tuple[ShardedPart | ShardedMasters, ...] = ()
        """The homes of state that ranks hold in slices."""
        trainable: Home
        if self._groups is not None:
            frozen: Home = (part := sharded_frozen(opened, self._groups, self.memories))
            self.trained = self.first_order = sharded = ShardedMasters(
                opened, self._groups, self.memories
            )
            trainable = sharded.part
            self._sharded_homes = (part, sharded)
        else:
            frozen = whole = Frozen(opened, slices, self.memories)
            self._bound = whole.bound
            if self._differentiates:
                self.trained = self.first_order = trainable = Masters(opened, self.memories)
            else:
                path = opened.workdir / f"weights-{run or uuid.uuid4().hex[:12]}"
                self.trained = self.buckets = trainable = Buckets(
                    opened, path, slices, self.memories, keep=bool(run)
                )
        if self._differentiates:
            self.gradients = self.first_order.gradients
        self.homes = {StateKind.FROZEN: frozen, StateKind.TRAINABLE: trainable}
        opened.in_memory.clear()
        self._trains = frozenset(p.name for p in self.spec.params(trainable=True))
        if plan.compile:
            self._compile()
        self._slack: Slack | None = None
        if device.type == "cpu":  # forwards alone leave few holes
            self._slack = Slack() if self._differentiates else Slack(share=1.0, spare=1.0)
        give_back()

    def _compile(self) -> None:
        """Compile the blocks, once for each kind. Raises ValueError where a frozen weight of theirs
        is not whole."""
        for param in (p for unit in self.spec.blocks for p in unit.params if not p.trainable):
            if not isinstance(self._bound.get(param.name), Tensor):
                raise ValueError(
                    f"compile is true, and a compiled block needs its weights whole: {param.name}"
                    " is decoded or assembled when"
                    f" it is used (frozen: {self.plan.frozen}, compute_dtype:"
                    f" {self.plan.compute_dtype}). Set compile: false,"
                    " or frozen: device, or keep the model in the compute dtype"
                )
        unfuse(self.module)
        self.cut.compile_blocks()

    # ---- residency -------------------------------------------------------------------------------

    def prepare(self, op: Op) -> Job:
        """Return the work of an op that moves state. An EVICT is of both parts; with it, between
        two blocks, goes the heap's slack. Ranks keep theirs: all would wait for the one that faults
        its pages in again."""
        if op.kind is OpKind.REDUCE:
            return self.gradients.reduce(op)
        if op.kind is OpKind.GATHER and op.part is StateKind.GRADIENT:
            return self.gradients.gather(op)
        if op.part is not None:  # gradients and optimizer states are with the trainables
            return self.homes.get(op.part, self.homes[StateKind.TRAINABLE]).prepare(op)
        if self._slack is not None and self.plan.mesh.world == 1:
            self._slack.bound(anew=op.unit == 0 and self._differentiates)
        works = [home.prepare(op) for home in self.homes.values()]

        def work() -> None:
            for each in works:
                each()

        return work

    def trainables(self, unit: int) -> list[ParamSpec]:
        """Return the trainable parameters that a unit's turn reads."""
        return self.model.reads[True][unit]

    def bind_trainables(self, unit: int) -> dict[str, Tensor]:
        """Bind a unit's trainables as its forward uses them, leaves of a new graph, and what else
        lies in a slot."""
        return self.cut.bind(
            unit, {name: v for home in self.homes.values() for name, v in home.values(unit).items()}
        )

    def unbind(self, unit: int) -> None:
        """Take what a turn of a unit bound out of the module again: copies are freed, and a slot is
        referred to no longer."""
        parts = (True,) if self._groups is None else (True, False)
        self.cut.unbind(
            unit, [p.name for trainable in parts for p in self.model.reads[trainable][unit]]
        )

    def graph(self, unit: int) -> AbstractContextManager[None]:
        """Return graphs of a unit that outlive its turn are made inside: they refer to what lies in
        slots by its place."""
        slots = [home.slots for home in self.homes.values() if home.slots is not None]
        return saved_by_place(slots, unit) if slots else nullcontext()

    def unread(self, unit: int) -> list[Weight]:
        """Return the weights of a block whose products a recomputation may leave out."""
        layer = self.cut.layer_name(unit)
        found = (self._bound.get(f"{layer}.{path}.weight") for path in self.cut.anatomy.unread)
        return [weight for weight in found if weight is not None and not isinstance(weight, Tensor)]

    def _value(self, name: str) -> Value:
        """Return a parameter where it lies on the device, by its canonical name."""
        return self.homes[StateKind.TRAINABLE if name in self._trains else StateKind.FROZEN].value(
            name
        )

    def weight(self, name: str) -> Weight:
        """Return a 2-D parameter by its canonical name, to be read a range at a time: the head's
        weight."""
        found = self._value(name)
        return DenseWeight(found, self.compute_dtype) if isinstance(found, Tensor) else found

    def vector(self, name: str | None) -> Tensor | None:
        """Return a small parameter by its canonical name, in the compute dtype: the head's bias."""
        if name is None:
            return None
        found = self._value(name)
        assert isinstance(found, Tensor)
        return found.to(self.device, self.compute_dtype)

    # ---- a step ----------------------------------------------------------------------------------

    def update(
        self, unit: int, *, step: int, learning_rate: float, coefficient: float = 1.0
    ) -> None:
        """UPDATE: apply the rule to a unit's masters, as far as this rank holds them, with their
        gradients."""
        changes = list(self.first_order.changes(unit))
        if self.plan.update.at_turn:  # whether the step counts is known only at its end
            self._undo.remember(
                unit, [t for each in changes for t in (each.master, *each.moments.values())]
            )
        stochastic = self.plan.update.rounding == "stochastic"
        for each in changes:
            on_device = not is_cpu(each.gradient.device)
            if coefficient != 1.0 and on_device:
                each.gradient.mul_(coefficient)
            rounding = (
                NoiseKey(self.plan.seed, step, 0, each.name, "rounding") if stochastic else None
            )
            gradient = self._landed(each.gradient, each.master.device)
            rate = learning_rate * (
                self.plan.optimizer.lora_b_ratio if ".lora_B." in each.name else 1.0
            )
            scale = 1.0 if on_device else coefficient
            for rule, part in self._parts(each.places):
                moments = {name: _range(moment, part) for name, moment in each.moments.items()}
                master = _range(each.master, part)
                piece = _range(gradient, part)
                rule.apply_(
                    master, piece, moments, step=step, lr=rate, rounding=rounding, scale=scale
                )
        self.first_order.changed(unit)

    def _parts(self, places: Sequence[tuple[int, str]]) -> list[tuple[Rule, slice | None]]:
        """Return the ranges of a master under one rule each: None for all of it. Rules work element
        by element, so that ranges of a slice which cuts through parameters are exact."""
        spares = (
            self.plan.optimizer.decay == "matrices"
            and self.rule != self._plain_rule
            and not self.keeps_decay_of_all
        )
        changes: list[tuple[int, Rule]] = []
        for start, name in places:
            rule = self._plain_rule if spares and name in self.cut.spared_by_decay else self.rule
            if not changes or rule is not changes[-1][1]:
                changes.append((start, rule))
        if len(changes) < 2:  # a slice without a parameter is padding
            return [(changes[0][1] if changes else self.rule, None)]
        ends = [start for start, _ in changes[1:]]
        return [
            (rule, slice(start, end))
            for (start, rule), end in zip(changes, [*ends, None], strict=True)
        ]

    def _landed(self, gradient: Tensor, where: torch.device) -> Tensor:
        """Return a gradient where its master is: on the host behind an accelerator in staging that
        the next one takes."""
        if gradient.device == where:
            return gradient
        if self._landing is None or len(self._landing) < gradient.numel():
            (landing_P,) = host_buffers([4 * gradient.numel()], self.device)
            self._landing = landing_P.view(torch.float32)
        landed = (
            self._landing[: gradient.numel()]
            .view(gradient.shape)
            .copy_(gradient, non_blocking=True)
        )
        recorded(self.device).synchronize()
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
        self.dirty = self.first_order.masters_changed()

    # ---- facts of a run that its checkpoints carry -----------------------------------------------

    def facts(self) -> dict[str, str]:
        """Return the facts that a checkpoint's tensors were made by."""
        return {} if self.keeps_decay_of_all else {"decay": self.plan.optimizer.decay}

    def resume_facts(self, facts: Mapping[str, str]) -> None:
        """Go on as a checkpoint's facts say: one that has no ``decay`` is of a run whose norms and
        biases decayed."""
        self.keeps_decay_of_all = "decay" not in facts

    # ---- what outlives a run ---------------------------------------------------------------------

    def settle(self) -> None:
        """Write the resident trainables of a zeroth-order run to the disk, where that is their
        tier."""
        if not self._differentiates:
            self.buckets.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainables, as far as this rank holds it; the tensors themselves,
        not copies: masters by name and optimizer states as ``name<NUL>state``, slices of them by
        unit, or a zeroth-order run's buckets as bytes."""
        return self.trained.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy in the tensors that :meth:`state_dict` gave. Raises ValueError where names or shapes
        differ: another model or mesh."""
        if not self._differentiates:
            self.buckets.load_state_dict(state)
            return
        own: dict[str, Tensor] = self.state_dict()
        if missing := sorted(own.keys() ^ state.keys()):
            raise ValueError(
                f"the saved state does not fit this model and plan; it differs in {missing[:5]}"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                shapes = (
                    f"{tuple(state[name].shape)} in the saved state and {tuple(tensor.shape)} here"
                )
                raise ValueError(f"{name!r} is {shapes}")
            tensor.copy_(state[name])
        self.masters_changed()

    def pieces(self, *, to_write: bool = False) -> dict[str, Pieces]:
        """Return the pieces of a first-order run's checkpoint that this rank holds, or writes."""
        return self.first_order.pieces(to_write=to_write)

    def sums_of_copies(self) -> list[tuple[str, int, int]]:
        """Return checksums of the state that several ranks hold copies of, as
        :meth:`blockwalk.ranks.shared_forwards.SharedForwards.compare_copies` takes them; the same
        names on every rank."""
        return [each for home in self._sharded_homes for each in home.sums()]

    def save_pretrained(self, folder: Path) -> None:
        """Write the adapter in PEFT's format, or every parameter as safetensors beside the
        configuration. Where ranks hold parameters together all of them call this, rank 0 writes,
        and one unit is whole at a time: nobody asks a device for the next parameter's gather before
        rank 0 has written those before it."""
        weights = self.trained.weights()
        if hasattr(self.module, "peft_config"):
            whole = {
                name: w if isinstance(w, Tensor) else w.rows(0, w.shape[0])
                for name, w in weights.items()
            }
            if self.rank == 0:
                save_adapter(self.module, whole, folder)
            return
        weights = {**self.homes[StateKind.FROZEN].weights(), **weights}
        weights = {p.name: weights[p.name] for p in self.spec.params()}
        groups = self._groups

        def begin(name: str) -> None:
            if groups is not None and name in weights:
                groups.meet()

        if self.rank == 0:
            safetensors.save_model(
                folder, self.module, {**weights, **self.model.untouched()}, begin
            )
            return
        for name, weight in weights.items():  # its turn in the same gathers
            begin(name)
            for _ in safetensors.pieces(weight):
                pass

    def close(self) -> None:
        self.trained.close()
        self.memories.close()
        self.model.close()


def _range(tensor: Tensor, part: slice | None) -> Tensor:
    """Return a range of a contiguous tensor's elements; the tensor itself where ``part`` is
    None."""
    return tensor if part is None else tensor.view(-1)[part]

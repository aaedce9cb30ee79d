"""The state that a walk works on: an opened model, and a home for each part of its state.

The engine answers the ops that move state by the mover of the residence of what they name
(:mod:`blockwalk.engine.movers`), and binds what estimators compute with. It never decides when
something happens: the program does. Nor does it choose its homes: it is handed them
(:mod:`blockwalk.engine.homes`), and does not ask which they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from blockwalk.cutting.fused_chains import unfuse_chains
from blockwalk.cutting.lora_forward import unfuse
from blockwalk.cutting.peft_models import adapter_parameters
from blockwalk.cutting.saved_adapters import save_adapter
from blockwalk.engine.home import Brief, Home, Job
from blockwalk.engine.homes import Homes
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.movers import Mover
from blockwalk.engine.slots import Slots, saved_by_place
from blockwalk.numerics.codecs.weights import DenseWeight, Value, Weight
from blockwalk.numerics.device import is_cpu
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import StateKind
from blockwalk.plan.table import resolved
from blockwalk.program.placements import Placements
from blockwalk.program.program import Op, OpKind, Shape
from blockwalk.system.heap import Slack, give_back
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.model_folder import safetensors

MOVES = (OpKind.FETCH, OpKind.GATHER, OpKind.CACHE, OpKind.REDUCE, OpKind.STORE, OpKind.EVICT)
"""The ops that an engine answers; the others are its estimator's."""


class Engine:
    """A cut model and the homes of its state.

    Args:
        model: the model, the plan and the device.
        homes: where its state lives.
        memories: where state is placed; they go when the engine is closed.

    Raises:
        ValueError: a block is to be compiled, and a weight of it is not whole.
    """

    loss_scratch = None
    """No buffers are kept for losses of weights at rest, as
    :class:`blockwalk.estimators.protocol.Weights` may have."""

    def __init__(self, model: ModelHandle, homes: Homes, memories: Memories) -> None:
        self.model = model
        self.plan = model.plan
        self.device = model.device
        self.memories = memories
        self.module = model.module
        self.cut = model.cut
        self.spec = model.spec
        self.stage = model.stage
        self.source = model.source
        self.compute_dtype = model.compute_dtype
        self.compute_dtype_of = model.compute_dtype_of
        self.homes: dict[StateKind, Home] = {
            StateKind.FROZEN: homes.frozen,
            StateKind.TRAINABLE: homes.trainable,
        }
        """The home of each part, as far as its parameters come and go."""
        places = Placements(self.plan, self.spec, self.device.type)
        self._movers: dict[tuple[int, StateKind], Mover] = {
            key: resolved(places.mover(*key)) for key in places.residences
        }
        """The mover of each kind of state of each unit."""
        self.trained = homes.trained
        """The home of the trainables, as far as they outlive a step."""
        self.gradients = homes.gradients
        """Those of a step; None where no step has any."""
        self.groups = homes.groups
        """The process groups of state that ranks gather, and of stages; None where there are
        none."""
        self._bound = homes.bound
        self._shared = homes.shared
        self.rank = 0 if homes.groups is None else homes.groups.rank
        self.dirty: frozenset[int] = frozenset()
        """Units whose node slices are out of date, as the last program left them."""
        model.in_memory.clear()
        self._trains = frozenset(p.name for p in self.spec.params(trainable=True))
        if self.plan.compile:
            self._compile()
        self._leaves_holes = self.plan.estimator.facts.walks_back
        self._slack: Slack | None = None
        if is_cpu(self.device):  # forwards alone leave few holes
            self._slack = Slack() if self._leaves_holes else Slack(share=1.0, spare=1.0)
        give_back()

    def _compile(self) -> None:
        """Compile the blocks, once for each kind. Raises ValueError where a frozen weight of theirs
        is not whole."""
        for param in (p for unit in self.spec.blocks for p in unit.params if not p.trainable):
            if not isinstance(self._bound.get(param.name), Tensor):
                raise ValueError(
                    f"compile is true, and a compiled block needs its weights whole: {param.name}"
                    f" is decoded or assembled when it is used (frozen: {self.plan.frozen},"
                    f" compute_dtype: {self.plan.compute_dtype}). Set compile: false, or frozen:"
                    " device, or keep the model in the compute dtype"
                )
        unfuse(self.module)
        unfuse_chains(self.module)
        self.cut.compile_blocks()

    def begin(self, shape: Shape) -> None:
        """Prepare for a program on micro-batches of this shape: where sequences are long, the heap
        keeps none of their large temporaries."""
        if self._slack is not None:
            self._slack.return_large(self.plan.returns_memory(shape.sequence, self.device.type))

    # ---- residency -------------------------------------------------------------------------------

    def prepare(self, op: Op) -> Job:
        """Return the work of an op that moves state. An EVICT is of both parts; with it, between
        two blocks, goes the heap's slack. Ranks keep theirs: all would wait for the one that faults
        its pages in again."""
        if self.gradients is not None:
            if op.kind is OpKind.REDUCE:
                return self.gradients.reduce(op)
            if op.kind is OpKind.GATHER and op.part is StateKind.GRADIENT:
                return self.gradients.gather(op)
        if op.part is not None:  # gradients and optimizer states are with the trainables
            home = self.homes.get(op.part, self.homes[StateKind.TRAINABLE])
            return self._movers[op.unit, op.part](home, op)
        if self._slack is not None and self.plan.mesh.world == 1:
            self._slack.bound(anew=op.unit == 0 and self._leaves_holes)
        evictions = [self._movers[op.unit, part](home, op) for part, home in self.homes.items()]

        def evict_both() -> None:
            for evict in evictions:
                evict()

        if all(isinstance(evict, Brief) for evict in evictions):
            return Brief(evict_both)
        return evict_both

    def trainables(self, unit: int) -> list[ParamSpec]:
        """Return the trainable parameters that a unit's turn reads."""
        return self.model.reads[True][unit]

    def bind(self, unit: int) -> dict[str, Tensor]:
        """Bind a unit's trainables as its forward uses them, leaves of a new graph, and what else
        lies in a slot."""
        values: dict[str, Value] = {}
        for home in self.homes.values():
            values |= home.values(unit)
        return self.cut.bind(unit, values)

    def unbind(self, unit: int) -> None:
        """Take what a turn of a unit bound out of the module again: copies are freed, and a slot is
        referred to no longer."""
        parts = (True,) if self.groups is None else (True, False)
        self.cut.unbind(
            unit, [p.name for trainable in parts for p in self.model.reads[trainable][unit]]
        )

    def graph(self, unit: int) -> AbstractContextManager[None]:
        """Return graphs of a unit that outlive its turn are made inside: they refer to what lies in
        slots by its place."""
        slots = self._slots()
        return saved_by_place(slots, unit) if slots else nullcontext()

    def _slots(self) -> list[Slots]:
        return [home.slots for home in self.homes.values() if home.slots is not None]

    def unread(self, unit: int) -> list[Weight]:
        """Return the weights of a block whose products a recomputation may leave out."""
        layer = self.cut.layer_name(unit)
        values = (self._bound.get(f"{layer}.{path}.weight") for path in self.cut.anatomy.unread)
        return [value for value in values if value is not None and not isinstance(value, Tensor)]

    def _value(self, name: str) -> Value:
        """Return a parameter where it lies on the device, by its canonical name."""
        return self.homes[StateKind.TRAINABLE if name in self._trains else StateKind.FROZEN].value(
            name
        )

    def weight(self, name: str) -> Weight:
        """Return a 2-D parameter by its canonical name, to be read a range at a time: the head's
        weight."""
        value = self._value(name)
        return DenseWeight(value, self.compute_dtype) if isinstance(value, Tensor) else value

    def vector(self, name: str | None) -> Tensor | None:
        """Return a small parameter by its canonical name, in the compute dtype: the head's bias."""
        if name is None:
            return None
        value = self._value(name)
        assert isinstance(value, Tensor)
        return value.to(self.device, self.compute_dtype)

    # ---- what outlives a run ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainables, as far as this rank holds it; the tensors themselves,
        not copies: masters by name and optimizer states as ``name<NUL>state``, slices of them by
        unit, or buckets as bytes."""
        return self.trained.state_dict()

    def sums_of_copies(self) -> list[tuple[str, int, int]]:
        """Return checksums of the state that several ranks hold copies of, as
        :meth:`blockwalk.ranks.ranks.Ranks.compare_copies` takes them; the same
        names on every rank."""
        frozen = [total for part in self._shared for total in part.sums()]
        return [*frozen, *self.trained.sums()]

    def save_pretrained(self, folder: Path) -> None:
        """Write the adapter in PEFT's format, or every parameter as safetensors beside the
        configuration. Where ranks hold parameters together all of them call this, rank 0 writes,
        and one unit is whole at a time: nobody asks a device for the next parameter's gather before
        rank 0 has written those before it."""
        weights = self.trained.weights()
        if hasattr(self.module, "peft_config"):
            frozen = adapter_parameters(self.module).keys() - weights.keys()
            if frozen:  # factors that are not trained belong to the adapter's file all the same
                at_rest = self.homes[StateKind.FROZEN].weights()
                weights = {**{n: at_rest[n] for n in at_rest if n in frozen}, **weights}
            tensors = {
                name: w if isinstance(w, Tensor) else w.rows(0, w.shape[0])
                for name, w in weights.items()
            }
            if self.rank == 0:
                save_adapter(self.module, tensors, folder)
            return
        groups = self.groups

        def begin(name: str) -> None:
            if groups is not None and name in weights:
                groups.meet()

        def read(name: str) -> Iterator[Tensor]:
            begin(name)
            yield from safetensors.pieces(weights[name])

        trained = [p.name for p in self.model.full_spec.params() if p.name in weights]
        entries = {
            name: safetensors.Entry(tuple(weights[name].shape), weights[name].dtype)
            for name in trained
        }
        if (new_files := self.model.rewritten(entries, read)) is not None:
            if self.rank == 0:
                safetensors.save_tensors(folder, self.module, new_files.entries, new_files.values)
            else:  # its turn in the same gathers
                for name in new_files.reads:
                    for _ in read(name):
                        pass
            new_files.base.close()
            return
        weights = {**self.homes[StateKind.FROZEN].weights(), **weights}
        weights = {p.name: weights[p.name] for p in self.model.full_spec.params()}
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

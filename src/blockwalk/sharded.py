"""What a walk works on where parameters, gradients and optimizer states are spread over ranks.

The engine of :mod:`blockwalk.engine`, whose parameters come and go in slots: GATHER and FETCH fill them, REDUCE turns a
unit's gradients into this rank's slice of their sum over all ranks, CACHE keeps node slices on the host. What is where, and
when, is compiled in :mod:`blockwalk.compile.sharded`; collectives are in :mod:`blockwalk.groups`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockwalk.compile.sharded_layout import (
    PARTS,
    accumulates,
    buffer_pools,
    flat_layout,
    has_node_slice,
    hosts_node_slice,
)
from blockwalk.engine import Engine
from blockwalk.groups import make_groups, require_agreement, versions
from blockwalk.plan import Plan
from blockwalk.program import Op
from blockwalk.state import ParamSpec, StateKind, Tier, Weight
from blockwalk.tiers.codecs import DenseWeight
from blockwalk.tiers.shards import Shard, read_slice
from blockwalk.updates import norm_of_sums, square_sums

if TYPE_CHECKING:
    from blockwalk.config import LoraSettings


class ShardedEngine(Engine):
    """A cut model whose state is spread over the ranks of ``plan.mesh``; arguments and errors as :class:`Engine`."""

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        plan: Plan,
        *,
        lora: LoraSettings | str | os.PathLike[str] | None,
        device: torch.device,
        workdir: Path,
        run: str = "run",
        training: bool = True,
    ) -> None:
        self.groups = make_groups(plan.mesh, device)
        self.shards: dict[tuple[int, StateKind], Shard] = {}
        self._owner: dict[str, tuple[int, StateKind]] = {}
        require_agreement({"plan": json.dumps(asdict(plan), default=str), "model": _fingerprint(model), **versions()})
        super().__init__(model, plan, lora=lora, device=device, workdir=workdir, run=run, training=training)
        self.rank = self.groups.rank
        pools = buffer_pools(plan, self.spec)
        self._slots = [
            {
                part: torch.zeros(n, dtype=self.compute_dtype, device=device)
                for part, n in zip(PARTS, sizes, strict=True)
            }
            for sizes in pools.slots
        ]
        self._places = {
            buffer.untyped_storage().data_ptr(): part
            for slot in self._slots
            for part, buffer in slot.items()
            if len(buffer)
        }
        self._buffers = [torch.zeros(n, device=device) for n in pools.gradients]
        last = len(self.spec.blocks) + 1
        self._buffer_of = dict(zip((0, last), pools.gradient_of_end, strict=True))
        self._slot_of: dict[int, int] = {}
        self._reads = {
            unit: {p.name for p in (*self._trainables[unit], *self._frozen[unit])} for unit in range(last + 1)
        }
        self._open: set[int] = set()
        """Units whose gradient buffer holds something."""
        self._kept: dict[tuple[int, StateKind], torch.Tensor] = {}
        """Node slices that stay on the device for the rest of a step."""
        self._gathered: tuple[int, dict[str, torch.Tensor]] = (-1, {})
        self._summed: dict[int, torch.Tensor] = {}
        """Of each unit the gradients as far as they are reduced."""
        self._waiting: set[int] = set()
        """Units whose accumulators hold something of this step."""

    # ---- binding at construction ------------------------------------------------------------------------------------

    def _place_frozen(self, index: int) -> None:
        """This rank's node slice of a unit's frozen parameters, read from the rank's own checkpoint or module."""
        shard = self._shard(index, StateKind.FROZEN, self._frozen_of(index))
        if shard.numel:
            tier = Tier.HOST if hosts_node_slice(self.plan) else Tier.DEVICE
            shard.node = self._slice(shard, self.plan.mesh.z3, self.compute_dtype, tier)
            if not has_node_slice(self.plan):
                shard.source, shard.node = shard.node, None

    def _frozen_of(self, index: int) -> list[ParamSpec]:
        return [p for p in self.spec.units[index].params if not p.trainable]

    def _place_trainables(self, index: int, params: list[ParamSpec]) -> None:
        """Master, optimizer states, gradients and what gathers begin with, each a slice."""
        plan, mesh = self.plan, self.plan.mesh
        shard = self._shard(index, StateKind.TRAINABLE, params)
        if not shard.numel:
            return
        own = shard.numel // mesh.z1
        states: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(
            ("master", *self.rule.states), ((own,), torch.float32)
        )
        held = self._allocate(index, plan.optimizer_state.tier, states)
        shard.master = held.pop("master")
        shard.moments = held
        read_slice(shard.master, shard, self.groups.slice(shard.numel, mesh.z1).start, self._read)
        gathers_master = self.compute_dtype == torch.float32 and plan.optimizer_state.tier is Tier.DEVICE
        if has_node_slice(plan):
            tier = Tier.HOST if hosts_node_slice(plan) else Tier.DEVICE
            shard.node = self._slice(shard, mesh.z3, self.compute_dtype, tier)
        if has_node_slice(plan) and not hosts_node_slice(plan):
            assert shard.node is not None
            shard.source = self._inside(shard.node, shard.numel, mesh.z3, mesh.z1)
        else:
            shard.source = shard.master if gathers_master else shard.master.to(self.device, self.compute_dtype)
        if accumulates(plan):
            where = self.device if plan.gradient.tier is Tier.DEVICE else torch.device("cpu")
            shard.accumulator = self._zeros(shard.numel // mesh.z2, torch.float32, where)
        if shard.accumulator is not None and plan.gradient.tier is Tier.DEVICE:
            shard.gradient = self._inside(shard.accumulator, shard.numel, mesh.z2, mesh.z1)
        else:
            shard.gradient = self._zeros(own, torch.float32, self.device)

    def _shard(self, unit: int, part: StateKind, params: list[ParamSpec]) -> Shard:
        layout = flat_layout(self.spec.units[unit], part, self.plan.mesh.world)
        shard = self.shards[unit, part] = Shard(layout, {p.name: p.shape for p in params})
        self._owner |= {p.name: (unit, part) for p in params}
        return shard

    def _slice(self, shard: Shard, size: int, dtype: torch.dtype, tier: Tier) -> torch.Tensor:
        """This rank's slice over ``size`` ranks, read from where the model came from."""
        where = torch.device("cpu") if tier is Tier.HOST else self.device
        made = self._zeros(shard.numel // size, dtype, where)
        read_slice(made, shard, self.groups.slice(shard.numel, size).start, self._read)
        return made

    def _zeros(self, numel: int, dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        pinned = where.type == "cpu" and self.device.type == "cuda"
        return torch.zeros(numel, dtype=dtype, device=where, pin_memory=pinned)

    def _inside(self, slice_P: torch.Tensor, numel: int, outer: int, inner: int) -> torch.Tensor:
        """Of this rank's slice over ``outer`` ranks the part that is its slice over ``inner`` (more) ranks."""
        start = self.groups.slice(numel, outer).start
        own = self.groups.slice(numel, inner)
        return slice_P[own.start - start : own.stop - start]

    def _read(self, name: str) -> torch.Tensor:
        if name in self._held:
            return self._held[name]
        assert self.source is not None, f"{name} has no source"
        found = self.source.weights([name])[name] if self.source.in_place(name) else None
        if isinstance(found, torch.Tensor):
            return found
        unit, part = self._owner[name]
        whole = torch.empty(self.shards[unit, part].shapes[name], dtype=self.compute_dtype)
        self.source.read_into(name, whole)
        return whole

    # ---- the ops that move parameters ---------------------------------------------------------------------------------

    def gather(self, op: Op) -> Callable[[], None]:
        """GATHER: complete a slice over a group of ranks, in a slot or, to refresh a node slice on the device, there."""
        assert op.part is not None
        assert op.span is not None
        inner, outer = op.span
        mesh, shard = self.plan.mesh, self.shards[op.unit, op.part]
        axes = self.groups.between(inner, outer)
        if op.slot < 0:
            assert shard.node is not None
            refreshed = self._inside(shard.node, shard.numel, mesh.z3, inner)
            return lambda: self.groups.gather_(refreshed, axes, op.lane)
        target = self._place(op)
        begin: torch.Tensor | None = None
        if op.kept:
            begin = self._kept[op.unit, op.part]
        elif outer == mesh.z1:
            begin = shard.source
        elif outer == mesh.z3 and not hosts_node_slice(self.plan):
            begin = shard.node
        own, piece = target[self.groups.slice(shard.numel, outer)], target[self.groups.slice(shard.numel, inner)]

        def work() -> None:
            if begin is not None:
                _copy(own, begin)
            self.groups.gather_(piece, axes, op.lane)

        return work

    def fetch(self, op: Op) -> Callable[[], None]:
        """FETCH: a node slice from the host into its place in a slot."""
        node, own = self._node_in_slot(op)
        return partial(_copy, own, node)

    def cache(self, op: Op) -> Callable[[], None]:
        """CACHE: a node slice from a slot to the host, or to where it stays on the device for the rest of the step."""
        node, own = self._node_in_slot(op)
        if op.kept:
            assert op.part is not None
            node = self._kept[op.unit, op.part] = torch.empty_like(own)
        return partial(_copy, node, own)

    def evict(self, op: Op) -> Callable[[], None]:
        """EVICT: the slot may be filled anew."""
        for part in PARTS if op.kept else ():
            self._kept.pop((op.unit, part), None)
        return lambda: None

    def _node_in_slot(self, op: Op) -> tuple[torch.Tensor, torch.Tensor]:
        assert op.part is not None
        shard = self.shards[op.unit, op.part]
        assert shard.node is not None
        return shard.node, self._place(op)[self.groups.slice(shard.numel, self.plan.mesh.z3)]

    def _place(self, op: Op) -> torch.Tensor:
        """Where a unit's part lies in the slot that an op fills."""
        assert op.part is not None
        self._slot_of[op.unit] = op.slot
        return self._slots[op.slot][op.part][: self.shards[op.unit, op.part].numel]

    # ---- what the estimators use ------------------------------------------------------------------------------------

    def live(self, unit: int) -> dict[str, torch.Tensor]:
        """Bind a unit's parameters where they lie in its slot; the trainable ones are leaves of a new graph."""
        values: dict[str, torch.Tensor] = {}
        for owner in {self._owner[name][0] for name in self._reads[unit]}:
            for part in PARTS:
                shard = self.shards[owner, part]
                if shard.numel:
                    views = shard.views(self._slots[self._slot_of[owner]][part])
                    values |= {name: view for name, view in views.items() if name in self._reads[unit]}
        return self.cut.bind(unit, values)

    def rest(self, unit: int) -> None:
        self.cut.unbind(unit)

    @contextmanager
    def graph(self, unit: int) -> Iterator[None]:
        """Graphs made inside refer to parameters by their places, which are filled again before they are differentiated."""

        def pack(saved: torch.Tensor) -> Any:
            part = self._places.get(saved.untyped_storage().data_ptr()) if saved.numel() else None
            return saved if part is None else (part, saved.shape, saved.stride(), saved.storage_offset())

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            part, shape, stride, offset = packed
            return self._slots[self._slot_of[unit]][part].as_strided(shape, stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def weight(self, name: str) -> Weight:
        return DenseWeight(self._view(name), self.compute_dtype)

    def vector(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._view(name)

    def _view(self, name: str) -> torch.Tensor:
        unit, part = self._owner[name]
        return self.shards[unit, part].views(self._slots[self._slot_of[unit]][part])[name]

    # ---- gradients ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._open.clear()
        self._waiting.clear()
        self._summed.clear()

    def expect(self, op: Op) -> None:
        if op.buffer >= 0:
            self._buffer_of[op.unit] = op.buffer

    def accumulator(self, name: str | None) -> torch.Tensor | None:
        if name is None or self._owner[name][1] is not StateKind.TRAINABLE:
            return None
        return self._gradient_views(self._owner[name][0])[name]

    def add_gradients(self, names: Iterable[str], gradients: Iterable[torch.Tensor | None]) -> None:
        views: dict[str, torch.Tensor] = {}
        for name, gradient in zip(names, gradients, strict=True):
            if name not in views:
                views |= self._gradient_views(self._owner[name][0])
            if gradient is not None:
                views[name].add_(gradient)

    def _gradient_views(self, unit: int) -> dict[str, torch.Tensor]:
        shard = self.shards[unit, StateKind.TRAINABLE]
        flat = self._buffers[self._buffer_of[unit]][: shard.numel]
        if unit not in self._open:
            self._open.add(unit)
            flat.zero_()
        return shard.views(flat)

    def reduce(self, op: Op) -> Callable[[], None]:
        """REDUCE: sum a unit's gradients over a group; keep them until the last micro-batch, or as this rank's slice."""
        assert op.span is not None
        inner, outer = op.span
        mesh, unit, shard = self.plan.mesh, op.unit, self.shards[op.unit, StateKind.TRAINABLE]
        axes = self.groups.between(inner, outer)
        flat = self._buffers[op.buffer][: shard.numel] if inner == 1 and op.buffer >= 0 else None

        def work() -> None:
            made = flat if flat is not None else self._summed[unit]
            if inner >= mesh.z1 and outer > inner:
                self.groups.sum_(made, axes, op.lane)
            else:
                made = self.groups.reduce(made, axes, op.lane)
            if shard.accumulator is not None and outer == mesh.z2 and op.buffer >= 0:
                if unit in self._waiting:
                    shard.accumulator.add_(made.to(shard.accumulator.device))
                else:
                    shard.accumulator.copy_(made)
                self._waiting.add(unit)
                made = shard.accumulator.to(self.device)
            if op.last:
                assert shard.gradient is not None
                if shard.gradient.data_ptr() != made.data_ptr():
                    shard.gradient.copy_(made)
            self._summed[unit] = made

        self._open.discard(unit)
        return work

    def grad_norm(self) -> float:
        """Over all ranks. The sums of squares are of the same pieces, whatever Z1 is, and their sum is exactly rounded."""
        mesh = self.plan.mesh
        sums: list[float] = []
        for shard in self._trained():
            assert shard.gradient is not None
            for piece in shard.gradient.chunk(mesh.world // mesh.z1):
                sums += square_sums(piece).tolist()
        first = self.groups.rank // mesh.z1 * mesh.z1
        everyone = self.groups.exchange(sums)[first : first + mesh.z1]
        return norm_of_sums(torch.tensor(each, dtype=torch.float64) for each in everyone)

    def total(self, values: list[float]) -> list[float]:
        """Sums over all ranks, in their order."""
        return [sum(column) for column in zip(*self.groups.exchange(values), strict=True)]

    def update(self, unit: int, *, step: int, learning_rate: float, coefficient: float = 1.0) -> None:
        """UPDATE: apply the rule to this rank's slice."""
        shard = self.shards[unit, StateKind.TRAINABLE]
        assert shard.master is not None
        assert shard.gradient is not None
        if coefficient != 1.0:
            shard.gradient.mul_(coefficient)
        gradient = shard.gradient.to(shard.master.device)
        self.rule.apply_(shard.master, gradient, shard.moments, step=step, lr=learning_rate)
        if shard.source is not shard.master:
            assert shard.source is not None
            shard.source.copy_(shard.master)

    def _trained(self) -> list[Shard]:
        return [shard for (_, part), shard in self.shards.items() if part is StateKind.TRAINABLE and shard.numel]

    # ---- what outlives a step -----------------------------------------------------------------------------------------

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients, on every rank."""
        return self._whole(lambda shard: shard.gradient)

    def whole_masters(self) -> dict[str, torch.Tensor]:
        """The whole trainables in float32, on every rank: for small models and tests."""
        return self._whole(lambda shard: shard.master)

    def _whole(self, piece: Callable[[Shard], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for shard in self._trained():
            own = piece(shard)
            assert own is not None
            found |= {name: view.clone() for name, view in shard.views(self.gathered(shard, own)).items()}
        return found

    def gathered(self, shard: Shard, own: torch.Tensor | None = None) -> torch.Tensor:
        """A whole flat buffer, of masters or frozen parameters unless this rank's slice of something else is given. Every
        rank calls this together, outside a program."""
        size = self.plan.mesh.z1
        if own is None:
            own = shard.master if shard.master is not None else shard.source
        if own is None:
            own, size = shard.node, self.plan.mesh.z3
        assert own is not None
        flat = torch.empty(shard.numel, dtype=own.dtype, device=self.device)
        flat[self.groups.slice(shard.numel, size)] = own.to(self.device)
        for axis in reversed(self.groups.between(1, size)):
            self.groups.gather_(flat[self.groups.slice(shard.numel, axis.inner)], (axis,), self.groups.lane(axis))
        return flat

    def save_pretrained(self, folder: Path) -> None:
        """Rank 0 writes what was trained, one unit gathered at a time; every rank calls this together."""
        if hasattr(self.module, "peft_config"):
            trained = self.whole_masters()
            if self.rank == 0:
                from blockwalk.adapters import save_adapter

                save_adapter(self.module, trained, folder)
            return
        from blockwalk.safetensors_file import pieces, save_model

        weights = {p.name: _Gathered(self, p) for p in self.spec.params()}
        if self.rank == 0:
            save_model(folder, self.module, weights)
            return
        for weight in weights.values():
            for _ in pieces(weight):
                pass

    def gathered_unit(self, unit: int) -> dict[str, torch.Tensor]:
        """A unit's parameters, whole: trainables in float32. The last unit that was asked for is kept."""
        if self._gathered[0] != unit:
            self._gathered = (-1, {})
            found: dict[str, torch.Tensor] = {}
            for part in PARTS:
                shard = self.shards[unit, part]
                if shard.numel:
                    found |= shard.views(self.gathered(shard))
            self._gathered = (unit, found)
        return self._gathered[1]

    def owner(self, name: str) -> int:
        """The unit of a parameter."""
        return self._owner[name][0]

    def state_dict(self) -> dict[str, Any]:
        """This rank's slices, by unit and kind."""
        return {
            f"{unit}\0{kind}": piece
            for (unit, part), shard in self.shards.items()
            if part is StateKind.TRAINABLE
            for kind, piece in shard.held().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        if missing := sorted(own.keys() ^ state.keys()):
            raise ValueError(f"the saved slices do not fit this model and plan; they differ in {missing[:5]}")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"{name!r} is {tuple(state[name].shape)} in the saved slices and {tuple(tensor.shape)} here: they"
                    " are another mesh's"
                )
            tensor.copy_(state[name])
        self.masters_changed()

    def masters_changed(self) -> None:
        """What gathers begin with follows the masters, and every node slice is out of date."""
        for shard in self._trained():
            assert shard.master is not None
            assert shard.source is not None
            if shard.source is not shard.master:
                shard.source.copy_(shard.master)
        trained = (unit for (unit, part), shard in self.shards.items() if part is StateKind.TRAINABLE and shard.numel)
        self.dirty = frozenset(trained if has_node_slice(self.plan) else ())

    def close(self) -> None:
        super().close()
        self.groups.close()


class _Gathered:
    """A parameter that is gathered with its unit when its rows are asked for, in the dtype that the model came in."""

    def __init__(self, engine: ShardedEngine, param: ParamSpec) -> None:
        self._engine, self._name = engine, param.name
        self.shape: Any = param.shape
        self.dtype: torch.dtype = getattr(torch, param.dtype)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        whole = self._engine.gathered_unit(self._engine.owner(self._name))[self._name]
        return whole[start:stop].to(self.dtype)

    def columns(self, start: int, stop: int) -> torch.Tensor:
        return self.rows(0, self.shape[0])[:, start:stop]

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        return self.rows(0, self.shape[0])[index]


def _copy(out_P: torch.Tensor, from_P: torch.Tensor) -> None:
    out_P.copy_(from_P, non_blocking=True)


def _fingerprint(model: str | os.PathLike[str] | nn.Module) -> str:
    """What tells one model from another: of a folder its configuration and the sizes of its files, of a module every
    parameter's name, shape and a few of its values."""
    digest = hashlib.blake2s(digest_size=8)
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            flat = parameter.detach().reshape(-1)
            few = flat[:: max(1, flat.numel() // 16)].double().tolist() if not flat.is_meta else []
            digest.update(
                repr((name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad, few)).encode()
            )
    else:
        for file in sorted(Path(model).iterdir()):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            if file.name == "config.json":
                digest.update(file.read_bytes())
    return digest.hexdigest()

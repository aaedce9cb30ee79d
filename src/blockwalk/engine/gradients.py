"""The gradients of a step, and where they are accumulated: by name, where masters are whole on this
process; over ranks in flat buffers, which are reduced to this rank's slices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from blockwalk.engine.home import Job
from blockwalk.engine.joined import Joined
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.engine.sharded_part import ShardedPart
from blockwalk.numerics.device import host_buffers, issued, recorded, sent
from blockwalk.numerics.updates import exact_parts, norm_of_sums, square_sums, sum_of_squares
from blockwalk.plan.mesh import ENDS, holders, reach
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.placement import StateKind
from blockwalk.program.flat_layout import buffer_pools
from blockwalk.program.program import Op
from blockwalk.program.reductions import sums_replicas
from blockwalk.ranks.groups import Completion
from blockwalk.tiers.memory import Memory

GradientHook = Callable[[Tensor], Tensor | None]
"""A function of a gradient that answers the one to take instead, or None."""


class GradientGroups:
    """The memory in which gradients wait for the step's end, those of a unit in one group. Each
    step makes them anew: the pages of a fresh file need not be read before they are overwritten,
    and what is not written yet of a file that is gone never is."""

    def __init__(self, memory: Memory, units: Sequence[Iterable[ParamSpec]]) -> None:
        self._memory = memory
        self._shapes = [{p.name: (p.shape, torch.float32) for p in params} for params in units]
        self._unit = {name: unit for unit, shapes in enumerate(self._shapes) for name in shapes}
        self._tensors: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """Return the float32 tensor that a gradient lies in; it reads zero at first."""
        if name not in self._tensors:
            unit = self._unit[name]
            self._tensors |= self._memory.zeros(self._shapes[unit], (StateKind.GRADIENT, unit))
        return self._tensors[name]

    def will_need(self, names: Iterable[str]) -> None:
        """Make gradients ready to be added to, blocking."""
        for unit in {self._unit[name] for name in names}:
            self._memory.will_need((StateKind.GRADIENT, unit))

    def dont_need(self, names: Iterable[str]) -> None:
        """Note that the turn of gradients is over."""
        for unit in {self._unit[name] for name in names}:
            self._memory.dont_need((StateKind.GRADIENT, unit))

    def forget(self, unit: int) -> None:
        """Free a unit's gradients."""
        for name in self._shapes[unit]:
            self._tensors.pop(name, None)
        self._memory.forget((StateKind.GRADIENT, unit))

    def clear(self) -> None:
        """Free all gradients."""
        for unit in range(len(self._shapes)):
            self.forget(unit)


@dataclass(frozen=True, slots=True)
class _Whole:
    """The gradients of a joined unit."""

    buffer_P: Tensor
    tensors: list[Tensor]
    """Its tensors, in the order of their names."""


class NamedGradients:
    """Accumulators of whole parameters, each made when something is first added to it.

    Args:
        masters: the trainables by name.
        device: where blocks compute.
        groups: where they lie if not on the device.
        landings: bytes of the places in host memory where updates read them, behind an accelerator.
        ends: whether updates use gradients up before the step's end; their squares are then kept
            until it.
        clips: whether their norm is asked for.
        joined: units whose gradients lie side by side, where every one of them gets one.
        hooks: functions that parameters' owners hooked to their gradients; they are given the
            step's, when it is complete.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        device: torch.device,
        groups: GradientGroups | None,
        *,
        landings: Sequence[int] = (),
        ends: bool,
        clips: bool = True,
        joined: Mapping[int, Joined] | None = None,
        hooks: Mapping[str, Sequence[GradientHook]] | None = None,
    ) -> None:
        self._masters = masters
        self._hooks = hooks or {}
        self._unhooked: set[str] = set()
        """Parameters whose hooks have not been given this step's gradient."""
        self._device = device
        self._groups = groups
        self._ends = ends
        self._clips = clips
        self.sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._chunk_sums: dict[str, Tensor] = {}
        """Sums that the norm is made of, for gradients that are complete and went to the disk."""
        self._places = [place_P.view(torch.float32) for place_P in host_buffers(landings, device)]
        self._landed: dict[str, Tensor] = {}
        """The gradients that came to a place, until an update uses them up."""
        self._joined = joined or {}
        self._unit_of = {unit_joined.names: unit for unit, unit_joined in self._joined.items()}
        self._whole: dict[int, _Whole] = {}
        """The gradients of joined units that came together."""
        self._norms: list[tuple[Sequence[str], Tensor]] = []
        """The names and norms of gradients that updates have used up as one."""

    def begin(self) -> None:
        self._whole.clear()
        self._norms.clear()
        self.sums.clear()
        self._unhooked = set(self._hooks)
        self._squares.clear()
        self._chunk_sums.clear()
        self._landed.clear()
        if self._groups is not None:
            self._groups.clear()

    def expect(self, op: Op) -> None:
        """Do nothing: each parameter has one place."""

    def accumulator(self, name: str | None) -> Tensor | None:
        if name is None or name not in self._masters:
            return None
        if name not in self.sums:
            if self._groups is None:
                self.sums[name] = torch.zeros(self._masters[name].shape, device=self._device)
            else:
                self.sums[name] = self._groups.tensor(name)
        return self.sums[name]

    def add(self, names: Iterable[str], gradients: Iterable[Tensor | None]) -> None:
        names = tuple(names)
        unit = self._unit_of.get(names)
        if unit is not None and self._add_joined(unit, [*gradients]):
            return
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and name in self.sums:
                self.sums[name].add_(gradient)
            elif gradient is not None and self._groups is None:
                self.sums[name] = gradient.to(torch.float32)
            elif gradient is not None and self._groups is not None:
                self.sums[name] = self._groups.tensor(name).copy_(gradient)

    def _add_joined(self, unit: int, gradients: list[Tensor | None]) -> bool:
        """Add to the gradients of a joined unit as one; False where one has come by itself, or some
        do not come."""
        complete = [gradient for gradient in gradients if gradient is not None]
        joined = self._joined[unit]
        if len(complete) < len(joined.names):
            return False
        if unit in self._whole:
            torch._foreach_add_(self._whole[unit].tensors, complete)
            return True
        if not self.sums.keys().isdisjoint(joined.names):
            return False
        buffer_P = joined.buffer(self._device)  # the turn's graph is gone by now
        whole = _Whole(buffer_P, joined.tensors(buffer_P))
        torch._foreach_copy_(whole.tensors, complete)
        self._whole[unit] = whole
        self.sums.update(zip(joined.names, whole.tensors, strict=True))
        return True

    def use_up_joined(self, unit: int) -> Tensor | None:
        """Return a joined unit's gradients as one tensor that an update takes over; None where they
        did not all come together."""
        whole = self._whole.get(unit)
        if whole is None:
            return None
        names = self._joined[unit].names
        self._complete(names)
        if self._ends:
            self._norms.append((names, torch.stack(torch._foreach_norm(whole.tensors))))
        for name in names:
            del self.sums[name]
        return whole.buffer_P

    def free_joined(self, unit: int) -> None:
        """Let go of the buffer that an update has used up."""
        self._whole.pop(unit, None)

    def _complete(self, names: Iterable[str]) -> None:
        """Give complete gradients to their hooks, once a step."""
        for name in self._unhooked.intersection(names) & self.sums.keys():
            self._unhooked.remove(name)
            for hook in self._hooks[name]:
                answer = hook(self.sums[name])
                if answer is not None:  # None: it wrote into the gradient, or looked at it
                    self.sums[name].copy_(answer)

    def reduce(self, op: Op) -> Job:
        raise AssertionError("one process has nothing to sum over")

    gather = reduce

    def land(self, names: Iterable[str], place: int) -> None:
        """Bring complete gradients to a place in host memory, side by side, and free them on the
        device when they are there."""
        complete = [name for name in names if name in self.sums]
        self._complete(complete)
        landed: dict[str, Tensor] = {}
        start = 0
        for name in complete:
            gradient = self.sums[name]
            if self._ends:
                self._squares[name] = sum_of_squares(gradient)
            part_P = self._places[place][start : start + gradient.numel()]
            landed[name] = part_P.view(gradient.shape).copy_(gradient, non_blocking=True)
            start += gradient.numel()
        recorded(self._device).synchronize()
        for name in complete:
            del self.sums[name]
        self._landed |= landed

    def waits(self, name: str) -> bool:
        """Return whether a gradient is there for an update."""
        return name in self.sums or name in self._landed

    def use_up(self, name: str) -> Tensor:
        """Return a gradient that an update takes over."""
        if name in self._landed:
            return self._landed.pop(name)
        self._complete([name])
        gradient = self.sums.pop(name)
        if self._ends:
            self._squares[name] = sum_of_squares(gradient)
        return gradient

    def put_away(self, complete: Iterable[str]) -> None:
        """Take the squares of gradients that are ``complete`` while their pages are there, so that
        they are not read again."""
        complete = list(complete)
        self._complete(complete)
        for name in complete:
            if name in self.sums and self._clips:
                self._chunk_sums[name] = square_sums(self.sums[name])
                self._squares[name] = self._chunk_sums[name].sum().to(torch.float32)
            elif name in self.sums:
                self._squares[name] = sum_of_squares(self.sums[name])

    def norm(self) -> float:
        """Return the norm of all gradients."""
        self._complete(self.sums)
        chunk_sums = self._chunk_sums
        return norm_of_sums(
            chunk_sums[name] if name in chunk_sums else square_sums(self.sums[name])
            for name in self._masters
            if name in self.sums
        )

    def squares(self) -> list[tuple[Sequence[str], Tensor]]:
        self._complete(self.sums)
        squares = self._squares | {
            name: sum_of_squares(gradient)
            for name, gradient in self.sums.items()
            if name not in self._squares
        }
        of_units = [(names, norms_T * norms_T) for names, norms_T in self._norms]
        return [*of_units, *(([name], square.view(1)) for name, square in squares.items())]

    def take(self) -> dict[str, Tensor]:
        self._complete(self.sums)
        gradients = self.sums
        self.sums = {}
        if self._groups is None:
            return gradients
        return {name: gradient.clone() for name, gradient in gradients.items()}


@dataclass(slots=True)
class MasterSlices:
    """The slices of a unit's masters that a rank updates, float32."""

    master: Tensor
    moments: dict[str, Tensor]
    """The optimizer's states, by name."""
    gradient: Tensor
    """The sum over all ranks."""
    accumulator: Tensor | None
    """Gradients that wait for further micro-batches: a slice over ``plan.gradient_ranks``."""

    @property
    def kept(self) -> dict[str, Tensor]:
        """The state that outlives a step, by kind."""
        return {"master": self.master, **self.moments}


class FlatGradients:
    """Gradients over ranks: a unit is differentiated into a flat buffer of its part's layout, which
    REDUCE turns into this rank's slice of the sum over all ranks."""

    def __init__(
        self, model: ModelHandle, part: ShardedPart, units: Mapping[int, MasterSlices]
    ) -> None:
        self._part = part
        self._units = units
        self._plan = model.plan
        self._groups = part.groups
        pools = buffer_pools(model.plan, model.spec)
        self._names = [unit.name for unit in model.spec.units]
        self._counted = {
            unit: slices
            for unit, slices in units.items()
            if model.stage_of(unit) == model.stage.number
        }
        """The units whose gradients this stage answers for: of a tied weight the first does."""
        self.buffers = [torch.zeros(n, device=model.device) for n in pools.gradients]
        self._buffer_of = dict(
            zip((0, len(model.spec.blocks) + 1), pools.gradient_of_end, strict=True)
        )
        self._open: set[int] = set()
        """Units whose buffer holds something."""
        self._summed: dict[int, Tensor] = {}
        """The gradients of each unit as far as they are reduced."""
        self._left: deque[tuple[Tensor, torch.Event]] = deque()
        """Sums that another lane reads than the one that made them, and the events that it has read
        them, the oldest first."""
        self._waiting: dict[int, int] = {}
        """The walks of this step that each unit's accumulator holds."""

    def begin(self) -> None:
        self._open.clear()
        self._left.clear()  # an earlier step's: every lane begins after it
        self._waiting.clear()
        self._summed.clear()

    def expect(self, op: Op) -> None:
        if op.buffer >= 0:
            self._buffer_of[op.unit] = op.buffer

    def accumulator(self, name: str | None) -> Tensor | None:
        return self._views(name)[name] if name is not None and name in self._part.owner else None

    def add(self, names: Iterable[str], gradients: Iterable[Tensor | None]) -> None:
        views: dict[str, Tensor] = {}
        for name, gradient in zip(names, gradients, strict=True):
            if name not in views:
                views |= self._views(name)
            if gradient is not None:
                views[name].add_(gradient)

    def _views(self, name: str) -> dict[str, Tensor]:
        """Return the gradients of the unit that owns a parameter, by name, in its buffer; zero
        where nothing was added."""
        unit = self._part.owner[name]
        slices = self._part.units[unit]
        flat_P = self.buffers[self._buffer_of[unit]][: slices.numel]
        if unit not in self._open:
            self._open.add(unit)
            flat_P.zero_()
        return {n: view for n, view in slices.open(flat_P).items() if isinstance(view, Tensor)}

    def reduce(self, op: Op) -> Job:
        """REDUCE: sum a unit's gradients over a group; keep them until the last micro-batch, or as
        this rank's slice."""
        plan = self._plan
        unit = op.unit
        if op.axes == (ENDS,):
            assert self._groups.stages is not None
            return partial(self._groups.stages.sum_ends_, self._units[unit].gradient)
        accumulator = self._units[unit].accumulator
        axes = self._groups.named(op.axes)
        inner, outer = reach(axes)
        buffer_P: Tensor | None = None
        if inner == 1 and op.buffer >= 0:
            buffer_P = self.buffers[op.buffer][: self._part.units[unit].numel]
        accumulates = outer == plan.gradient_ranks and op.buffer >= 0

        def work() -> Completion | None:
            summand_P = self._summed[unit] if buffer_P is None else buffer_P
            if sums_replicas(plan, axes):
                sum_P = summand_P
                completion = self._groups.begin_sum_(sum_P, axes, op.lane)
            else:
                sum_P, completion = self._groups.begin_reduce(summand_P, axes, op.lane)
            if completion is None:
                keep(summand_P, sum_P)
                return None

            def complete() -> None:
                completion()
                keep(summand_P, sum_P)

            return complete

        def keep(summand_P: Tensor, sum_P: Tensor) -> None:
            if accumulator is not None and accumulates:
                sum_P = self._accumulated(unit, accumulator, sum_P)
            self._summed[unit] = sum_P
            if op.last:
                self._complete(unit, self._summed.pop(unit))
            event = issued(summand_P.device) if buffer_P is None else None
            if event is not None:
                self._left.append((summand_P, event))

        self._open.discard(unit)
        return work

    def _complete(self, unit: int, sum_P: Tensor) -> None:
        """Copy the last sum of a step to where an update reads it: this rank's slice, or the part
        of it that a GATHER completes."""
        gradient = self._units[unit].gradient
        ranks = self._plan.optimizer_ranks
        parts = len(gradient) // len(sum_P)
        numel = self._part.units[unit].numel
        part_P = self._part.inside(gradient, numel, ranks, ranks * parts)
        if part_P.data_ptr() != sum_P.data_ptr():
            part_P.copy_(sum_P)

    def _free_read_sums(self) -> None:
        """Give the memory of sums that another lane has read back to this one, which made them, but
        for the newest, which it may still read."""
        while len(self._left) > self._plan.prefetch + 1:
            sum_P, event = self._left.popleft()
            torch.accelerator.current_stream(sum_P.device).wait_event(event)

    def gather(self, op: Op) -> Job:
        """GATHER: complete a unit's sum, of which the ranks of a node hold slices that came from
        the other nodes."""
        gradient = self._units[op.unit].gradient
        axes = self._groups.named(op.axes)
        return lambda: self._groups.begin_gather_(gradient, axes, op.lane)

    def _accumulated(self, unit: int, accumulator: Tensor, sum_P: Tensor) -> Tensor:
        """Return the sum of a unit's gradients over the micro-batches so far, ``sum_P`` being the
        last one's. Where it is kept on the host behind an accelerator it comes to be added to, and
        goes again unless it is complete."""
        count = self._waiting.get(unit, 0)
        self._waiting[unit] = count + 1
        if accumulator.device == sum_P.device:
            return accumulator.add_(sum_P) if count else accumulator.copy_(sum_P)
        self._free_read_sums()
        total_P = sent(accumulator, sum_P.device).add_(sum_P) if count else sum_P
        if count + 1 < len(self._plan.walks):
            accumulator.copy_(total_P, non_blocking=True)
        return total_P

    def norm(self) -> float:
        """Return the norm over all ranks. The sums of squares are of the same ranges, over however
        many ranks masters are spread, and their sum is exactly rounded: each rank hands on its own
        in a few numbers, of however many parameters."""
        ranks = self._plan.optimizer_ranks
        parts = [part_P for slices in self._counted.values() for part_P in self._parts(slices)]
        sums: list[float] = []
        if parts:
            sums = torch.cat([square_sums(part_P) for part_P in parts]).tolist()
        everyone = self._groups.exchange(exact_parts(sums))
        of_ranks = holders(everyone, self._plan.mesh, self._groups.rank, ranks)
        return norm_of_sums(torch.tensor(parts, dtype=torch.float64) for parts in of_ranks)

    def squares(self) -> list[tuple[Sequence[str], Tensor]]:
        return [
            ([self._names[unit]], sum_of_squares(part_P).view(1))
            for unit, slices in self._counted.items()
            for part_P in self._parts(slices)
        ]

    def _parts(self, slices: MasterSlices) -> tuple[Tensor, ...]:
        """Return a unit's gradient in parts that are the same, over however many ranks masters are
        spread."""
        return slices.gradient.chunk(self._plan.mesh.stage_ranks // self._plan.optimizer_ranks)

    def take(self) -> dict[str, Tensor]:
        gradients = {unit: slices.gradient for unit, slices in self._units.items()}
        return self._part.whole(gradients, self._plan.optimizer_ranks)

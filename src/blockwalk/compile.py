"""Compile a plan into a program: the one place where the order of a step is decided.

A step is a list of *turns*: the prologue, the blocks forwards, the epilogue, and for backpropagation the blocks
backwards. Each turn names a unit and the work done with it; everything else (fetches ahead of their turn, slots,
evictions, write-backs) is lowered the same way for every plan by :class:`_Builder`. :func:`compile` is pure: the same
arguments give the same program on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from blockwalk.plan import Estimator, Plan, Timing
from blockwalk.program import Lane, Op, OpKind, Pool, Program, Shape, StepKind, check
from blockwalk.state import (
    CODEC_DTYPE,
    DTYPE_BYTES,
    Codec,
    ModelSpec,
    ParamSpec,
    StateKind,
    Tier,
    UnitSpec,
    encoded_nbytes,
)

RULE_STATES = {"adamw": 2, "momentum": 1, "sgd": 0, "sign": 0}
"""Float32 state tensors that each update rule keeps for a trainable parameter."""

SMALL_SHARE = 0.1
"""Trainables below this share of the model (adapters) stay where they are instead of travelling with their block."""


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What one kind of unit needs while it computes, for one shape: measured once, read by plan, program and simulator."""

    forward_transient: int = 0
    """Peak device bytes of a forward without graph, beyond its input."""
    backward_transient: int = 0
    """Peak device bytes of recomputing with graph and differentiating, gradients of parameters included."""
    saved: int = 0
    """Bytes of activations that a kept graph holds; of a prologue, its hidden state and what its calls hold for the blocks."""
    forward_flops: int = 0
    backward_flops: int = 0
    """Recomputation not included."""


@dataclass(frozen=True)
class Costs:
    """Costs by kind of unit, hashable so that programs can be cached."""

    units: tuple[tuple[str, UnitCost], ...] = ()
    scratch: int = 0
    """Device bytes of the buffers that weights are decoded or perturbed into: kept from op to op."""

    def of(self, kind: str) -> UnitCost:
        return dict(self.units).get(kind, UnitCost())


@dataclass(frozen=True, slots=True)
class Pending:
    """Deferred updates that a step finds: how many are not in the store yet, and whether this step writes them back."""

    entries: int = 0
    flush: bool = False
    dirty: frozenset[int] = frozenset()
    """Sharded over ranks: units whose trainables changed since their node slice was gathered."""


@lru_cache(maxsize=64)
def compile(
    plan: Plan,
    model: ModelSpec,
    step_kind: StepKind,
    shape: Shape,
    *,
    costs: Costs = Costs(),
    pending: Pending = Pending(),
    device: str = "cpu",
    group_size: int = 32,
) -> Program:
    """The program of one kind of step.

    Args:
        plan: the placements and settings.
        model: the units, in execution order.
        step_kind: train, gradients (no update), evaluate (no gradient) or flush (apply what is pending).
        shape: the shape bucket of one micro-batch.
        costs: transients and FLOPs of each kind of unit at this shape; without them those figures are zero.
        pending: deferred updates that this step finds.
        device: ``cpu`` or ``cuda``. On a CPU, files are mapped instead of copied.
        group_size: elements that share a scale in the int4 codec.

    Raises:
        AssertionError: an invariant of :mod:`blockwalk.program` does not hold.
    """
    if plan.sharded:
        from blockwalk.compile_sharded import sharded_builder

        trains = step_kind in (StepKind.TRAIN, StepKind.GRADIENTS)
        builder: _Builder = sharded_builder(
            plan, model, shape, costs, device, group_size, dirty=pending.dirty, differentiates=trains
        )
    elif plan.mesh.slice > 1:
        from blockwalk.compile_slices import SliceBuilder

        builder = SliceBuilder(
            plan, model, shape, costs, device, group_size, pending=pending, gathers=step_kind is not StepKind.FLUSH
        )
    else:
        builder = _Builder(plan, model, shape, costs, device, group_size)
    if step_kind is StepKind.FLUSH:
        _flush(builder, pending)
    elif plan.estimator is Estimator.ZEROTH_ORDER and step_kind is StepKind.TRAIN:
        _zeroth_order(builder, pending)
    elif step_kind is StepKind.EVALUATE:
        _evaluate(builder)
    else:
        _backprop(builder, update=step_kind is StepKind.TRAIN)
    return check(builder.program(step_kind))


@dataclass(slots=True)
class _Turn:
    """One unit's turn: ``work`` emits the ops that use it, given what they must wait for, and returns their indices."""

    unit: int
    work: Callable[[tuple[int, ...]], list[int]]
    updates: bool = False
    """An update at the step's end: it needs a unit's masters, and what is in a slot only where they are there."""


@dataclass(slots=True)
class _Builder:
    """Lowers turns to ops: fetches ahead, slots, evictions, memory."""

    plan: Plan
    model: ModelSpec
    shape: Shape
    costs: Costs
    device: str
    group_size: int
    ops: list[Op] = field(default_factory=list)
    freed_by: dict[int, int] = field(default_factory=dict)
    """The op that last emptied each slot."""
    adapters: bool = field(init=False)
    """True where the trainables are a small share of the model: they stay resident whatever their tier."""

    def __post_init__(self) -> None:
        self.adapters = self.model.numel(trainable=True) < SMALL_SHARE * self.model.numel()

    # ---- what the placements mean for this model ----------------------------------------------------------------

    @property
    def last(self) -> int:
        """The epilogue's index."""
        return len(self.model.blocks) + 1

    def mapped(self, part: StateKind) -> bool:
        """True where this part is used in place through a file map: disk tier, CPU, and never rewritten in a slot."""
        placement = self.plan.frozen if part is StateKind.FROZEN else self.plan.trainable
        rewritten = part is StateKind.TRAINABLE and self.plan.estimator is Estimator.ZEROTH_ORDER
        return placement.tier is Tier.DISK and self.device == "cpu" and not rewritten

    def streams(self, unit: int, part: StateKind) -> bool:
        """True where this part of this unit is fetched when its turn comes."""
        placement = self.plan.frozen if part is StateKind.FROZEN else self.plan.trainable
        trainable = part is StateKind.TRAINABLE
        if placement.tier is Tier.DEVICE or not self.reads(unit).numel(trainable=trainable):
            return False
        if trainable and self.adapters:
            return False
        return self.mapped(part) or unit not in (0, self.last)

    def parts(self, unit: int) -> list[StateKind]:
        return [part for part in (StateKind.FROZEN, StateKind.TRAINABLE) if self.streams(unit, part)]

    def part_bytes(self, unit: UnitSpec, part: StateKind) -> int:
        """Encoded bytes of a unit's frozen or trainable parameters."""
        trainable = part is StateKind.TRAINABLE
        if trainable and self.plan.estimator is Estimator.ZEROTH_ORDER:
            return bucket_bytes(self.plan, unit, self.group_size)
        placement = self.plan.trainable if trainable else self.plan.frozen
        return unit.nbytes(placement.codec, self.group_size, trainable=trainable)

    def reads(self, index: int) -> UnitSpec:
        """A unit with all that its turn reads: an epilogue whose head is tied reads the prologue's weight as well."""
        return self.model.units[index] if index != self.last else epilogue_reads(self.model)

    def carried(self, step_kind: StepKind) -> int:
        """Device bytes that go from op to op for the whole walk: of every walk under way its hidden state (in the backward
        walk the hidden state's gradient) and what the prologue made for the blocks."""
        micro_batches = self.plan.gradient_accumulation_steps if step_kind is not StepKind.EVALUATE else 1
        if self.plan.estimator is Estimator.ZEROTH_ORDER:
            in_turn = self.plan.zo.noise == "mezo" or step_kind is not StepKind.TRAIN
            walks = micro_batches * (1 if in_turn else passes_of_rank(self.plan))
        else:
            walks = micro_batches if self.plan.accumulation_order == "block" else 1
        made = self.costs.of(self.model.prologue.kind).saved
        saves = self.plan.estimator is Estimator.BACKPROP and step_kind is not StepKind.EVALUATE
        if made and not (saves and _activation_pool(self.plan, self.device) is Pool.DEVICE):
            made += self.hidden_bytes  # the prologue's own hidden state stays beside the walk's
        return 0 if step_kind is StepKind.FLUSH else walks * made

    @property
    def hidden_bytes(self) -> int:
        """Of one micro-batch's hidden state."""
        return self.shape.tokens * self.model.hidden_size * DTYPE_BYTES[_compute_dtype(self.plan, self.model)]

    def gradient_bytes(self, unit: int) -> int:
        """Float32 bytes of the gradients that are first made at a unit's backward turn; a tied head's are made there."""
        tied = {canonical for _, canonical in self.model.tied}
        params = self.reads(unit).params
        return 4 * sum(p.numel for p in params if p.trainable and not (unit == 0 and p.name in tied))

    @property
    def gradient_pool(self) -> Pool:
        return {Tier.DEVICE: Pool.DEVICE, Tier.HOST: Pool.HOST, Tier.DISK: Pool.DISK}[self.plan.gradient.tier]

    def differentiates(self, unit: int, micro_batch: int, transient: int) -> dict[str, object]:
        """What a backward op takes: its first micro-batch's gradients stay as accumulators, where they already are in
        float32 they are the very tensors that it made. The loss adds to accumulators that were there before it."""
        made = self.gradient_bytes(unit) if micro_batch == 0 else 0
        size = DTYPE_BYTES[_compute_dtype(self.plan, self.model)]
        beside = made * size // 4 if size < 4 else 0
        if unit != self.last:
            transient = max(transient - made, beside if transient else 0)
        return {
            "transient": transient,
            "takes": ((self.gradient_pool, made),) if made else (),
        }

    @property
    def draw_bytes(self) -> int:
        """Of the original's noise: a whole parameter's draw, and its product with the scale."""
        return 2 * max((p.nbytes for p in self.model.params() if p.trainable), default=0)

    def updates(self, unit: int) -> dict[str, object]:
        """What an update uses up: the accumulated gradients of a unit's own parameters."""
        used = 0
        if self.plan.estimator is Estimator.BACKPROP:
            used = 4 * self.model.units[unit].numel(trainable=True)
        if self.plan.zo.noise == "mezo" and self.plan.estimator is Estimator.ZEROTH_ORDER:
            return {"part": StateKind.TRAINABLE, "transient": self.draw_bytes if unit == 0 else 0}
        narrow = [p.numel for p in self.model.units[unit].params if p.trainable and self.master_bytes(p) < 4]
        frees = ((self.gradient_pool, used),) if used else ()
        # a 16-bit master is updated in a float32 copy, and the last one's is let go after the next one is made
        lifted = 4 * sum(sorted(narrow)[-2:]) if used else 0
        return {"part": StateKind.TRAINABLE, "frees": frees, "transient": lifted}

    def master_bytes(self, p: ParamSpec) -> int:
        """Bytes an element of a trainable's master."""
        return DTYPE_BYTES[CODEC_DTYPE.get(self.plan.trainable.codec, p.dtype)]

    # ---- what is different where state is spread over ranks ------------------------------------------------------

    def arrives_updated(self, unit: int) -> bool:
        """Whether what is pending for a unit is applied on its way to its turn."""
        return False

    @property
    def graphs_outlive_slots(self) -> bool:
        """Whether a graph can be kept while its parameters leave their slot."""
        return False

    def reduced(self, unit: int, done: int, complete: bool) -> list[int]:
        """Sum a unit's gradients over ranks after its backward; ``complete`` after the last micro-batch."""
        return []

    def completed(self, gradients: Iterable[int]) -> list[int]:
        """The ops after which all gradients are there, given the last that made each unit's."""
        return list(gradients)

    def exchange(self) -> list[int]:
        """Add up the losses of all ranks."""
        return []

    # ---- emitting -----------------------------------------------------------------------------------------------

    def op(self, kind: OpKind, unit: int, lane: Lane, deps: Sequence[int] = (), **details: object) -> int:
        index = len(self.ops)
        self.ops.append(Op(index, kind, unit, lane, tuple(sorted(set(deps))), **details))  # type: ignore[arg-type]
        return index

    def walk(self, turns: Sequence[_Turn]) -> None:
        """Emit the turns in order. Fetches run ahead by ``plan.prefetch`` turns as far as slots are free; a unit whose
        next turn is near keeps its slot."""
        slots = self.plan.prefetch + 1
        free = list(range(slots))
        freed_by = self.freed_by
        held: dict[int, tuple[int, list[int]]] = {}
        fetched_to = 0

        def fetch(unit: int) -> bool:
            if unit in held:
                return True
            if not free:
                return False
            slot = free.pop(0)
            after = [freed_by[slot]] if slot in freed_by else []
            held[unit] = (slot, [self._fetch(unit, part, slot, after) for part in self.parts(unit)])
            return True

        for k, turn in enumerate(turns):
            fetched_to = max(fetched_to, k)
            while fetched_to < len(turns) and fetched_to <= k + self.plan.prefetch:
                unit = turns[fetched_to].unit
                if self.parts(unit) and not fetch(unit):
                    break
                fetched_to += 1
            used = turn.work(tuple(held[turn.unit][1]) if turn.unit in held else ())
            if turn.unit in held and not any(t.unit == turn.unit for t in turns[k + 1 : k + 1 + slots]):
                slot, fetches = held.pop(turn.unit)
                freed_by[slot] = self._evict(turn.unit, slot, [*used, *fetches])
                free.append(slot)

    def _fetch(self, unit: int, part: StateKind, slot: int, after: Sequence[int]) -> int:
        nbytes = self.part_bytes(self.reads(unit), part)
        pool = Pool.MAPPED if self.mapped(part) else Pool.DEVICE
        takes = ((pool, nbytes),) if pool is Pool.MAPPED else ()
        return self.op(OpKind.FETCH, unit, Lane.FETCH, after, part=part, nbytes=nbytes, slot=slot, takes=takes)

    def _evict(self, unit: int, slot: int, after: Sequence[int]) -> int:
        pages = sum(self.part_bytes(self.reads(unit), p) for p in self.parts(unit) if self.mapped(p))
        frees = ((Pool.MAPPED, pages),) if pages else ()
        return self.op(OpKind.EVICT, unit, Lane.STORE, after, slot=slot, frees=frees)

    # ---- the finished program -------------------------------------------------------------------------------------

    def program(self, step_kind: StepKind) -> Program:
        streamed = frozenset(u for u in range(self.last + 1) if self.parts(u))
        slot_bytes = max(
            (
                sum(self.part_bytes(self.model.units[u], p) for p in self.parts(u) if not self.mapped(p))
                for u in streamed
            ),
            default=0,
        )
        slots = self.plan.prefetch + 1 if slot_bytes else 0
        static = resident(self.plan, self.model, device=self.device, group_size=self.group_size)
        static[Pool.DEVICE] = static.get(Pool.DEVICE, 0) + slots * slot_bytes + self.costs.scratch + self.carried(step_kind)
        return Program(
            title=f"{self.plan.method} on {self.model.name}",
            step_kind=step_kind,
            shape=self.shape,
            unit_names=("prologue", *(f"block {i}" for i in range(len(self.model.blocks))), "epilogue"),
            streamed=streamed,
            written=frozenset(u for u in streamed if self.streams(u, StateKind.TRAINABLE)),
            ops=tuple(self.ops),
            static=tuple(static.items()),
            slots=slots,
            slot_bytes=slot_bytes,
        )


def epilogue_reads(model: ModelSpec) -> UnitSpec:
    """The epilogue with the tied parameters that it shares with the prologue."""
    tied = {canonical for _, canonical in model.tied}
    shared = tuple(p for p in model.prologue.params if p.name in tied)
    return replace(model.epilogue, params=model.epilogue.params + shared)


def resident(plan: Plan, model: ModelSpec, *, device: str = "cpu", group_size: int = 32) -> dict[Pool, int]:
    """Bytes that each pool holds between steps: parameters on their tiers and optimizer states."""
    if plan.sharded:
        from blockwalk.compile_sharded import sharded_resident

        return sharded_resident(plan, model)
    builder = _Builder(plan, model, Shape(1, 1), Costs(), device, group_size)
    pools = {Tier.DEVICE: Pool.DEVICE, Tier.HOST: Pool.HOST, Tier.DISK: Pool.DISK}
    held: dict[Pool, int] = {}

    def hold(pool: Pool, nbytes: int) -> None:
        if nbytes:
            held[pool] = held.get(pool, 0) + nbytes

    for index, unit in enumerate(model.units):
        for part, placement in ((StateKind.FROZEN, plan.frozen), (StateKind.TRAINABLE, plan.trainable)):
            nbytes = builder.part_bytes(unit, part)
            if builder.streams(index, part):
                hold(pools[placement.tier], nbytes // (plan.mesh.slice if part is StateKind.TRAINABLE else 1))
            elif placement.tier is Tier.DISK and builder.mapped(part):
                hold(Pool.MAPPED, nbytes)
            else:
                hold(Pool.DEVICE, nbytes)
                if placement.tier is Tier.DISK:
                    hold(Pool.DISK, nbytes)
    if plan.estimator is Estimator.ZEROTH_ORDER:
        return held  # buckets hold what the rule keeps
    trained = model.numel(trainable=True)
    moments = RULE_STATES[plan.optimizer.name] * 4 * trained
    hold(
        Pool.MAPPED if plan.optimizer_state.tier is Tier.DISK and device == "cpu" else pools[plan.optimizer_state.tier],
        moments,
    )
    return held


# ---------------------------------------------------------------------------------------------------------------------
# Backpropagation
# ---------------------------------------------------------------------------------------------------------------------


def _backprop(b: _Builder, *, update: bool) -> None:
    """Forward without graph, storing each block's input; then backwards, one block's graph at a time."""
    plan, last = b.plan, b.last
    blocks = range(1, last)
    micro_batches = range(plan.gradient_accumulation_steps)
    groups = [[m] for m in micro_batches] if plan.accumulation_order == "micro_batch" else [list(micro_batches)]
    keep = _kept_graphs(b)
    at_turn = update and plan.update.timing is Timing.BLOCK
    hidden_bytes = b.hidden_bytes
    activation_pool = _activation_pool(plan, b.device)
    saves: dict[tuple[int, int], int] = {}
    hidden_from: dict[int, int] = {}
    gradients: dict[int, list[int]] = {}

    def prologue(group: list[int]) -> Callable[[tuple[int, ...]], list[int]]:
        def work(after: tuple[int, ...]) -> list[int]:
            cost = b.costs.of(b.model.prologue.kind)
            for m in group:
                hidden_from[m] = b.op(
                    OpKind.PROLOGUE, 0, Lane.COMPUTE, after, micro_batch=m, transient=cost.forward_transient
                )
            return [hidden_from[m] for m in group]

        return work

    def forward(i: int, group: list[int]) -> Callable[[tuple[int, ...]], list[int]]:
        def work(after: tuple[int, ...]) -> list[int]:
            cost = b.costs.of(b.model.units[i].kind)
            used = []
            for m in group:
                kept = i in keep
                if not kept:
                    saves[i, m] = b.op(
                        OpKind.SAVE,
                        i,
                        Lane.STORE,
                        [hidden_from[m]],
                        part=StateKind.ACTIVATION,
                        micro_batch=m,
                        nbytes=hidden_bytes if activation_pool is not Pool.DEVICE else 0,
                        takes=((activation_pool, hidden_bytes),),
                    )
                hidden_from[m] = b.op(
                    OpKind.FORWARD,
                    i,
                    Lane.COMPUTE,
                    after,
                    micro_batch=m,
                    keep_graph=kept,
                    flops=cost.forward_flops,
                    transient=max(cost.forward_transient - cost.saved, 0) if kept else cost.forward_transient,
                    takes=((Pool.DEVICE, cost.saved),) if kept and cost.saved else (),
                )
                used.append(hidden_from[m])
            return used

        return work

    def loss(group: list[int]) -> Callable[[tuple[int, ...]], list[int]]:
        def work(after: tuple[int, ...]) -> list[int]:
            cost = b.costs.of(b.model.epilogue.kind)
            used = [
                b.op(
                    OpKind.LOSS,
                    last,
                    Lane.COMPUTE,
                    after,
                    micro_batch=m,
                    last=m == micro_batches[-1],
                    flops=cost.forward_flops + cost.backward_flops,
                    **b.differentiates(last, m, cost.backward_transient),
                )
                for m in group
            ]
            gradients.setdefault(last, []).extend(used)
            # A tied head's gradient is complete only after the prologue's turn; an untied one is updated here.
            return used + _finish(b, last, gradients, at_turn, used[-1], group, micro_batches)

        return work

    def backward(i: int, group: list[int]) -> Callable[[tuple[int, ...]], list[int]]:
        def work(after: tuple[int, ...]) -> list[int]:
            cost = b.costs.of(b.model.units[i].kind)
            used = []
            for m in group:
                kept = i in keep
                deps = list(after)
                if not kept:
                    deps.append(
                        b.op(
                            OpKind.LOAD,
                            i,
                            Lane.FETCH,
                            [saves[i, m]],
                            part=StateKind.ACTIVATION,
                            micro_batch=m,
                            nbytes=hidden_bytes if activation_pool is not Pool.DEVICE else 0,
                        )
                    )
                freed = ((Pool.DEVICE, cost.saved),) if kept and cost.saved else ()
                used.append(
                    b.op(
                        OpKind.BACKWARD,
                        i,
                        Lane.COMPUTE,
                        deps,
                        micro_batch=m,
                        keep_graph=kept,
                        last=m == micro_batches[-1],
                        flops=cost.backward_flops + (0 if kept else cost.forward_flops),
                        **b.differentiates(i, m, cost.backward_transient - (cost.saved if kept else 0)),
                        frees=freed if kept else ((activation_pool, hidden_bytes),),
                    )
                )
            gradients.setdefault(i, []).extend(used)
            return used + _finish(b, i, gradients, at_turn, used[-1], group, micro_batches)

        return work

    def prologue_backward(group: list[int]) -> Callable[[tuple[int, ...]], list[int]]:
        def work(after: tuple[int, ...]) -> list[int]:
            cost = b.costs.of(b.model.prologue.kind)
            used = [
                b.op(
                    OpKind.PROLOGUE_BACKWARD,
                    0,
                    Lane.COMPUTE,
                    after,
                    micro_batch=m,
                    last=m == micro_batches[-1],
                    **b.differentiates(0, m, cost.backward_transient),
                )
                for m in group
            ]
            gradients.setdefault(0, []).extend(used)
            return used + _finish(b, 0, gradients, at_turn, used[-1], group, micro_batches)

        return work

    turns: list[_Turn] = []
    for group in groups:
        turns.append(_Turn(0, prologue(group)))
        turns += [_Turn(i, forward(i, group)) for i in blocks]
        turns.append(_Turn(last, loss(group)))
        turns += [_Turn(i, backward(i, group)) for i in reversed(blocks)]
        if b.model.prologue.numel(trainable=True):
            turns.append(_Turn(0, prologue_backward(group)))
    b.walk(turns)
    b.exchange()
    if not update and not plan.sharded:  # the caller takes the gradients over
        made = 4 * b.model.numel(trainable=True)
        b.ops[-1] = replace(b.ops[-1], frees=(*b.ops[-1].frees, (b.gradient_pool, made)))
    if update and plan.update.timing is Timing.STEP:
        norm = plan.optimizer.max_grad_norm > 0
        done = b.completed(ops[-1] for ops in gradients.values())
        after = [b.op(OpKind.REDUCE, last, Lane.COMPUTE, done, part=StateKind.GRADIENT)] if norm else done
        b.walk(
            [
                _Turn(u, _update_at_end(b, u, after), updates=True)
                for u in range(last + 1)
                if b.model.units[u].numel(trainable=True)
            ]
        )


def _update_at_end(b: _Builder, unit: int, gradients: Sequence[int]) -> Callable[[tuple[int, ...]], list[int]]:
    def work(after: tuple[int, ...]) -> list[int]:
        done = b.op(OpKind.UPDATE, unit, Lane.COMPUTE, [*after, *gradients], **b.updates(unit))
        return [done, *_store(b, unit, [done])]

    return work


def _finish(
    b: _Builder,
    unit: int,
    gradients: Mapping[int, list[int]],
    at_turn: bool,
    done: int,
    group: list[int],
    all_: Sequence[int],
) -> list[int]:
    """Reductions over ranks, and the update at the block's turn once the gradients of all micro-batches are there."""
    complete = group[-1] == all_[-1]
    reduced = b.reduced(unit, done, complete)
    if not at_turn or not complete or not b.model.units[unit].numel(trainable=True):
        return reduced
    update = b.op(OpKind.UPDATE, unit, Lane.COMPUTE, [done, *reduced[-1:]], **b.updates(unit))
    return [*reduced, update, *_store(b, unit, [update])]


def _store(b: _Builder, unit: int, after: Sequence[int]) -> list[int]:
    """Write a streamed unit's trainables back."""
    if not b.streams(unit, StateKind.TRAINABLE):
        return []
    nbytes = b.part_bytes(b.model.units[unit], StateKind.TRAINABLE)
    return [b.op(OpKind.STORE, unit, Lane.STORE, after, part=StateKind.TRAINABLE, nbytes=nbytes)]


def _kept_graphs(b: _Builder) -> frozenset[int]:
    """The blocks whose activations stay on the device between forward and backward.

    ``none`` recomputes nothing, ``all`` everything; ``auto`` keeps as many of the last blocks as the budget holds. A
    graph refers to its weights, so only resident or mapped ones can be kept, and of those in slots just the last block.
    """
    plan, blocks = b.plan, range(1, b.last)
    if plan.recompute == "all" or (plan.recompute == "auto" and plan.budget is None):
        return frozenset()
    groups = plan.gradient_accumulation_steps if plan.accumulation_order == "block" else 1
    room = None
    if plan.recompute == "auto":
        assert plan.budget is not None
        held = resident(plan, b.model, device=b.device, group_size=b.group_size).get(Pool.DEVICE, 0)
        worst = max((cost.backward_transient for _, cost in b.costs.units), default=0)
        room = plan.budget - held - worst
    kept: set[int] = set()
    for i in reversed(blocks):
        in_slot = any(not b.mapped(part) for part in b.parts(i))
        if in_slot and kept and not b.graphs_outlive_slots:
            break
        if room is not None:
            room -= groups * b.costs.of(b.model.units[i].kind).saved
            if room < 0:
                break
        kept.add(i)
    return frozenset(kept)


def _compute_dtype(plan: Plan, model: ModelSpec) -> str:
    return model.dtype if plan.compute_dtype == "auto" else plan.compute_dtype


def _activation_pool(plan: Plan, device: str) -> Pool:
    match plan.activation.tier:
        case Tier.DISK:
            return Pool.MAPPED if device == "cpu" else Pool.DISK
        case Tier.HOST:
            return Pool.HOST
        case Tier.DEVICE:
            return Pool.DEVICE


def _evaluate(b: _Builder) -> None:
    """Forward passes without graph, the loss, nothing else."""

    def work(kind: OpKind, unit: int) -> Callable[[tuple[int, ...]], list[int]]:
        cost = b.costs.of(b.model.units[unit].kind)
        return lambda after: [
            b.op(kind, unit, Lane.COMPUTE, after, flops=cost.forward_flops, transient=cost.forward_transient)
        ]

    turns = [_Turn(0, work(OpKind.PROLOGUE, 0))]
    turns += [_Turn(i, work(OpKind.FORWARD, i)) for i in range(1, b.last)]
    b.walk([*turns, _Turn(b.last, work(OpKind.LOSS, b.last))])
    b.exchange()


# ---------------------------------------------------------------------------------------------------------------------
# Zeroth order
# ---------------------------------------------------------------------------------------------------------------------


BUCKET_ALIGN = 64
"""Bytes that each tensor's place in a bucket is a multiple of."""


def bucket_states(plan: Plan) -> dict[str, tuple[Codec, float]]:
    """What a zeroth-order rule keeps beside each trainable: its codec, and the value that it begins with."""
    hessian = {"hessian": (plan.zo.hessian_codec, 1.0)} if plan.zo.kind == "hizoo" else {}
    names = {"adamw": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}.get(plan.optimizer.name, ())
    return {**hessian, **dict.fromkeys(names, (Codec.FP32, 0.0))}


def bucket_bytes(plan: Plan, unit: UnitSpec, group_size: int = 32) -> int:
    """Bytes of a unit's bucket: its trainables in their codec and the states beside them, aligned, and cut into slices."""
    codec = plan.trainable.codec
    total = 0
    for p in unit.params:
        if p.trainable:
            written_as = codec if p.quantizable or codec in CODEC_DTYPE else Codec.RAW
            sizes = [encoded_nbytes(p.shape, p.dtype, written_as, group_size)]
            sizes += [encoded_nbytes(p.shape, "float32", kept, group_size) for kept, _ in bucket_states(plan).values()]
            total += sum(-(-size // BUCKET_ALIGN) * BUCKET_ALIGN for size in sizes)
    return -(-total // (BUCKET_ALIGN * plan.mesh.slice)) * BUCKET_ALIGN * plan.mesh.slice


def streamed_trainables(plan: Plan, model: ModelSpec, device: str) -> frozenset[int]:
    """The units whose trainables are fetched when their turn comes."""
    builder = _Builder(plan, model, Shape(1, 1), Costs(), device, 32)
    return frozenset(unit for unit in range(len(model.units)) if builder.streams(unit, StateKind.TRAINABLE))


def passes_of_rank(plan: Plan) -> int:
    """The most forwards of one zeroth-order step that a rank runs; where they do not divide, some run one less."""
    return -(-plan.forward_passes // plan.mesh.perturb)


def _zeroth_order(b: _Builder, pending: Pending) -> None:
    """Every forward of the step while the unit is on the device; the last step's update first, where it is deferred."""
    plan, last = b.plan, b.last
    passes = range(passes_of_rank(plan))
    deferred = plan.update.timing is Timing.DEFERRED

    def work(kind: OpKind, unit: int) -> Callable[[tuple[int, ...]], list[int]]:
        def emit(after: tuple[int, ...]) -> list[int]:
            cost = b.costs.of(b.model.units[unit].kind)
            used: list[int] = []
            if deferred:
                used += _apply_pending(b, unit, after, pending)
            deps = [*after, *used[:1]]
            for m in range(plan.gradient_accumulation_steps):
                used += [
                    b.op(
                        kind,
                        unit,
                        Lane.COMPUTE,
                        deps,
                        micro_batch=m,
                        forward_pass=p,
                        flops=cost.forward_flops,
                        transient=cost.forward_transient,
                    )
                    for p in passes
                ]
            return used

        return emit

    def turns() -> list[_Turn]:
        inner = [_Turn(i, work(OpKind.FORWARD, i)) for i in range(1, last)]
        return [_Turn(0, work(OpKind.PROLOGUE, 0)), *inner, _Turn(last, work(OpKind.LOSS, last))]

    if plan.zo.noise == "mezo":
        for p in range(2):
            after = [len(b.ops) - 1] if b.ops else []
            b.op(OpKind.PERTURB, 0, Lane.COMPUTE, after, forward_pass=p, transient=b.draw_bytes)
            passes = range(p, p + 1)
            b.walk(turns())
        b.op(OpKind.PERTURB, 0, Lane.COMPUTE, [len(b.ops) - 1], forward_pass=2, transient=b.draw_bytes)
    else:
        b.walk(turns())
    done = b.op(OpKind.EXCHANGE, last, Lane.COMPUTE, [len(b.ops) - 1])
    if not deferred:
        b.walk(
            [_Turn(u, _update_at_end(b, u, [done])) for u in range(last + 1) if b.model.units[u].numel(trainable=True)]
        )


def _apply_pending(b: _Builder, unit: int, after: Sequence[int], pending: Pending) -> list[int]:
    """Apply what is pending to the fetched copy, and write it back where this step flushes.

    A resident unit was brought up to date in every step, so it finds one entry; a streamed one finds all that its
    tier has not seen.
    """
    if b.arrives_updated(unit):
        return []
    streamed = b.streams(unit, StateKind.TRAINABLE)
    entries = pending.entries if streamed else min(pending.entries, 1)
    if not entries or not b.model.units[unit].numel(trainable=True):
        return []
    done = b.op(OpKind.UPDATE, unit, Lane.COMPUTE, after, part=StateKind.TRAINABLE, entries=entries)
    return [done, *(_store(b, unit, [done]) if pending.flush else [])]


def _flush(b: _Builder, pending: Pending) -> None:
    """Apply and write back what is pending, without a forward: before saving, evaluating or generating."""

    def work(unit: int) -> Callable[[tuple[int, ...]], list[int]]:
        return lambda after: _apply_pending(b, unit, after, Pending(pending.entries, flush=True))

    b.walk([_Turn(u, work(u)) for u in range(b.last + 1) if b.model.units[u].numel(trainable=True)])

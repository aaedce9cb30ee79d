"""Backpropagation by blocks: forward without graph, storing each block's input; then backwards, one
graph at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from blockwalk.plan.choices import Timing
from blockwalk.plan.mesh import ENDS
from blockwalk.plan.placement import DTYPE_BYTES, StateKind
from blockwalk.program.handover import Handover
from blockwalk.program.lower import Builder, Turn
from blockwalk.program.program import Bytes, Lane, OpKind, Pool
from blockwalk.program.reductions import Reductions
from blockwalk.program.stages import Visit, keeps_chunks, shares_sums, stays, unsummed
from blockwalk.program.state_sizes import (
    activation_pool,
    compute_dtype,
    stages_inputs,
)


def backprop(b: Builder, *, update: bool, graphs: int) -> None:
    """Forward without graph, storing each block's input; then backwards, one block's graph at a
    time, as far down as something is trained. At most the last ``graphs`` blocks keep theirs. At
    the end the gradients are judged, and used where they were not at the blocks' turns."""
    plan = b.places.plan
    epilogue = b.places.last
    lowest = b.stage.lowest
    groups = plan.walks
    order = [
        visit
        for visit in b.stage.visits(len(groups))
        if not visit.backwards or b.stage.chunks[visit.chunk][-1] >= lowest
    ]
    walk = _Backprop(
        b,
        at_turn=update and plan.update.at_turn,
        final=plan.gradient_accumulation_steps - 1,
        keep=_kept_graphs(b, graphs, lowest),
        lowest=lowest,
        handover=Handover(b, order, groups),
        unsummed=_unsummed(b, order),
    )
    units = [
        [unit for unit in reversed(b.stage.chunks[visit.chunk]) if unit >= lowest]
        if visit.backwards
        else [unit for unit in b.stage.chunks[visit.chunk] if unit != epilogue]
        for visit in order
    ]
    turns: list[Turn] = []
    for place, visit in enumerate(order):
        work = walk.differentiate if visit.backwards else walk.forward
        for unit in units[place]:
            turn = Turn(unit, partial(work, unit, groups[visit.group]))
            if keeps_chunks(plan) and stays(order, units, place, unit):
                turn.stays = frozenset(b.places.needs(unit))
            turns.append(turn)
    b.walk(turns)
    judged = walk.judge(update=update)
    if walk.at_turn:  # in the order of the next step's forward; sums have gone before them
        for unit in sorted(b.residency.dirty):
            b.refresh(unit, judged[0])
    if not update or plan.update.timing is not Timing.STEP:
        return
    if plan.optimizer.max_grad_norm > 0:
        part = StateKind.GRADIENT
        norm = b.op(OpKind.NORM, epilogue, Lane.COMPUTE, judged, part=part, axes=b.everyone)
        judged = [norm]
    b.update_all(judged)


def _unsummed(b: Builder, order: Sequence[Visit]) -> frozenset[tuple[int, int]]:
    """Return the units and micro-batches after whose backward gradients stay in their buffer."""
    plan = b.places.plan
    if not shares_sums(plan):
        return frozenset()
    return frozenset(
        (unit, plan.walks[visit.group][-1])
        for visit in unsummed(order)
        for unit in b.stage.chunks[visit.chunk]
    )


@dataclass(slots=True)
class _Backprop:
    """The work of the turns, and what one turn leaves for another."""

    b: Builder
    at_turn: bool
    """True where a unit is updated at its turn, once its gradients are complete."""
    final: int
    """The last micro-batch."""
    keep: frozenset[int]
    """The blocks whose graphs stay between forward and backward."""
    lowest: int
    """The first unit with something to train: below it nothing is differentiated."""
    handover: Handover
    """The ops that go over the borders of a stage."""
    unsummed: frozenset[tuple[int, int]]
    """The units and micro-batches after whose backward gradients stay in their buffer: the next one
    adds to them."""
    reductions: Reductions = field(init=False)
    saves: dict[tuple[int, int], int] = field(default_factory=dict)
    """The op that saved each block's input, or its graph in file maps, by block and micro-batch."""
    hidden: dict[int, int] = field(default_factory=dict)
    """The op that made each micro-batch's hidden state."""
    queue: list[tuple[int, int]] = field(default_factory=list)
    """Blocks and micro-batches whose inputs or graphs are still to be brought back, in the order of
    their backwards."""
    saved_inputs: list[int] = field(default_factory=list)
    """The ops that saved inputs, in order."""
    loaded: dict[tuple[int, int], int] = field(default_factory=dict)
    """The op that brought one back, of those that no backward has used."""
    backwards: list[int] = field(default_factory=list)
    """The backwards that used one."""
    complete: dict[int, int] = field(default_factory=dict)
    """The op after which each unit's gradients are complete."""
    graphs_in_maps: bool = field(init=False)
    """Whether what graphs save is written to file maps, instead of staying on the device."""
    leaving: list[tuple[int, int]] = field(default_factory=list)
    """Units whose complete gradients are to leave the device for host memory, each with the op
    after which they may."""

    def __post_init__(self) -> None:
        self.reductions = Reductions(self.b)
        self.graphs_in_maps = self.b.places.graph_pool is Pool.MAPPED

    def forward(self, unit: int, group: Sequence[int], after: Sequence[int]) -> list[int]:
        """Emit the forwards of a unit for a group of micro-batches, and return them."""
        b = self.b
        cost = b.cost(unit)
        graph = self._graph(unit)
        graph_bytes = sum(nbytes for _, nbytes in graph)
        on_device = any(pool is Pool.DEVICE for pool, _ in graph)
        transient = cost.forward_transient
        forwards = []
        if unit in self.handover.firsts:
            self.handover.begin(backwards=False)
        for m in group:
            if unit >= max(self.lowest, 1) and unit not in self.keep:
                self._save_input(unit, m)
            self.hidden[m] = b.op(
                OpKind.FORWARD if unit else OpKind.PROLOGUE,
                unit,
                Lane.COMPUTE,
                [*after, *self._leaves_buffer(), *self.handover.waits(unit, m)],
                micro_batch=m,
                keep_graph=unit in self.keep,
                flops=cost.forward_flops if unit else 0,
                takes=graph,
                transient=max(transient - graph_bytes, 0) if on_device else transient,
                **b.exchanges(unit, cost.forward_sent),
            )
            forwards.append(self.hidden[m])
            self.handover.passed(unit, m, self.hidden[m])
            if unit in self.keep and self.graphs_in_maps:
                self.saves[unit, m] = self._moves_graph(
                    OpKind.SAVE, Lane.STORE, unit, m, self.hidden[m]
                )
        return forwards

    def _save_input(self, unit: int, micro_batch: int) -> None:
        """Write a block's input to its tier, no earlier than the walk comes to the block."""
        received = self.handover.came(unit, micro_batch)
        made = [*received, *self.handover.latest] if received else [self.hidden[micro_batch]]
        saved = self._moves_input(
            OpKind.SAVE, Lane.STORE, unit, micro_batch, *made, takes=self._input()
        )
        self.saves[unit, micro_batch] = saved
        self.saved_inputs.append(saved)

    def differentiate(self, unit: int, group: Sequence[int], after: Sequence[int]) -> list[int]:
        """Emit the loss at the epilogue's turn, or the backwards of a unit; then what completes the
        unit's gradients and uses them. Return those that use its slot."""
        places = self.b.places
        deps = list(after)
        if unit in self.handover.lasts:
            self.handover.begin(backwards=True)
            chunk = self.b.stage.chunk_of(unit)
            blocks = [
                block for block in reversed(chunk) if max(self.lowest, 1) <= block < places.last
            ]
            self.queue = [(block, m) for block in blocks if self._comes_back(block) for m in group]
        deps += self._fetch_gradients(unit, group)
        deps += self._leave(places.plan.prefetch)
        backwards = [self._backward(unit, m, deps) for m in group]
        complete = group[-1] == self.final
        # the op after which they are where they wait
        gradients = self._store_gradients(unit, backwards[-1], complete=complete)
        if (unit, group[-1]) in self.unsummed:
            return backwards
        return backwards + self._finish(unit, gradients, complete=complete)

    def _backward(self, unit: int, micro_batch: int, after: Sequence[int]) -> int:
        """Emit the loss, or a backward, of one micro-batch."""
        b = self.b
        places = b.places
        cost = b.cost(unit)
        kept = unit in self.keep
        block = 0 < unit < places.last
        forward_flops = cost.forward_flops  # of the loss; a block was computed before
        if block:
            forward_flops = 0 if kept else cost.again.flops
        sent = cost.backward_sent + (0 if kept else cost.forward_sent)
        beside_graph = block and (kept or self.graphs_in_maps)
        transient = cost.backward_transient
        if beside_graph:
            transient = cost.graph(kept=kept).transient
        deps = self.reductions.open(unit, after)
        deps += self.handover.waits(unit, micro_batch, backwards=True)
        details = self._claims(unit, micro_batch, transient)
        comes_back = block and self._comes_back(unit)
        if comes_back:
            deps.append(self._load(unit, micro_batch))
        if block:
            details |= {"keep_graph": kept, "frees": self._graph(unit) if kept else self._input()}
        backward = b.op(
            OpKind.BACKWARD if block else OpKind.LOSS if unit else OpKind.PROLOGUE_BACKWARD,
            unit,
            Lane.COMPUTE,
            deps,
            slot=self.reductions.buffer(unit),
            micro_batch=micro_batch,
            last=micro_batch == self.final,
            flops=forward_flops + cost.backward_flops if unit else 0,
            **details,
            **b.exchanges(unit, sent),
        )
        self.handover.passed(unit, micro_batch, backward, backwards=True)
        if comes_back:
            self.backwards.append(backward)
        if block and not kept and self.graphs_in_maps:  # the graph was made again, in file maps
            self._moves_graph(OpKind.SAVE, Lane.STORE, unit, micro_batch, backward)
        return backward

    def _fetch_gradients(self, unit: int, group: Sequence[int]) -> list[int]:
        """Bring the gradients that were added to before, by an earlier micro-batch or, of a tied
        weight, by the head."""
        places = self.b.places
        part = StateKind.GRADIENT
        nbytes = places.sizes.gradient_bytes(unit)
        if not group[0]:
            nbytes -= places.made_gradients(unit)
        nbytes = places.residence(unit, part).brought(nbytes)
        if not nbytes:
            return []
        return [self.b.op(OpKind.FETCH, unit, Lane.FETCH, part=part, nbytes=nbytes)]

    def _store_gradients(self, unit: int, done: int, *, complete: bool) -> int:
        """Hand the gradients of a turn to the disk, where they wait there, and return the op after
        which they are there."""
        places = self.b.places
        part = StateKind.GRADIENT
        nbytes = places.residence(unit, part).brought(places.sizes.gradient_bytes(unit))
        details = {"part": part, "nbytes": nbytes, "last": complete}
        return self.b.op(OpKind.STORE, unit, Lane.STORE, [done], **details) if nbytes else done

    def _claims(self, unit: int, micro_batch: int, transient: int) -> dict[str, object]:
        """Return memory claimed by a backward op: the first micro-batch allocates the float32
        accumulators. In a float32 model they are the gradient tensors themselves. LOSS finds its
        accumulators already allocated."""
        places = self.b.places
        accumulators = places.made_gradients(unit) if micro_batch == 0 else 0
        size = DTYPE_BYTES[compute_dtype(places.plan, places.model)]
        gradients = accumulators * size // 4 if size < 4 else 0
        pool = places.gradient_pool
        if unit != places.last and pool is Pool.DEVICE:
            transient = max(transient - accumulators, gradients if transient else 0)
        return {"transient": transient, "takes": ((pool, accumulators),) if accumulators else ()}

    def _finish(self, unit: int, done: int, *, complete: bool) -> list[int]:
        """Sum the gradients over ranks, and update the unit at its turn once those of all
        micro-batches are there. Return the ops of it that use the unit's slot."""
        b = self.b
        reduced = self.reductions.reduce(unit, done, complete=complete)
        if b.stage.shares_ends and unit == b.places.last:  # no prologue follows on this stage
            head = self.reductions.reduce(0, done, complete=complete)
            if complete and head:
                self.complete[0] = head[-1]
        if not complete:
            return []
        if reduced or not b.places.pools.gradients:
            self.complete[unit] = [done, *reduced][-1]
        if not (self.at_turn and b.places.model.units[unit].numel(trainable=True)):
            return []
        if b.places.landing(unit):
            self.leaving.append((unit, done))
            return []
        updated = b.update(unit, [done, *reduced[-1:]])
        return [] if b.places.pools.gradients else updated  # slices of masters are in no slot

    def _leave(self, limit: int) -> list[int]:
        """Let gradients leave the device until those of at most ``limit`` units are on it, and
        update their units. Return the ops that bring them to host memory, which the next compute op
        waits for: no update is among them."""
        landings = list[int]()
        while len(self.leaving) > limit:
            unit, gradients = self.leaving.pop(0)
            landings.append(self.b.land(unit, [gradients]))
            self.b.update_on_host(unit, landings[-1])
        return landings

    def judge(self, *, update: bool) -> list[int]:
        """Add up the losses of all ranks; decide whether a step that updates counts: its loss and
        gradients must be finite. Without an update one rank has nothing to decide, and its caller
        takes the gradients over."""
        self._leave(0)
        b = self.b
        self._sum_ends()
        ops = b.draft.ops
        deps = list(self.complete.values())
        if b.places.pools.gradients:
            deps.append(max(op.index for op in ops if op.lane is Lane.COMPUTE))
            deps += [op.index for op in ops if op.kind is OpKind.UPDATE]
        elif not update:
            ops[-1] = replace(ops[-1], frees=(*ops[-1].frees, *b.places.accumulated()))
            return []
        elif self.at_turn:  # a step that counts lets go of what these hand to the disk
            parts = (StateKind.TRAINABLE, StateKind.OPTIMIZER)
            deps += [op.index for op in ops if op.kind is OpKind.STORE and op.part in parts]
            deps += [op.index for op in ops if op.lane is Lane.UPDATE]
        kind = OpKind.CHECK if update else OpKind.TOTAL
        part = StateKind.GRADIENT if update else None
        return [b.op(kind, b.places.last, Lane.COMPUTE, deps, part=part, axes=b.everyone)]

    def _sum_ends(self) -> None:
        """Add up the gradients of a tied weight, of which both end stages hold a copy."""
        b = self.b
        if b.stage.shares_ends and 0 in self.complete:
            numel = b.places.sizes.layout(0, StateKind.TRAINABLE).numel
            self.complete[0] = b.op(
                OpKind.REDUCE,
                0,
                Lane.SEND_BACK,
                [self.complete[0]],
                part=StateKind.GRADIENT,
                axes=(ENDS,),
                nbytes=4 * numel // b.places.plan.optimizer_ranks,
            )

    def _load(self, unit: int, micro_batch: int) -> int:
        """Bring back a block's input or its graph, and with it those of the next backwards, as far
        as places are free: ``prefetch`` + 1, each of which the backward that used it frees. Inputs
        come into the buffers that they left by, after the last of them has left."""
        places = self.b.places.at_once
        while self.queue and len(self.loaded) < places:
            key = self.queue.pop(0)
            freed_by = len(self.backwards) + len(self.loaded) - places
            saved = self.saved_inputs[-1] if self._stages else self.saves[key]
            deps = [saved, *([self.backwards[freed_by]] if freed_by >= 0 else [])]
            moves = self._moves_graph if key[0] in self.keep else self._moves_input
            self.loaded[key] = moves(OpKind.LOAD, Lane.FETCH, *key, *deps)
        return self.loaded.pop((unit, micro_batch))

    def _comes_back(self, unit: int) -> bool:
        """Return True where a block's backward needs something that was saved: its input, or its
        graph in file maps."""
        return unit not in self.keep or self.graphs_in_maps

    def _moves_graph(
        self, kind: OpKind, lane: Lane, unit: int, micro_batch: int, *after: int
    ) -> int:
        """Hand the file maps that a block's graph was written to over to the disk, or bring their
        pages back."""
        graph = self.b.cost(unit).graph(kept=unit in self.keep)
        return self.b.op(kind, unit, lane, after, micro_batch=micro_batch, nbytes=graph.nbytes)

    def _moves_input(
        self, kind: OpKind, lane: Lane, unit: int, micro_batch: int, *after: int, takes: Bytes = ()
    ) -> int:
        """Write a block's input to its tier, or bring it back."""
        nbytes = sum(nbytes for pool, nbytes in self._input() if pool is not Pool.DEVICE)
        details = {"part": StateKind.ACTIVATION, "micro_batch": micro_batch, "takes": takes}
        return self.b.op(kind, unit, lane, after, nbytes=nbytes, **details)

    def _input(self) -> Bytes:
        """Return the memory of a block's saved input."""
        return ((activation_pool(self.b.places.plan, self.b.places.device), self.b.hidden_bytes),)

    @property
    def _stages(self) -> bool:
        return stages_inputs(self.b.places.plan, self.b.places.device)

    def _leaves_buffer(self) -> list[int]:
        """Return the save that the device buffer of the next input must have been left by:
        ``prefetch`` + 1 before it."""
        buffers = self.b.places.at_once
        full = self._stages and len(self.saved_inputs) >= buffers
        return self.saved_inputs[-buffers:][:1] if full else []

    def _graph(self, unit: int) -> Bytes:
        """Return the memory of a block's kept graph."""
        nbytes = self.b.cost(unit).graph(kept=True).nbytes
        return ((self.b.places.graph_pool, nbytes),) if unit in self.keep and nbytes else ()


def _kept_graphs(b: Builder, graphs: int, lowest: int) -> frozenset[int]:
    """Return the blocks whose activations stay between forward and backward, on the device or in
    file maps: at most the last ``graphs``.

    ``none`` recomputes nothing, ``all`` everything; ``auto`` keeps those of as many of the last
    blocks as the budget holds (``graphs``), or the page cache. A graph refers to its weights, so
    only resident or mapped ones can be kept, and of those in slots just the last block."""
    plan = b.places.plan
    places = b.places
    blocks = [u for u in sorted(b.stage.units) if max(lowest, 1) <= u < places.last]
    in_maps = places.graph_pool is Pool.MAPPED
    unbounded = plan.budget is None and not in_maps
    if plan.recompute == "all" or (plan.recompute == "auto" and unbounded):
        return frozenset()
    room = b.page_cache if plan.recompute == "auto" and in_maps else None
    kept: set[int] = set()
    for block in reversed(blocks[max(len(blocks) - graphs, 0) :]):
        if kept and not places.outlives_slot(block):
            break
        if room is not None:
            room -= plan.visit * _graph_bytes(b, block)
            if room < 0:
                break
        kept.add(block)
    return frozenset(kept)


def _graph_bytes(b: Builder, unit: int) -> int:
    """Return about the bytes that a block's graph keeps, where nothing was measured: inputs and
    outputs of its matrices, and half as much again for norms and attention. Too many for most
    models: 17.6 MB for 14.3 MB of Qwen2.5-0.5B at 256 tokens."""
    model = b.places.model
    sides = dict.fromkeys((False, True), 0)
    for p in model.units[unit].params:
        if len(p.shape) > 1:
            sides[p.trainable] += p.shape[-1] + p.shape[-2]
    size = DTYPE_BYTES[compute_dtype(b.places.plan, model)]
    return 3 * b.shape.tokens * max(sides.values()) * size // 2

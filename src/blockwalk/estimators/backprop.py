"""Backpropagation block by block: the ops PROLOGUE to PROLOGUE_BACKWARD, SAVE, LOAD, NORM, TOTAL
and CHECK.

Forward: each block runs without graph on its input, which is saved (the activation checkpoint).
Backward: the input is loaded, the block recomputed with its graph and differentiated, and the
gradient of its input handed on. Only one block's graph exists at a time, unless the program keeps
some, in memory or with what they save in file maps; the gradients are those of the whole model's
autograd.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), with a segment of one
block; Song and Tang, "Memory-Efficient Backpropagation ..." (2025), section 3."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from blockwalk.cutting.calls import BlockCall, Prologue, tensors_of
from blockwalk.data.batch import Batch, LearntCounts, loss_tokens
from blockwalk.engine.engine import Engine
from blockwalk.engine.home import NO_JOB, Differentiated, Job, on_bytes
from blockwalk.engine.master_updates import MasterUpdates
from blockwalk.estimators.head import Ending
from blockwalk.estimators.losses import Objective, Share, trained_loss
from blockwalk.estimators.protocol import StepFigures
from blockwalk.estimators.stage_values import Received, receive, send
from blockwalk.estimators.walk_request import Step
from blockwalk.numerics.lazy_linear import unread
from blockwalk.numerics.lazy_parameter import LazyParameter
from blockwalk.numerics.noise.key import derive_seed
from blockwalk.numerics.rule_mask import RuleMask
from blockwalk.numerics.updates import clip_coefficient, exact_parts
from blockwalk.plan.mesh import holders
from blockwalk.plan.placement import StateKind
from blockwalk.program.program import Op, OpKind, Pool, Shape
from blockwalk.program.residence import of_graphs
from blockwalk.ranks.forward_sharing import ForwardSharing
from blockwalk.ranks.ranks import Ranks
from blockwalk.tiers.activations import Activations, SavedTensors
from blockwalk.tiers.reused_maps import FRESH


@dataclass(slots=True)
class _Graph:
    """The graph that one BACKWARD differentiates: the block's outputs with respect to its input and
    its trainables."""

    input_BSD: Tensor
    outputs: list[Tensor | GradientEdge | None]
    """The hidden state [B, S, D] and what the block hands on, or the edges of the graph where they
    were computed. None: no gradient reaches the block through it."""
    trainables: dict[str, Tensor]


@dataclass(slots=True)
class _State:
    """Values that one step carries from op to op, by micro-batch."""

    batches: Sequence[Batch]
    labels: Sequence[Tensor]
    """Labels of each micro-batch, on the CPU."""
    tokens: int
    step: Step
    prologues: dict[int, Prologue] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    gradient: dict[int, Tensor] = field(default_factory=dict)
    """dL/d(hidden state), handed from block to block in the backward walk."""
    outer: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """dL/d(differentiable arguments that the blocks take, and tensors that they hand on), by
    micro-batch and identity of the leaf, summed over blocks."""
    graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    graph_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes that the graph of each block and micro-batch wrote to file maps."""
    loaded: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    received: Received = field(default_factory=dict)
    """Values of other stages that nothing has used yet."""
    prologue_trainables: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    loss_sum: float = 0.0
    losses: list[Tensor] = field(default_factory=list)
    """Summed losses that are not in :attr:`loss_sum` yet, 0-d float64, where they were computed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further means over the step, by name: this rank's part, then that of all."""
    metric_parts: list[Tensor] = field(default_factory=list)
    """Parts of these that are not in :attr:`metrics` yet, float64 [K], where they were
    computed."""
    coefficient: float = 1.0
    grad_norm: float | None = None

    @property
    def loss(self) -> float:
        """Mean over the step's counted tokens."""
        return self.loss_sum / self.tokens

    def add_up(self, squares: Iterable[Tensor] = ()) -> list[float]:
        """Take the losses into :attr:`loss_sum`, and the parts of further means into
        :attr:`metrics`; return the squares (1-D tensors) as numbers. This is the step's one wait
        for the device."""
        count = len(self.losses)
        tensors = [*(loss.view(1) for loss in self.losses), *self.metric_parts, *squares]
        numbers = torch.cat([t.double() for t in tensors]).tolist() if tensors else []
        for loss in numbers[:count]:
            self.loss_sum += loss
        names = list(self.metrics)
        stop = count + len(names) * len(self.metric_parts)
        for place, part in enumerate(numbers[count:stop]):
            self.metrics[names[place % len(names)]] += part
        self.losses.clear()
        self.metric_parts.clear()
        return numbers[stop:]

    def take_sums(self, answers: Sequence[Sequence[float]]) -> None:
        """Take the losses and further means of all ranks, each answer's first numbers."""
        self.loss_sum = sum(answer[0] for answer in answers)
        for place, name in enumerate(self.metrics, 1):
            self.metrics[name] = sum(answer[place] for answer in answers)


class Backprop:
    """The estimator that answers the compute ops of a first-order program.

    Args:
        engine: the cut model.
        home: its masters, optimizer states and gradients.
        ranks: those that share the batch.
        objective: a function of (logits [B, S, V], batch) that takes the place of the model's own
            loss.
    """

    def __init__(
        self, engine: Engine, home: Differentiated, ranks: Ranks, objective: Objective | None = None
    ) -> None:
        self.engine = engine
        self.gradients = home.gradients
        self.updates = MasterUpdates(engine, home)
        self.ranks = ranks
        plan = engine.plan
        self.activations = Activations(plan.activation.tier, engine.memories, plan.prefetch + 1)
        self.saved: dict[tuple[int, int], SavedTensors] = {}
        """Tensors that graphs save in file maps: those of kept graphs by :meth:`_place`, those of
        recomputed ones, which follow each other, under one key."""
        graphs = of_graphs(engine.plan, engine.device.type)
        self._maps_graphs = graphs.pool is Pool.MAPPED
        self._pause: threading.Timer | None = None
        """The clock of the time since the last step."""
        self._alive = plan.visit * engine.stage.alive(len(plan.walks))
        """Micro-batches that are alive at once."""
        self.state: _State | None = None
        self.loss = trained_loss(plan.loss_facts, plan.objective_facts, engine.cut.head, objective)

    # ---- what the walker asks of every estimator -------------------------------------------------

    @property
    def checkpointed(self) -> MasterUpdates:
        """The masters and optimizer states."""
        return self.updates

    @property
    def at_rest(self) -> Engine:
        """The weights between two steps: as the engine binds them."""
        return self.engine

    def reserve(self, shape: Shape) -> None:
        """Size what a step keeps of its micro-batches by the largest of the run."""
        self.activations.reserve(self._input_bytes(shape.tokens))

    def figures(self) -> StepFigures:
        """Return the figures of the step that has just been run, and let go of its tensors."""
        state = self.state
        assert state is not None
        self.state = None
        if self._maps_graphs:
            self._pause = threading.Timer(FRESH, _forget_graphs, [weakref.ref(self)])
            self._pause.daemon = True
            self._pause.start()
        return StepFigures(
            state.loss,
            state.tokens,
            grad_norm=state.grad_norm,
            graph_bytes=state.graph_bytes,
            metrics=state.metrics,
        )

    def undo(self) -> None:
        """Give masters and optimizer states the values back that they had before the step."""
        self.updates.undo()

    def waiting(self) -> int:
        """Return none: every step updates its weights."""
        return 0

    def resume(self, _steps: int) -> None:
        """Do nothing: masters and moments are all of a run's state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over masters and optimizer states."""
        self.updates.load_state_dict(state)

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self, batches: Sequence[Batch], labels: Sequence[Tensor], step: Step) -> None:
        """Start a step on its micro-batches, with labels on the CPU too.

        Raises:
            ValueError: no label of the step counts towards the loss, or a seed is given, and
                nothing draws noise.
        """
        if step.seed is not None:
            raise ValueError(
                f"method {self.engine.plan.method!r} draws no noise: seed belongs to zeroth order"
            )
        tokens = step.tokens
        if tokens is None:
            tokens = sum(loss_tokens({"labels": labels_BS}) for labels_BS in labels)
        step.require_labels(tokens)
        if self._pause is not None:
            self._pause.cancel()
        if not self.engine.module.training:
            self.engine.cut.set_training(True)
        self.gradients.begin()
        self.activations.begin(
            max(self._input_bytes(batch["input_ids"].numel()) for batch in batches)
        )
        metrics = dict.fromkeys(self.engine.plan.objective_facts.metrics, 0.0)
        self.state = _State(batches, labels, tokens, step, metrics=metrics)

    def prepare(self, op: Op) -> Job:
        """Return the work of one op: the method of its name. A compute op runs at once; a SAVE
        reads its input now, for it may run later, on another lane."""
        assert self.state is not None
        self.gradients.expect(op)
        moves = op.kind is OpKind.SAVE or op.kind is OpKind.LOAD
        if moves and op.of_graph:
            return self._move_graph(op)
        if op.kind is OpKind.SAVE:
            staged_BSD, copied = self.activations.stage(self._hidden(op, self.state))
            arguments = (self._place(op), staged_BSD, copied)
            return on_bytes(staged_BSD.nbytes, self.activations.save, *arguments)
        if op.kind is OpKind.LOAD:
            place = self.activations.place()  # of no bytes where the saved input is read as it is
            return on_bytes(place.nbytes, self._load, op, self.state, place)
        if op.kind is OpKind.SEND:  # what was made last, which a later op may replace
            return self._send(op, self.state)
        if op.kind is OpKind.RECV:
            batch = self.state.batches[op.micro_batch]
            return receive(self.engine, op, batch, self.state.received)
        return partial(getattr(self, f"_{op.kind.lower()}"), op, self.state)

    def _input_bytes(self, tokens: int) -> int:
        """Return bytes of the hidden state of so many tokens."""
        return tokens * self.engine.spec.hidden_size * self.engine.compute_dtype.itemsize

    def _move_graph(self, op: Op) -> Job:
        """Return the work of a SAVE or LOAD of what a graph holds in file maps: the kernel writes
        pages out when it needs the room."""
        saved = self.saved.get(self._place(op))
        if op.kind is OpKind.SAVE or saved is None:
            return NO_JOB
        return on_bytes(saved.nbytes, saved.will_need)

    def _seed(self, state: _State, op: Op) -> int | None:
        """Dropout's seed for one unit and micro-batch: the same in forward and recomputation, in
        any order of the walk; None for a model that draws nothing. Ranks have different rows, and
        different masks; rank 0's are those of one process."""
        if not self.engine.cut.draws_random_numbers:
            return None
        place = self.engine.rank % self.engine.plan.mesh.stage_ranks
        rank = (place,) if place else ()
        return derive_seed(
            self.engine.plan.seed, "dropout", state.step.number, op.micro_batch, op.unit, *rank
        )

    def _prologue(self, op: Op, state: _State) -> None:
        m = op.micro_batch
        engine = self.engine
        trainables = engine.bind(0)
        with engine.graph(0), torch.set_grad_enabled(bool(trainables)):
            prologue = engine.cut.prologue(state.batches[m], seed=self._seed(state, op))
        is_long = engine.plan.is_long(prologue.hidden_BSD.shape[1], engine.device.type)
        lets_go = is_long and not prologue.hidden_BSD.requires_grad
        state.prologues[m] = prologue.handed_over if lets_go else prologue
        state.prologue_trainables[m] = trainables
        state.hidden[m] = prologue.hidden_BSD.detach()
        state.outer[m] = {}

    def _arguments(self, op: Op, state: _State) -> None:
        m = op.micro_batch
        state.prologues[m] = self.engine.cut.prologue_of_zeros(state.batches[m])
        state.outer[m] = {}

    def _hidden(self, op: Op, state: _State) -> Tensor:
        """Return the hidden state that a unit is given, taken over where another stage made it."""
        m = op.micro_batch
        key = (StateKind.ACTIVATION, op.unit - 1, m)
        if key in state.received:
            state.hidden[m] = state.received.pop(key)
        return state.hidden[m]

    def _send(self, op: Op, state: _State) -> Job:
        values = state.hidden if op.part is StateKind.ACTIVATION else state.gradient
        if op.part is StateKind.GRADIENT and op.unit + 1 == self.engine.stage.first_block:
            state.prologues.pop(op.micro_batch)  # the last walk over its blocks' arguments
        return send(self.engine, op, values.pop(op.micro_batch), state.batches[op.micro_batch])

    def _forward(self, op: Op, state: _State) -> None:
        m = op.micro_batch
        self._hidden(op, state)
        if op.keep_graph:
            graph, output_BSD = self._run(op, state, state.hidden[m])
            state.graphs[op.unit, m] = graph
            state.hidden[m] = output_BSD.detach()
        else:
            call = state.prologues[m].calls[op.unit - 1]
            self.engine.bind(op.unit)
            with torch.no_grad():
                state.hidden[m] = self.engine.cut.forward(
                    call, state.hidden[m], seed=self._seed(state, op)
                )
            self.engine.unbind(op.unit)

    def _run(self, op: Op, state: _State, input_BSD: Tensor) -> tuple[_Graph, Tensor]:
        """Run one block with its graph; beside it the output."""
        trainables = self.engine.bind(op.unit)
        call = state.prologues[op.micro_batch].calls[op.unit - 1]
        saving: AbstractContextManager[None] = nullcontext()
        if self._maps_graphs:
            saved = self._saved_tensors(op)
            input_BSD, saving = self._save_graph(saved, call, input_BSD, trainables)
        input_BSD = input_BSD.detach().requires_grad_()
        with self.engine.graph(op.unit), saving, torch.enable_grad():
            result = self.engine.cut.run(
                call,
                input_BSD,
                seed=self._seed(state, op),
                reads_answer=op.keep_graph,
                uses_up=True,
            )
        if self._maps_graphs:
            state.graph_bytes[op.unit, op.micro_batch] = saved.nbytes
        outputs: list[Tensor | GradientEdge | None] = []
        for tensor in result.outputs:
            if not tensor.requires_grad:
                outputs.append(None)
            else:
                outputs.append(get_gradient_edge(tensor) if self._maps_graphs else tensor)
        return _Graph(input_BSD, outputs, trainables), result.hidden_BSD

    def _saved_tensors(self, op: Op) -> SavedTensors:
        """Return the file maps of a block's graph, to be written anew."""
        key = self._place(op) if op.keep_graph else (0, 0)
        saved = self.saved.get(key)
        if saved is None:  # making one reads the limits of this process's memory
            saved = self.saved[key] = SavedTensors(self.engine.memories.scratch)
        saved.rewind()
        return saved

    def _save_graph(
        self,
        saved: SavedTensors,
        call: BlockCall,
        input_BSD: Tensor,
        trainables: Mapping[str, Tensor],
    ) -> tuple[Tensor, AbstractContextManager[None]]:
        """Move a block's input and the copies of its trainables to file maps where they are in
        none, and what its graph will save with them."""
        for leaf in trainables.values():
            leaf.data = saved.write(leaf.data)
        kept_elsewhere = [
            *self.engine.cut.tensors(call.unit),
            *tensors_of(call.arguments),
            *call.leaves,
        ]
        return saved.write(input_BSD), saved.saving(
            t for t in kept_elsewhere if not isinstance(t, LazyParameter | RuleMask)
        )

    def _place(self, op: Op) -> tuple[int, int]:
        """Return the key of the buffer that a unit's activations lie in: one for each micro-batch
        that is alive at once, which take turns. A walk of one process ends before the next begins,
        so that its micro-batches use the same ones."""
        return op.unit, op.micro_batch % self._alive

    def _load(self, op: Op, state: _State, place: Tensor) -> None:
        state.loaded[op.unit, op.micro_batch] = self.activations.load(self._place(op), place)

    def _loss(self, op: Op, state: _State) -> None:
        m = op.micro_batch
        engine = self.engine
        trainables = engine.bind(op.unit)

        def vector(name: str | None) -> Tensor | None:
            return trainables[name] if name in trainables else engine.vector(name)

        ending = Ending(
            engine.cut,
            state.prologues[m],
            state.hidden.pop(m).detach(),
            state.batches[m],
            state.labels[m],
            engine.weight,
            vector,
            self._seed(state, op),
        )
        leaves = list(trainables.values())
        accumulator = self.gradients.accumulator
        counts = state.step.counts
        if not counts.tokens:
            counts = LearntCounts(state.tokens)
        numbers = state.step.numbers
        share = Share(counts, numbers[m] if numbers else {})
        loss = self.loss.with_gradient(ending, share, accumulator, leaves)
        state.losses.append(loss.loss_sum)
        if state.metrics:
            state.metric_parts.append(torch.stack([loss.metrics[name] for name in state.metrics]))
        state.gradient[m] = loss.hidden_BSD
        self.gradients.add(trainables, loss.trained)

    def _backward(self, op: Op, state: _State) -> None:
        key = (op.unit, op.micro_batch)
        m = op.micro_batch
        if (StateKind.GRADIENT, *key) in state.received:
            state.gradient[m] = state.received.pop((StateKind.GRADIENT, *key))
        if op.keep_graph:
            graph = state.graphs.pop(key)
        else:
            with unread(self.engine.unread(op.unit)):
                graph, _ = self._run(op, state, state.loaded.pop(key))
        call = state.prologues[m].calls[op.unit - 1]
        outer = call.leaves
        inputs = [graph.input_BSD, *graph.trainables.values(), *outer]
        seeds = [
            state.gradient[m],
            *(state.outer[m].get(id(leaf)) for leaf in call.handed.leaves_of(op.unit)),
        ]
        reached: list[Any] = [
            (output, seed)
            for output, seed in zip(graph.outputs, seeds, strict=True)
            if output is not None and seed is not None
        ]
        outputs, grad_outputs = zip(*reached, strict=True)
        grads = torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True)
        assert grads[0] is not None
        state.gradient[m] = grads[0]
        count = 1 + len(graph.trainables)
        self.gradients.add(graph.trainables, grads[1:count])
        for leaf, grad in zip(outer, grads[count:], strict=True):
            if grad is not None:
                total = state.outer[m].get(id(leaf))
                state.outer[m][id(leaf)] = grad if total is None else total + grad
        self.engine.unbind(op.unit)

    def _prologue_backward(self, op: Op, state: _State) -> None:
        m = op.micro_batch
        prologue = state.prologues.pop(m)
        trainables = state.prologue_trainables.pop(m)
        reached = state.outer.pop(m)
        outputs, seeds = prologue.roots(
            state.gradient.pop(m), [reached.get(id(leaf)) for leaf in prologue.leaves]
        )
        if outputs:
            grads = torch.autograd.grad(
                outputs, list(trainables.values()), seeds, allow_unused=True
            )
            self.gradients.add(trainables, grads)
        self.engine.unbind(0)

    def _norm(self, op: Op, state: _State) -> None:
        state.grad_norm = self.gradients.norm()
        state.coefficient = clip_coefficient(
            state.grad_norm, self.engine.plan.optimizer.max_grad_norm
        )

    def _total(self, op: Op, state: _State) -> None:
        state.add_up()
        state.take_sums(self._of_ranks([state.loss_sum, *state.metrics.values()]))

    def _check(self, op: Op, state: _State) -> None:
        of_gradients = self.gradients.squares()
        names = [name for part_names, _ in of_gradients for name in part_names]
        squares = state.add_up(squares_T for _, squares_T in of_gradients)
        judged = zip(names, squares, strict=True)
        infinite = [name for name, square in judged if not math.isfinite(square)]
        sums = [state.loss_sum, *state.metrics.values()]
        answers = self._of_ranks([*sums, float(len(infinite)), *exact_parts(squares)])
        state.take_sums(answers)
        count = sum(answer[len(sums)] for answer in answers)
        if count or not math.isfinite(state.loss):
            names = list(dict.fromkeys(infinite))[:3] or ["a trainable on another rank"]
            culprit = f"gradient of {', '.join(names)}"
            if not math.isfinite(state.loss):
                culprit = f"loss, {state.loss},"
            dtype = str(self.engine.compute_dtype).removeprefix("torch.")
            raise FloatingPointError(
                f"the {culprit} is not finite at step {state.step.number}: nothing was updated."
                f" Lower optimizer.learning_rate ({state.step.learning_rate:g} now), look at this"
                f" step's data, or compute more exactly (compute_dtype: {dtype} now)"
            )
        if state.grad_norm is None:  # NORM has it exactly, where the plan clips
            plan = self.engine.plan
            of_one_copy = holders(answers, plan.mesh, 0, plan.optimizer_ranks)
            state.grad_norm = math.sqrt(
                math.fsum(square for answer in of_one_copy for square in answer[len(sums) + 1 :])
            )
        self.updates.commit()

    def _of_ranks(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all ranks, in their order."""
        return self.ranks.exchange(values)

    def _update(self, op: Op, state: _State) -> None:
        step = state.step.number
        rate = state.step.learning_rate
        self.updates.apply(op.unit, step=step, learning_rate=rate, coefficient=state.coefficient)


def _forget_graphs(of: weakref.ref[Backprop]) -> None:
    """Close the file maps of graphs in a pause, before Linux writes them out. Where a step begins
    meanwhile its tensors keep their maps."""
    if (estimator := of()) is not None:
        estimator.saved.clear()


def make(
    engine: Engine,
    home: Differentiated,
    ranks: Ranks,
    _sharing: ForwardSharing,
    objective: Objective | None,
) -> Backprop:
    """Return the estimator of a plan's row."""
    return Backprop(engine, home, ranks, objective)

"""The forward estimator: losses and next-token logits of an evaluation, without a gradient.

It trains nothing and keeps nothing. Its turns are those of one forward, whatever the method."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from blockwalk.cutting.calls import Prologue
from blockwalk.data.batch import Batch
from blockwalk.engine.engine import Engine
from blockwalk.engine.home import Job
from blockwalk.estimators.head import Ending
from blockwalk.estimators.losses import Objective, TokenSum, loss_of
from blockwalk.estimators.protocol import Weights
from blockwalk.estimators.stage_values import Received, receive, send
from blockwalk.estimators.walk_request import Losses, NextLogits
from blockwalk.estimators.zeroth_order.objectives import as_objective
from blockwalk.plan.placement import StateKind
from blockwalk.program.program import Op, OpKind


class Forward:
    """The estimator that answers the ops of an evaluation's program.

    Args:
        engine: the cut model.
        weights: the trainables, as the method's estimator reads them between two steps.
        objective: a function of (logits [B, S, V], batch), where the plan's loss takes one.
    """

    def __init__(
        self, engine: Engine, weights: Weights, objective: Objective | None = None
    ) -> None:
        self.engine = engine
        self.weights = weights
        number = None if objective is None else as_objective(objective)
        self.loss = loss_of(engine.plan.loss_facts, engine.cut.head, number)
        self.batches: Sequence[Batch] = ()
        self.labels: Sequence[Tensor] = ()
        self.request: Losses | NextLogits = Losses()
        self.prologues: dict[int, Prologue] = {}
        """The prologue of each micro-batch."""
        self.hidden: dict[int, Tensor] = {}
        self.received: Received = {}
        """Values of other stages that nothing has used yet."""
        self.row_losses: dict[int, Tensor] = {}
        """Losses [B], summed over each sequence, float64, by micro-batch; of all in one where the
        loss is the model's own."""
        self.logits_BV: Tensor | None = None
        """Logits after the last position, where the request is for them."""

    def begin(
        self, batches: Sequence[Batch], labels: Sequence[Tensor], request: Losses | NextLogits
    ) -> None:
        """Start an evaluation on its micro-batches, which lie on the device; labels are on the
        CPU."""
        self.engine.cut.set_training(False)
        self.batches = batches
        self.labels = labels
        self.request = request
        self.prologues.clear()
        self.hidden.clear()
        self.received.clear()
        self.row_losses = {}
        self.logits_BV = None

    def losses_of(self, micro_batch: int) -> Tensor:
        """Return the losses of a micro-batch, as :attr:`row_losses`; zeros where another stage has
        them."""
        if self.engine.stage.is_last:
            return self.row_losses[micro_batch]
        by_row = self.loss.sums or (isinstance(self.request, Losses) and self.request.by_row)
        rows = len(self.labels[micro_batch]) if by_row else 1
        if isinstance(self.request, Losses) and self.request.sequences:
            rows = self.request.sequences
        return torch.zeros(rows, dtype=torch.float64)

    def prepare(self, op: Op) -> Job:
        """Return the work of one op: the method of its name. A SEND reads what was made last, which
        a later op may replace."""
        if op.kind is OpKind.SEND:
            value = self.hidden.pop(op.micro_batch)
            if self.engine.stage.chunks[-1][-1] == op.unit:
                self.prologues.pop(op.micro_batch)
            return send(self.engine, op, value, self.batches[op.micro_batch])
        if op.kind is OpKind.RECV:
            return receive(self.engine, op, self.batches[op.micro_batch], self.received)
        return partial(getattr(self, f"_{op.kind.lower()}"), op)

    @torch.no_grad()
    def _prologue(self, op: Op) -> None:
        self.weights.bind(0)
        prologue = self.engine.cut.prologue(self.batches[op.micro_batch])
        length = prologue.hidden_BSD.shape[1]
        is_long = self.engine.plan.is_long(length, self.engine.device.type)
        self.prologues[op.micro_batch] = prologue.handed_over if is_long else prologue
        self.hidden[op.micro_batch] = prologue.hidden_BSD
        self.engine.unbind(0)

    @torch.no_grad()
    def _arguments(self, op: Op) -> None:
        batch = self.batches[op.micro_batch]
        self.prologues[op.micro_batch] = self.engine.cut.prologue_of_zeros(batch)

    @torch.no_grad()
    def _forward(self, op: Op) -> None:
        m = op.micro_batch
        key = (StateKind.ACTIVATION, op.unit - 1, m)
        if key in self.received:
            self.hidden[m] = self.received.pop(key)
        self.weights.bind(op.unit)
        call = self.prologues[m].calls[op.unit - 1]
        self.hidden[m] = self.engine.cut.forward(call, self.hidden[m])
        self.engine.unbind(op.unit)

    @torch.no_grad()
    def _loss(self, op: Op) -> None:
        m = op.micro_batch
        self.weights.bind(op.unit)
        ending = Ending(
            self.engine.cut,
            self.prologues.pop(m),
            self.hidden.pop(m),
            self.batches[m],
            self.labels[m],
            self.weights.weight,
            self.weights.vector,
            scratch=self.weights.loss_scratch,
        )
        if isinstance(self.request, NextLogits):
            in_parts = self.loss.sums
            self.logits_BV = ending.next_logits() if in_parts else ending.logits()[:, -1].float()
        elif self.request.sequences and isinstance(self.loss, TokenSum):
            self.row_losses[m] = self.loss.of_sequences(ending, self.request.sequences)
        else:
            by_row = self.loss.sums or self.request.by_row
            losses = self.loss.forward(ending, by_row=by_row).double()
            # a mean over the labels that count becomes their sum
            self.row_losses[m] = losses if by_row else losses.view(1) * ending.counted
        self.engine.unbind(op.unit)

"""Zeroth order: a direction from the losses of perturbed forwards.

While a unit is on the device, all forwards of the step run through it. The row of ``zo.kind`` says
which these are (:mod:`blockwalk.plan.zeroth_order_kinds`), and the file of its name beside this one
what becomes of their losses. EXCHANGE makes the step's
:class:`~blockwalk.checkpoints.ledger.LedgerEntry` of them. How weights are perturbed and updated is
the arithmetic's (:mod:`blockwalk.estimators.zeroth_order.arithmetic`).

Losses and what is made of them are float64."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockwalk.checkpoints.ledger import Ledger, LedgerEntry
from blockwalk.cutting.calls import joined_call
from blockwalk.data.batch import Batch, loss_tokens
from blockwalk.engine.buckets import Buckets
from blockwalk.engine.engine import Engine
from blockwalk.engine.home import Job
from blockwalk.estimators.head import Ending, joined
from blockwalk.estimators.losses import (
    Objective,
    Share,
    TokenFunction,
    TokenSum,
    trained_loss,
)
from blockwalk.estimators.protocol import StepFigures
from blockwalk.estimators.walk_request import Step
from blockwalk.estimators.zeroth_order.arithmetic import Arithmetic, PerturbedCopies
from blockwalk.estimators.zeroth_order.ledger_header import header
from blockwalk.estimators.zeroth_order.objectives import as_objective, ranked
from blockwalk.estimators.zeroth_order.perturbed_units import AtRest
from blockwalk.estimators.zeroth_order.step_entries import StepEntries
from blockwalk.estimators.zeroth_order.step_state import PassKey, StepState
from blockwalk.estimators.zeroth_order.updates import ZerothOrderRule, trained_in_order
from blockwalk.numerics.codecs.weights import Value
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.losses import OBJECTIVE
from blockwalk.program.program import Op, OpKind, Shape
from blockwalk.ranks.agreement import require_agreement
from blockwalk.ranks.forward_sharing import ForwardSharing
from blockwalk.ranks.ranks import Ranks


class ZerothOrder:
    """The estimator of a zeroth-order program
    (:class:`~blockwalk.estimators.protocol.Estimator`).

    Args:
        engine: the cut model.
        buckets: the home of its trainables.
        sharing: how ranks share a step's forwards and its batch.
        objective: a function of (logits, batch) that is minimised instead of the loss: any number.
        arithmetic: how weights are perturbed and updated; perturbed copies unless given.
    """

    def __init__(
        self,
        engine: Engine,
        buckets: Buckets,
        sharing: ForwardSharing,
        objective: Objective | None = None,
        arithmetic: Callable[..., Arithmetic] = PerturbedCopies,
    ) -> None:
        self.engine = engine
        self.sharing = sharing
        self.plan = engine.plan
        self.rule = ZerothOrderRule.of(self.plan, trained_in_order(engine.cut, engine.spec))
        self.steps = StepEntries(buckets)
        self.arithmetic = arithmetic(engine, buckets, self.rule, self.steps)
        self.loss_scratch = ScratchArena()
        self.state: StepState | None = None
        self._alone: set[int] = (
            set() if engine.cut.anatomy.joint_forwards else set(range(len(engine.spec.units)))
        )
        """The units that do not take the rows of several forwards at once, as far as is known."""
        facts = self.plan.loss_facts if objective is None else OBJECTIVE
        number = None if objective is None else as_objective(objective)
        self.loss = trained_loss(facts, self.plan.objective_facts, engine.cut.head, number)
        self._ranks_words = self.plan.zo.objective != "loss" and objective is None

    # ---- what the walker asks of every estimator -------------------------------------------------

    @property
    def checkpointed(self) -> None:
        """None: the ledger is the checkpoint."""
        return

    @property
    def at_rest(self) -> AtRest:
        """The weights between two steps."""
        self.arithmetic.units.forget()
        return AtRest(self.arithmetic.units, self.loss_scratch)

    def reserve(self, _shape: Shape) -> None:
        """Do nothing: nothing is kept of micro-batches."""

    def figures(self) -> StepFigures:
        """Return the figures of the step that has just been run, and let go of its tensors."""
        state = self.state
        assert state is not None
        assert state.entry is not None
        self.state = None
        grad = state.entry.projected_grad
        return StepFigures(state.entry.loss, state.tokens, projected_grad=grad)

    def undo(self) -> None:
        """Do nothing: no weight changes before the step counts."""

    def waiting(self) -> int:
        """Return the most entries that any unit has not seen."""
        return self.steps.waiting()

    def resume(self, steps: int) -> None:
        """Go on after so many steps, whose updates the weights have."""
        self.steps.resume(steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the buckets and their steps."""
        self.steps.buckets.load_state_dict(state)

    # ---- the steps that count --------------------------------------------------------------------

    @property
    def entries(self) -> list[LedgerEntry]:
        """Entries of the steps done, oldest first."""
        return self.steps.entries

    def record(self, entry: LedgerEntry) -> None:
        """Take a step's entry; the step counts when this returns."""
        self.steps.record(entry)

    def header(self, lora: Any, run: str) -> dict[str, Any]:
        """Return the header of the run's ledger."""
        return header(self.engine, self.steps.buckets, lora, run)

    def take_up(self, ledger: Ledger) -> int:
        """Go on where a ledger stands, write every step to it before the step counts, and return
        the steps done."""
        return self.steps.take_up(ledger)

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self, batches: Sequence[Batch], labels: Sequence[Tensor], step: Step) -> None:
        """Start a step on its micro-batches: the parts of the global batch, on the device, and
        their labels, on the CPU; of several ranks each computes on its own parts.

        Raises:
            ValueError: no label of the step counts towards the loss.
        """
        self.engine.cut.set_training(False)
        self.arithmetic.units.forget()
        counted = tuple(loss_tokens({"labels": labels_BS}) for labels_BS in labels)
        step.require_labels(sum(counted))
        if self._ranks_words and step.words is None:
            raise ValueError(
                f"zo.objective: {self.plan.zo.objective} ranks label words: a step needs a"
                " LabelWordBatch (data with data.template and data.label_words), or set"
                " zo.objective: loss"
            )
        self.state = StepState(
            batches,
            labels,
            counted,
            step,
            seed=self._seed(step),
            passes=self.plan.kind.passes(self.plan.zo.queries),
            by_row=self._ranks_words,
        )

    def _seed(self, step: Step) -> int:
        """Return a step's seed: the one given (0 counts), of several ranks rank 0's; else the
        plan's, or where the noise is torch's what the original draws for this step from numpy's
        generator, which it seeds with the run's."""
        if step.seed is not None:
            return self.sharing.first_seed(step.seed)
        if not self.plan.noise.own_seeds:
            return self.plan.seed
        generator = np.random.RandomState(self.plan.seed % 2**32)
        return int(generator.randint(1000000000, size=step.number)[-1])

    def prepare(self, op: Op) -> Job:
        """Return the work of one op: a forward's, EXCHANGE, or what the arithmetic does to weights.
        A flush has no step."""
        answers: dict[OpKind, Callable[[Op, StepState], None]] = {
            OpKind.PROLOGUE: self._prologue,
            OpKind.FORWARD: self._forward,
            OpKind.LOSS: self._loss,
            OpKind.EXCHANGE: self._exchange,
        }
        if op.kind not in answers:
            return self.arithmetic.prepare(op, self.state)
        assert self.state is not None
        return partial(answers[op.kind], op, self.state)

    # ---- forwards --------------------------------------------------------------------------------

    @torch.no_grad()
    def _prologue(self, op: Op, state: StepState) -> None:
        self._bind(op, state)
        key = (op.micro_batch, op.forward_pass)
        prologue = self.engine.cut.prologue(state.batches[op.micro_batch])
        state.prologues[key] = prologue
        state.hidden[key] = prologue.hidden_BSD
        self.engine.unbind(0)

    @torch.no_grad()
    def _forward(self, op: Op, state: StepState) -> None:
        keys = [(op.micro_batch, forward_pass) for forward_pass in op.passes]
        if len(keys) == 1 or op.unit in self._alone or not self._forward_together(op, keys, state):
            for key, values in zip(keys, self._values(op, state), strict=True):
                self.engine.cut.bind(op.unit, values)
                call = state.prologues[key].calls[op.unit - 1]
                state.hidden[key] = self.engine.cut.forward(call, state.hidden[key])
        self.engine.unbind(op.unit)

    def _forward_together(self, op: Op, keys: Sequence[PassKey], state: StepState) -> bool:
        """Run a block once on the rows of these forwards, and return whether it takes them so: they
        must be told from its other dimensions."""
        rows, tokens = state.hidden[keys[0]].shape[:2]
        calls = [state.prologues[key].calls[op.unit - 1] for key in keys]
        call = joined_call(calls, rows, state.joined)
        if tokens in (rows, rows * len(keys)) or call is None:
            return False
        hidden_PSD = torch.cat([state.hidden[key] for key in keys])
        output_PSD = self.engine.cut.forward_together(call, hidden_PSD, self._values(op, state))
        if output_PSD is None:
            self._alone.add(op.unit)
            return False
        state.hidden |= zip(keys, output_PSD.chunk(len(keys)), strict=True)
        return True

    def _bind(self, op: Op, state: StepState) -> None:
        """Put a unit's trainables in their places, under the perturbation of an op's one pass."""
        (values,) = self._values(op, state)
        self.engine.cut.bind(op.unit, values)

    def _values(self, op: Op, state: StepState) -> list[dict[str, Value]]:
        """Return a unit's trainables under the perturbation of each pass of an op."""
        perturbations = [self.arithmetic.perturbation(p, state) for p in op.passes]
        copies = self.plan.copies_blocks
        return self.arithmetic.units.values(op.unit, perturbations, copies=copies)

    @torch.no_grad()
    def _loss(self, op: Op, state: StepState) -> None:
        key = (op.micro_batch, op.forward_pass)
        ending = self._ending(op, state)
        if isinstance(self.loss, TokenSum | TokenFunction):
            state.factors[key] = ending.factors()
            self._losses_together(self.loss, key, state)
        else:
            state.losses[key] = self.loss.forward(ending, by_row=state.by_row)
        self.engine.unbind(op.unit)

    def _ending(self, op: Op, state: StepState) -> Ending:
        """Return the end of a forward, its head bound."""
        m = op.micro_batch
        p = op.forward_pass
        readers = state.readers.get(p)
        if readers is None:
            readers = self.arithmetic.units.readers(self.arithmetic.perturbation(p, state))
            state.readers = {p: readers}
        self._bind(op, state)
        return Ending(
            self.engine.cut,
            state.prologues.pop((m, p)),
            state.hidden.pop((m, p)),
            state.batches[m],
            state.labels[m],
            *readers,
            scratch=self.loss_scratch,
        )

    def _losses_together(
        self, loss: TokenSum | TokenFunction, key: PassKey, state: StepState
    ) -> None:
        """Compute the losses of this forward and of those that share its head, once no other of
        them is still on its way.

        These are a pass on all micro-batches, for which the head is perturbed once. Where the noise
        lies beside W they are all passes on one micro-batch instead, as one batch; with a bias,
        which differs from pass to pass, each forward is by itself."""
        is_beside = self.plan.noise.beside
        _, _, bias = state.factors[key]
        shared = slice(1, 2)
        if is_beside:
            shared = slice(1) if bias is None else slice(None)
        if any(other[shared] == key[shared] for other in state.hidden):
            return
        keys = [other for other in state.factors if other[shared] == key[shared]]
        of_passes = {k: state.factors.pop(k) for k in keys}
        batches = [(factors, state.labels[m]) for (m, _), factors in of_passes.items()]
        if is_beside:
            joined_factors = joined({p: it for (_, p), it in of_passes.items()}, len(state.passes))
            batches = [(joined_factors, state.labels[key[0]].repeat(len(keys), 1))]
        sums = loss.tokens if isinstance(loss, TokenFunction) else loss
        losses = sums.token_losses(self.engine.cut.head, batches, self.loss_scratch)
        if is_beside:
            losses = list(torch.split(losses[0], [len(state.labels[m]) for m, _ in keys]))
        for k, losses_BS in zip(keys, losses, strict=True):
            if isinstance(loss, TokenFunction):
                state.losses[k] = self._objective(loss, k[0], losses_BS, state)
            else:
                losses_B = losses_BS.sum(1)
                state.losses[k] = losses_B if state.by_row else losses_B.sum()

    def _objective(
        self, loss: TokenFunction, m: int, losses_BS: Tensor, state: StepState
    ) -> Tensor:
        """Return an objective of one forward's losses on a micro-batch, as a sum."""
        share = Share(state.request.counts, state.request.numbers[m])
        return loss.of_losses(state.batches[m], state.labels[m], share, losses_BS)

    # ---- from losses to weights ------------------------------------------------------------------

    def _exchange(self, _op: Op, state: StepState) -> None:
        """Turn the losses into the step's entry.

        Raises:
            FloatingPointError: a loss is not finite; neither weights nor ledger have changed.
        """
        step = state.request
        losses = self._losses(state)
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(
                f"step {step.number} has a loss that is not finite: losses {losses}, seed"
                f" {state.seed}, learning rate {step.learning_rate}, epsilon"
                f" {self.plan.zo.epsilon}. Nothing was updated; lower the learning rate or"
                " zo.epsilon, or look at this step's data"
            )
        grads, curvatures = self.arithmetic.scalars(losses, state)
        clip = self.plan.optimizer.max_grad_norm or math.inf
        state.entry = LedgerEntry(
            step=step.number,
            seed=state.seed,
            learning_rate=step.learning_rate,
            epsilon=self.plan.zo.epsilon,
            losses=losses,
            projected_grads=tuple(max(-clip, min(g, clip)) for g in grads),
            curvatures=curvatures,
        )
        self.record(state.entry)
        self.sharing.confirm(step.number, state.entry, wait=self.sharing.durable)

    def _losses(self, state: StepState) -> tuple[float, ...]:
        """Return the loss of each forward, a mean over the whole batch, float64: the step's one
        wait for the device."""
        keys = sorted(state.losses, key=lambda key: key[::-1])
        local_N = torch.cat([state.losses[key].double().reshape(-1) for key in keys])
        rows = len(state.labels[0]) if state.by_row else 1
        of_passes = self.sharing.losses(
            state.request.number, local_N.tolist(), state.counted, len(state.passes), rows
        )
        if state.by_row:
            words = state.request.words
            assert words is not None
            name = self.plan.zo.objective
            return tuple(
                ranked(name, words, torch.tensor(losses, dtype=torch.float64))
                for losses in of_passes
            )
        shares: Sequence[int] = [1] * len(state.batches) if self.loss.sums else state.counted
        return tuple(
            math.fsum(map(operator.mul, shares, losses)) / state.tokens for losses in of_passes
        )


def agree(home: Buckets, ranks: Ranks, sharing: ForwardSharing) -> None:
    """Check that all ranks have the same weights to go on with, and learn whether any rank's
    outlive it. Raises ValueError where they differ."""
    if ranks.world == 1:
        return
    require_agreement({"the weights to go on with": home.checksum})
    sharing.durable = any(durable for (durable,) in ranks.exchange([home.durable]))


def make(
    engine: Engine,
    home: Buckets,
    ranks: Ranks,
    sharing: ForwardSharing,
    objective: Objective | None,
) -> ZerothOrder:
    """Return the estimator of a plan's row."""
    agree(home, ranks, sharing)
    return ZerothOrder(engine, home, sharing, objective)

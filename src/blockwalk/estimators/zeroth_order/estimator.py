"""Zeroth order: the ops PROLOGUE to LOSS of every perturbed forward, EXCHANGE and UPDATE of a
program.

While a unit is on the device, all forwards of the step run through it. Which these are says the row
of ``zo.kind`` (:mod:`blockwalk.plan.zeroth_order_kinds`), what becomes of their losses the file of
its name beside this one. Weights are perturbed as they are read
(:mod:`blockwalk.estimators.zeroth_order.perturbed_weight`), never the master. EXCHANGE makes the
step's :class:`~blockwalk.checkpoints.ledger.LedgerEntry` from the losses; UPDATE applies the entries that
a unit has not seen, whenever the program says so.

Losses and what is made of them are float64. The original's arithmetic (``noise: mezo``) has an
estimator of its own, :mod:`blockwalk.estimators.zeroth_order.mezo_original`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch

from blockwalk.checkpoints.ledger import Ledger, LedgerEntry
from blockwalk.cutting.calls import joined_call
from blockwalk.data.batch import Batch, loss_tokens
from blockwalk.engine.bucket_tensors import STATE
from blockwalk.engine.engine import Engine
from blockwalk.estimators.asked import Asked
from blockwalk.estimators.head import Ending, Matrix, Vector, joined
from blockwalk.estimators.losses import Objective, TokenSum, loss_of
from blockwalk.estimators.zeroth_order.objectives import ranked
from blockwalk.estimators.zeroth_order.perturbed_weight import (
    Perturbation,
    PerturbedWeight,
    perturbed_at_once,
    with_scales,
)
from blockwalk.estimators.zeroth_order.step import Step
from blockwalk.estimators.zeroth_order.updates import (
    ZerothOrderRule,
    apply_all_,
    fuses,
    reserve,
    trained_in_order,
)
from blockwalk.numerics.codecs.weights import DenseWeight, Value, Weight
from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.losses import OBJECTIVE
from blockwalk.plan.model_spec import ParamSpec
from blockwalk.plan.noise_kinds import NOISES
from blockwalk.plan.sizes import UPDATE_ELEMENTS
from blockwalk.plan.words import counted
from blockwalk.plan.zeroth_order_kinds import AT_REST
from blockwalk.program.program import Op, Shape
from blockwalk.ranks.shared_forwards import SharedForwards


class ZerothOrder:
    """The estimator that answers the compute ops of a zeroth-order program.

    Args:
        engine: the cut model and its buckets.
        objective: a function of logits and batch that is minimised instead of the loss.
        ranks: those that share a step's forwards and its batch; this process alone unless given.
    """

    def __init__(
        self,
        engine: Engine,
        objective: Objective | None = None,
        ranks: SharedForwards | None = None,
    ) -> None:
        self.engine = engine
        self.function = objective
        self.ranks = ranks or SharedForwards(MeshSettings())
        self.plan = engine.plan
        self.rule = ZerothOrderRule.of(self.plan, trained_in_order(engine.cut, engine.spec))
        self.entries: list[LedgerEntry] = []
        """Steps done, oldest first: what pending updates are read from."""
        self.entries_after = 0
        """The step that the first of them follows."""
        self.record: Callable[[LedgerEntry], None] = self.entries.append
        """Called with each step's entry before any weight changes; the step counts when it
        returns."""
        self.scratch = ScratchArena()
        self.slice_scratch = ScratchArena()
        """Scratch of updates to slices, which run beside the forwards."""
        self.loss_scratch = ScratchArena()
        self.state: Step | None = None
        self._bound: tuple[tuple[int, int], list[dict[str, Value]]] | None = None
        """The trainables of the unit and passes that last computed."""
        self._alone: set[int] = (
            set() if engine.cut.anatomy.together else set(range(len(engine.spec.units)))
        )
        """The units that do not take the rows of several forwards at once, as far as is known."""
        self.loss = loss_of(self.plan.loss_facts, engine.cut.head, objective)
        """The loss of an evaluation."""
        self.training_loss = (
            self.loss if objective is None else loss_of(OBJECTIVE, engine.cut.head, objective)
        )
        self._reserve()

    def _reserve(self) -> None:
        """Make what updates work in now: the first one comes with the second step, where nothing is
        to be allocated."""
        buckets = self.engine.buckets
        if fuses(self.rule, self.engine.device):
            return
        for number, unit in enumerate(buckets.units):
            scratch = self.slice_scratch if buckets.sliced(number) else self.scratch
            for param in unit.params:
                reserve(
                    self.rule,
                    param.name.partition(STATE)[2],
                    param.layout(32),
                    scratch,
                    self.engine.device,
                )

    def seed_of(self, asked: Asked) -> int:
        """Return a step's seed: the one given (0 counts), of several ranks rank 0's; else the
        plan's, or where the noise is torch's what the original draws for this step from numpy's
        generator, which it seeds with the run's."""
        if asked.seed is None and NOISES[self.plan.zo.noise].own_seeds:
            return int(
                np.random.RandomState(self.plan.seed % 2**32).randint(1000000000, size=asked.step)[
                    -1
                ]
            )
        return self.plan.seed if asked.seed is None else self.ranks.first_seed(asked.seed)

    # ---- what the walker asks of every estimator -------------------------------------------------

    def reserve(self, shape: Shape) -> None:
        """Do nothing: nothing is kept of micro-batches."""

    @property
    def graph_bytes(self) -> None:
        """Bytes that graphs of this step wrote to file maps: there are no graphs."""
        return

    def waiting(self) -> int:
        """Return the most entries that any unit has not seen where it stays between its turns."""
        buckets = self.engine.buckets
        return max(
            (self.steps - buckets.stored_step(unit) for unit in set(buckets.home.values())),
            default=0,
        )

    def resume(self, entries: Sequence[LedgerEntry], after: int = 0) -> None:
        """Take up a run where its ledger stands: ``entries`` follow step ``after``."""
        self.entries[:], self.entries_after = entries, after

    def take_up(self, ledger: Ledger) -> int:
        """Go on where a ledger stands, and write every step to it before the step counts; the
        answer is the steps done.

        Raises:
            ValueError: the weights on the disk have more steps than the ledger.
        """
        buckets = self.engine.buckets
        ahead = max(buckets.stored_step(unit) for unit in range(len(buckets.units)))
        if ahead > ledger.steps:
            raise ValueError(
                f"{ledger.path} has {counted(ledger.steps, 'step')}, and the weights of this run"
                " in the working folder have"
                f" {ahead}: the ledger was cut. Remove the working folder to rebuild the weights"
                " from the ledger"
            )
        self.resume(ledger.entries)

        def record(entry: LedgerEntry) -> None:
            ledger.append(entry)
            self.entries.append(entry)

        self.record = record
        return ledger.steps

    def compare(self, step: int, flush: Callable[[], None]) -> None:
        """Every so many steps, compare the weights that ranks hold copies of, all brought up to
        date: of a block that is fetched more updates may wait than of one that another rank keeps.
        Raises RuntimeError where two differ."""
        if self.ranks.world > 1 and step % self.plan.mesh.check_every == 0:
            flush()
            self.ranks.compare(step, *self.engine.buckets.sums())

    def require_alike(self, step: int) -> None:
        """Copies after a step: rank 0 alone saves, and the ledger makes the weights anew."""

    def require_finite(self, step: int) -> None:
        """Weights after a step: an entry whose losses are not finite was never made."""

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self, batches: Sequence[Batch], labels: Sequence[torch.Tensor], asked: Asked) -> None:
        """Start a step, or an evaluation, on its micro-batches: the parts of the global batch, on
        the device, and their labels, on the CPU; of several ranks each computes on its own parts.

        Raises:
            ValueError: no label of the step counts towards the loss.
        """
        self.engine.module.eval()
        self._bound = None
        counted = tuple(loss_tokens({"labels": each}) for each in labels)
        asked.require_labels(sum(counted))
        ranks = asked.training and self.plan.zo.objective != "loss" and self.function is None
        if ranks and asked.words is None:
            raise ValueError(
                f"zo.objective: {self.plan.zo.objective} ranks label words: a step needs a"
                " LabelWordBatch (data with"
                " data.template and data.label_words), or set zo.objective: loss"
            )
        self.state = Step(
            batches,
            labels,
            counted,
            asked,
            seed=self.seed_of(asked),
            passes=self.plan.kind.passes(self.plan.zo.queries) if asked.training else (AT_REST,),
            by_row=asked.by_row or ranks or (self.loss.sums and not asked.training),
        )

    def prepare(self, op: Op) -> Callable[[], None]:
        """Return the work of one op: the method of its name. A flush has no step."""
        return partial(getattr(self, f"_{op.kind.lower()}"), op, self.state)

    @torch.no_grad()
    def _prologue(self, op: Op, state: Step) -> None:
        self._bind(op, state)
        key = (op.micro_batch, op.forward_pass)
        prologue = self.engine.cut.prologue(state.batches[op.micro_batch])
        state.prologues[key], state.hidden[key] = prologue, prologue.hidden_BSD
        self.engine.unbind(0)

    @torch.no_grad()
    def _forward(self, op: Op, state: Step) -> None:
        keys = [(op.micro_batch, op.forward_pass + i) for i in range(op.passes)]
        if len(keys) == 1 or op.unit in self._alone or not self._forward_together(op, keys, state):
            for key, values in zip(keys, self._values_of(op, state), strict=True):
                self.engine.cut.bind(op.unit, values)
                call = state.prologues[key].calls[op.unit - 1]
                state.hidden[key] = self.engine.cut.forward(call, state.hidden[key])
        self.engine.unbind(op.unit)

    def _forward_together(self, op: Op, keys: Sequence[tuple[int, int]], state: Step) -> bool:
        """Run a block once on the rows of these forwards, where they may be told from other
        dimensions and it takes them so."""
        rows, tokens = state.hidden[keys[0]].shape[:2]
        call = joined_call(
            [state.prologues[key].calls[op.unit - 1] for key in keys], rows, state.joined
        )
        if tokens in (rows, rows * len(keys)) or call is None:
            return False
        out = self.engine.cut.forward_together(
            call, torch.cat([state.hidden[key] for key in keys]), self._values_of(op, state)
        )
        if out is None:
            self._alone.add(op.unit)
            return False
        state.hidden |= zip(keys, out.chunk(len(keys)), strict=True)
        return True

    @torch.no_grad()
    def _loss(self, op: Op, state: Step) -> None:
        m = op.micro_batch
        p = op.forward_pass
        cut = self.engine.cut
        training = state.asked.training
        key = (m, p)
        batch = state.batches[m]
        state.readers = {p: state.readers.get(p) or self._readers(self._perturbation(op, state))}
        self._bind(op, state)
        ending = Ending(
            cut,
            state.prologues.pop(key),
            state.hidden.pop(key),
            batch,
            state.labels[m],
            *state.readers[p],
            scratch=self.loss_scratch,
        )
        if not training:
            state.answers.take(self.loss, ending, state.asked, m)
        elif isinstance(self.training_loss, TokenSum):
            state.factors[key] = ending.factors()
            self._losses_together(self.training_loss, key, state)
        else:
            state.losses[key] = self.training_loss.forward(ending, by_row=state.by_row)
        self.engine.unbind(op.unit)

    def _losses_together(self, loss: TokenSum, key: tuple[int, int], state: Step) -> None:
        """The losses of this forward and of those that share its head, computed when the last of
        them has come here: a pass on all micro-batches, for which the head is perturbed once. Where
        the noise lies beside W these are all passes on one micro-batch instead, as one batch; with
        a bias, which differs from pass to pass, each forward is by itself."""
        beside, (_, _, bias) = NOISES[self.plan.zo.noise].beside, state.factors[key]
        shared = slice(None) if beside and bias is not None else slice(1) if beside else slice(1, 2)
        if any(other[shared] == key[shared] for other in state.hidden):
            return
        found = {k: state.factors.pop(k) for k in list(state.factors) if k[shared] == key[shared]}
        batches = [(each, state.labels[m]) for (m, _), each in found.items()]
        if beside:
            together = joined({p: each for (_, p), each in found.items()}, len(state.passes))
            batches = [(together, state.labels[key[0]].repeat(len(found), 1))]
        rows = torch.cat(loss.of_passes(self.engine.cut.head, batches, self.loss_scratch))
        for k, losses_B in zip(
            found, torch.split(rows, [len(state.labels[m]) for m, _ in found]), strict=True
        ):
            state.losses[k] = losses_B if state.by_row else losses_B.sum()

    # ---- weights as a forward sees them ----------------------------------------------------------

    def _perturbation(self, op: Op, state: Step) -> Perturbation:
        query, sign = state.passes[op.forward_pass]
        stochastic = state.asked.training and self.plan.zo.rounding == "stochastic"
        return Perturbation(
            state.seed, state.asked.step, query, sign * self.plan.zo.epsilon, stochastic
        )

    def _bind(self, op: Op, state: Step) -> None:
        """Put a unit's trainables in their places, perturbed, in the compute dtype. They are made
        for the first micro-batch of a pass and serve all."""
        (values,) = self._values_of(op, state)
        self.engine.cut.bind(op.unit, values)

    def _values_of(self, op: Op, state: Step) -> list[dict[str, Value]]:
        """Return a unit's trainables under the perturbation of each pass of an op."""
        if self._bound is None or self._bound[0] != (op.unit, op.forward_pass):
            of_passes = (replace(op, forward_pass=op.forward_pass + i) for i in range(op.passes))
            values = [
                self._values(op.unit, self._perturbation(each, state), state) for each in of_passes
            ]
            self._bound = (op.unit, op.forward_pass), values
        return self._bound[1]

    def _values(self, unit: int, perturbation: Perturbation, state: Step) -> dict[str, Value]:
        """Return a unit's trainables under a perturbation: matrices as they are read, the rest as
        copies; those of a block that is compiled, or that several micro-batches go through, all
        whole, in buffers that blocks share."""
        block = 0 < unit < self.engine.cut.epilogue_index
        whole = block and (self.plan.compile or (state.asked.training and self.plan.copies_blocks))
        trainables = list(self.engine.trainables(unit))
        values: dict[str, Value] = {}
        if (
            not (block and self.plan.compile)
            and not is_cpu(self.engine.device)
            and perturbation.scale
            and self.rule.kind.direction_ is None
        ):
            weights = [
                self._perturbed(p.name, perturbation) for p in trainables if not read_in_ranges(p)
            ]
            values |= perturbed_at_once(weights)
        for i, p in enumerate(trainables):
            if p.name not in values:
                values[p.name] = self._value(p, perturbation, f"whole {i}" if whole else None)
        return values

    def _value(self, param: ParamSpec, perturbation: Perturbation, buffer: str | None) -> Value:
        """Return a trainable under a perturbation: whole in the named buffer, or in whatever form
        takes the least."""
        weight = self._perturbed(param.name, perturbation)
        master = weight.master
        if not weight.scale and master.dense and master.tensor.dtype == weight.dtype:
            return master.tensor
        if buffer is None:
            return weight.lazily() if read_in_ranges(param) else weight.whole()
        out = self.scratch.take(buffer, *param.shape, like=master.bytes_P, dtype=weight.dtype)
        weight.into(out.view(weight.shape))
        ranges = (
            read_in_ranges(param) and not self.plan.compile
        )  # products by range, whose bits are the same in any copy
        return DenseWeight(out, weight.dtype) if ranges else out

    def _readers(self, perturbation: Perturbation) -> tuple[Matrix, Vector]:
        """Return functions that read the head's matrices and vectors, perturbed where they are
        trained."""
        home = self.engine.buckets.home

        @cache
        def matrix(name: str) -> Weight:
            return (
                self._perturbed(name, perturbation).lazily()
                if name in home
                else self.engine.weight(name)
            )

        @cache
        def vector(name: str | None) -> torch.Tensor | None:
            return (
                self._perturbed(name, perturbation).whole()
                if name in home
                else self.engine.vector(name)
            )

        return matrix, vector

    def _perturbed(self, name: str, perturbation: Perturbation) -> PerturbedWeight:
        states = self.engine.buckets.tensors[self.engine.buckets.home[name]][name]
        beside = {state: states[state] for state in self.plan.kind.states}
        dtype = self.engine.compute_dtype_of(name)
        direction_ = self.rule.kind.direction_
        noise = perturbation.noise(self.rule.draws, name)
        rounding = perturbation.rounding(name)
        master = states[""]
        scale = perturbation.scale
        if scale and self.plan.zo.target == "scales":
            master = master if master.dense else with_scales(master, noise, scale, self.scratch)
            scale = 0.0
        return PerturbedWeight(
            master, noise, scale, dtype, self.scratch, beside, direction_, rounding
        )

    # ---- from losses to weights ------------------------------------------------------------------

    def _exchange(self, op: Op, state: Step) -> None:
        """Turn the losses into the step's entry.

        Raises:
            FloatingPointError: a loss is not finite; neither weights nor ledger have changed.
        """
        losses = self._losses(state)
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(
                f"step {state.asked.step} has a loss that is not finite: losses {losses}, seed"
                f" {state.seed}, learning rate"
                f" {state.asked.learning_rate}, epsilon {self.plan.zo.epsilon}. Nothing was"
                " updated; lower the learning rate"
                " or zo.epsilon, or look at this step's data"
            )
        grads, curvatures = self._scalars(losses, state)
        state.entry = LedgerEntry(
            step=state.asked.step,
            seed=state.seed,
            learning_rate=state.asked.learning_rate,
            epsilon=self.plan.zo.epsilon,
            losses=losses,
            projected_grads=grads,
            curvatures=curvatures,
        )
        self.record(state.entry)
        self.ranks.confirm(state.asked.step, state.entry, wait=self.ranks.durable)

    def _losses(self, state: Step) -> tuple[float, ...]:
        """Return the loss of each forward, a mean over the whole batch, float64: the step's one
        wait for the device."""
        own = [
            state.losses[m, p].double().reshape(-1)
            for m, p in sorted(state.losses, key=lambda key: key[::-1])
        ]
        rows = len(state.labels[0]) if state.by_row else 1
        values = self.ranks.losses(
            state.asked.step, torch.cat(own).tolist(), state.counted, len(state.passes), rows
        )
        if state.by_row:
            assert state.asked.words is not None
            return tuple(
                ranked(
                    self.plan.zo.objective, state.asked.words, torch.tensor(r, dtype=torch.float64)
                )
                for r in values
            )
        sums = self.training_loss.sums
        shares: Sequence[int] = [1] * len(state.batches) if sums else state.counted
        return tuple(
            math.fsum(share * value for share, value in zip(shares, of_pass, strict=True))
            / state.tokens
            for of_pass in values
        )

    def _scalars(
        self, losses: tuple[float, ...], state: Step
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return projected gradients, clipped, and curvatures of each query."""
        grads, curvatures = self.rule.kind.scalars(self.plan.zo, losses)
        most = self.plan.optimizer.max_grad_norm or math.inf
        return tuple(max(-most, min(g, most)) for g in grads), curvatures

    @property
    def steps(self) -> int:
        """Steps that count as done."""
        return self.entries_after + len(self.entries)

    @torch.no_grad()
    def _update(self, op: Op, _state: Step | None) -> None:
        """Apply what a unit has not seen to its copy on the device."""
        buckets = self.engine.buckets
        entries = self.entries[buckets.step(op.unit) - self.entries_after :]
        if buckets.sliced(op.unit):
            ranges = buckets.ranges(op.unit, UPDATE_ELEMENTS[self.engine.device.type])
            apply_all_(self.rule, entries, ranges, self.slice_scratch)
        else:
            apply_all_(self.rule, entries, buckets.tensors[op.unit].items(), self.scratch)
        buckets.advance(op.unit, self.steps)


def read_in_ranges(param: ParamSpec) -> bool:
    """Whether a trainable is a matrix, of which no more than a range is perturbed at a time."""
    return param.quantizable and len(param.shape) == 2

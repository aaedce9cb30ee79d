"""The walker: a model and a plan, ready to train. It is the user's handle; programs are run by
:mod:`blockwalk.walk.executor`."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from blockwalk.checkpoints.ledger import MODULES, Ledger, entry_of
from blockwalk.cutting.adapters import as_adapters
from blockwalk.cutting.live_model import require_model
from blockwalk.data.batch import Batch, require_ids
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.data.row_batch import batch_shape
from blockwalk.engine import frozen_codec
from blockwalk.engine.engine import Engine
from blockwalk.engine.master_updates import MasterUpdates
from blockwalk.engine.model_handle import opened
from blockwalk.estimators.forward import Forward
from blockwalk.estimators.protocol import Estimator, KeepsLedger
from blockwalk.estimators.walk_request import Losses, NextLogits, Step
from blockwalk.estimators.zeroth_order.ledger_header import run_of
from blockwalk.models.model_source import model_source
from blockwalk.numerics.device import chosen, is_cpu, require_usual_torch
from blockwalk.plan.mesh import Piece, context_axis
from blockwalk.plan.plan import Plan, refuse_dropout
from blockwalk.plan.schedules import schedule_of
from blockwalk.plan.table import resolved
from blockwalk.plan.words import counted
from blockwalk.program.arrive import exchanged
from blockwalk.program.costs import Costs
from blockwalk.program.program import Lane, Program, Sent, Shape, StepKind
from blockwalk.program.settling import settle_states
from blockwalk.ranks.agreement import (
    facts_of,
    gather_json,
    model_digest,
    require_agreement,
    versions,
)
from blockwalk.ranks.forward_sharing import ForwardSharing, MeshSharing, WalkAgain
from blockwalk.ranks.groups import started
from blockwalk.ranks.ranks import digest_of, first, make_ranks
from blockwalk.ranks.watch import Watch, begin_watch, naming
from blockwalk.system import atomic_files, row_modules
from blockwalk.system.paths import StrPath
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.page_faults import note_steps
from blockwalk.walk import generation, kept_logits
from blockwalk.walk.batch_parts import BatchParts, cut_shared, row_place
from blockwalk.walk.context_check import require_parts
from blockwalk.walk.executor import Executor, Timeline
from blockwalk.walk.lanes import Lanes
from blockwalk.walk.own_rows import Cut, cut_rows, require_own_rows, shapes_of
from blockwalk.walk.programs import Programs
from blockwalk.walk.stages_check import require_all_blocks, require_stages

if TYPE_CHECKING:
    from peft import LoraConfig

    from blockwalk.checkpoints.distributed import Saver
    from blockwalk.plan.choices import Adapters


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one step."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the step's counted tokens."""
    tokens: int
    """Tokens with a label; what the loss is a mean of."""
    seconds: float
    learning_rate: float
    bytes: dict[Lane, int] = field(default_factory=dict)
    """Bytes moved, by lane."""
    bytes_by_axis: dict[str, int] = field(default_factory=dict)
    """Bytes that this rank sent over each axis of the mesh."""
    grad_norm: float | None = None
    """The gradient's norm before clipping, over all ranks; None in zeroth order."""
    projected_grad: float | None = None
    """The scalar g of a zeroth-order step."""
    copies: int = 0
    """Rows over all ranks that were copies, of which nothing is learnt: what the batch lacked to
    equal parts for micro-batches and ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further means over the step that its objective answers, by name."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A sum, so that batches of different sizes can be added up."""

    loss_sum: float
    tokens: int

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.tokens, 1)


class Walker:
    """A walker trains a model under a plan, one block at a time.

    Args:
        model: a checkpoint folder, a block store, or a ``transformers`` causal model in memory.
            Given a path, the weights are never all in memory unless the plan says so.
        plan: see :func:`blockwalk.method`.
        lora: train these adapters instead of the model's own parameters:
            :class:`blockwalk.LoraSettings`, a mapping of its fields or of those of a prefix
            (``{"num_virtual_tokens": 5}``), a ``peft.LoraConfig``, the folder of a saved adapter,
            or True for the defaults; None or False: the model's own parameters.
        device: ``cpu``, or an accelerator (``cuda``, ``cuda:1``, ``xpu``); unless given
            ``BLOCKWALK_DEVICE``, or the accelerator where there is one.
        workdir: scratch files and packed stores go here, and stay; a temporary folder unless given.
        training: False for evaluation and generation alone: nothing is trained, so nothing is kept
            for it.
        ledger: zeroth order: the file that every step is written to before it counts. One that is
            there is taken up: the run goes on after its last step, from the weights that
            ``workdir`` holds or from the model itself.
        objective: a function of (logits [B, S, V], batch) whose answer is minimised instead of the
            loss. Zeroth order takes any number; backpropagation a tensor that autograd can
            differentiate, a mean over the batch's counted tokens.
        sharing: zeroth order: how its forwards are shared, where ranks come and go
            (:class:`blockwalk.ranks.forward_sharing.ChangingRanks`).

    Raises:
        ValueError: the model cannot be walked, or does not fit the plan, or the ledger is another
            run's.

    >>> plan = blockwalk.method("mebp")  # doctest: +SKIP
    >>> Walker("Qwen2.5-0.5B", plan, lora={"rank": 8}).step(batch).loss  # doctest: +SKIP
    """

    def __init__(
        self,
        model: StrPath | nn.Module,
        plan: Plan,
        *,
        lora: Adapters | Mapping[str, Any] | LoraConfig | StrPath | bool | None = None,
        device: str | torch.device | None = None,
        workdir: StrPath | None = None,
        training: bool = True,
        ledger: StrPath | None = None,
        objective: Callable[[Tensor, Batch], Any] | None = None,
        sharing: ForwardSharing | None = None,
    ) -> None:
        self._facts = plan.estimator.facts
        if ledger is not None and not self._facts.ledger:
            raise ValueError(
                f"method {plan.method!r} differentiates: a ledger belongs to zeroth order"
            )
        if objective is not None and self._facts.walks_back:
            plan = replace(plan, loss="objective")
        require_usual_torch()
        # refused before the model is looked at
        self._schedule = schedule_of(plan.optimizer) if training else None
        self.device = chosen(device)
        require_model(model, on_paper=self.device.type == "meta")
        model = model if isinstance(model, nn.Module) else model_source(model)
        lora = as_adapters(lora)
        adapters = lora is not None or hasattr(model, "peft_config")
        self.plan, reason = frozen_codec.chosen(plan, model, adapters=adapters)
        plan = self.plan
        if training:
            refuse_dropout(plan, lora)
        require_parts(model, plan)
        require_stages(model, plan)
        if adapters or not training:
            frozen_codec.say_codec(plan, model, reason)
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="blockwalk-") if workdir is None else None
        )
        folder = Path(self._temporary.name if self._temporary else os.fspath(workdir or ""))
        started(plan.mesh)
        self._begins_watch = plan.mesh.world > 1 and Watch.current is None
        self._watch = begin_watch(plan.mesh) if self._begins_watch else Watch.current
        self.ranks = make_ranks(plan, self.device)
        self.sharing = sharing or MeshSharing(self.ranks)
        packs = folder
        if self.ranks.world > 1:
            packs, folder = self._agreed_folders(folder, model, lora)
        run = first(lambda: run_of(ledger))
        handle = opened(
            model,
            plan,
            lora=lora,
            device=self.device,
            workdir=folder,
            packs=packs,
            training=training,
            coordinates=self.ranks.coordinates(self.ranks.rank),
        )
        plan = settle_states(plan, handle.full_spec, self.device.type)
        self.plan = handle.plan = plan
        memories = Memories(self.device, folder)
        homes = resolved(plan.home.make)(handle, memories, self.ranks, run)
        self.engine = Engine(handle, homes, memories)
        self._row_place = row_place(plan, homes.groups)
        self.lanes = Lanes(self.device)
        self._executor = Executor(self.engine, self.lanes)
        self._objective = objective
        self.timeline: Timeline | None = None
        """Programs that ran, with the host seconds of their ops; None records none (see
        ``simulate.trace``)."""
        lora_of_model = next(iter(getattr(self.engine.module, "peft_config", {}).values()), None)
        self._programs = Programs(self.engine, self.ranks, lora or lora_of_model, folder)
        self.steps_done = 0
        self._saver: Saver | None = None
        make = resolved(plan.step_estimator.make)
        self.estimator: Estimator = make(
            self.engine, homes.trained, self.ranks, self.sharing, objective
        )
        self._forward = Forward(self.engine, self.estimator.at_rest, objective)
        self.ledger: Ledger | None = None
        if ledger is not None:
            self.ledger = _shared_ledger(Path(ledger), self.ledger_header(lora, run))
            self.steps_done = self._keeps_ledger.take_up(self.ledger)

    def _agreed_folders(
        self, folder: Path, model: StrPath | nn.Module, lora: Any
    ) -> tuple[Path, Path]:
        """Return the folder that the ranks of this node pack in, once, and the one of this rank,
        when all ranks have agreed on what they train."""
        node = self.ranks.rank // self.plan.mesh.ranks_per_node * self.plan.mesh.ranks_per_node
        packs = Path(gather_json(os.path.abspath(folder))[node])
        digests = {"the model's weights": model_digest(model)}
        if isinstance(lora, str | os.PathLike):
            digests["the adapter's weights"] = model_digest(lora)
        require_agreement({**facts_of({"plan": self.plan.shared()}), **digests, **versions()})
        return packs, folder / f"rank-{self.ranks.rank}"

    def ledger_header(self, lora: Any, run: str = "") -> dict[str, Any]:
        """Zeroth order: return the header of a ledger of this run, whose adapters began as ``lora``
        says; with the modules that brought rows, if any did."""
        header = self._keeps_ledger.header(lora, run)
        modules = row_modules.stamps()
        return {**header, MODULES: modules} if modules else header

    @property
    def _keeps_ledger(self) -> KeepsLedger:
        """The estimator, whose row says that it keeps a ledger."""
        return cast(KeepsLedger, self.estimator)

    @property
    def _reads_padding(self) -> bool:
        """True where somebody may read the logits of padding: an objective, or the model's own
        loss."""
        facts = self.plan.loss_facts.for_head(custom=self.engine.cut.head.custom)
        return self._objective is not None or not facts.by_chunks

    @property
    def spec(self) -> Any:
        """The model as the walk sees it: a :class:`~blockwalk.plan.model_spec.ModelSpec`."""
        return self.engine.spec

    def reserve(self, shape: Shape) -> None:
        """Tell the shape of the largest micro-batch of a run, before its first step: buffers that
        micro-batches share are then made once."""
        self.estimator.reserve(shape)

    # ---- training --------------------------------------------------------------------------------

    def step(
        self,
        batch: Batch | LabelWordBatch,
        *,
        seed: int | None = None,
        learning_rate: float | None = None,
        local_batch: bool = False,
    ) -> StepResult:
        """One optimizer step on a whole batch, cut into ``plan.gradient_accumulation_steps``
        micro-batches.

        Args:
            batch: ``input_ids``, ``labels`` and optionally ``attention_mask``, each int64 [B, S];
                labels are not shifted, and −100 is ignored. An objective that ranks label words
                takes classification examples.
            seed: zeroth order: of this step's noise (0 is a seed too); the plan's unless given, or
                with torch's noise what the original draws for this step from numpy's generator,
                seeded with the plan's.
            learning_rate: of this step; the plan's schedule unless given.
            local_batch: True where ``batch`` is this rank's rows alone, as many on every rank, and
                the step's batch those of all ranks; False where every rank is given all of it.
                Shorter rows are padded to the longest of any rank.

        Raises:
            ValueError: shapes that do not fit, a column that the walk does not follow (an objective
                may read further ones), a token that the model has no row for, a step without a
                single label, or other data than on another rank; with ``local_batch``
                unequal numbers of rows, or unequal tensors. Every rank raises it.
            FloatingPointError: the loss or a gradient is not finite; weights and optimizer states
                are as they were.
        """
        began = time.perf_counter()
        note_steps(self.steps_done)
        require_usual_torch()
        if self._schedule is None:
            raise ValueError(
                "this walker was made with training=False, to evaluate and to generate; make"
                " another to train"
            )
        if learning_rate is None:
            learning_rate = self._schedule(self.steps_done)
        if not self.plan.update.deferred:
            self._catch_up()  # nothing to do, unless a zeroth-order run was taken up again
        words = None
        if isinstance(batch, LabelWordBatch):
            words = batch
            batch = batch.batch
        if self._watch is not None:
            self._watch.begin_step(self.lanes.finished)
        if local_batch:
            require_own_rows(self.plan, words)
        request = Step(self.steps_done + 1, learning_rate, seed=seed, words=words)
        sent_before = self._exchanged_bytes()
        with naming(self._watch):
            program, copies = self._train(StepKind.TRAIN, batch, request, local_batch=local_batch)
        figures = self.estimator.figures()
        sent = self._exchanged(self._exchanged_bytes() - sent_before)
        self.steps_done += 1
        note_steps(self.steps_done)
        if self.ranks.world > 1 and self.steps_done % self.plan.mesh.check_every == 0:
            self.flush()
            self._require_alike()
        if self._watch is not None:
            self._watch.end_step()
        return StepResult(
            step=self.steps_done,
            loss=figures.loss,
            tokens=figures.tokens,
            seconds=time.perf_counter() - began,
            learning_rate=learning_rate,
            bytes=program.bytes_by_lane(figures.graph_bytes, sent),
            bytes_by_axis=program.bytes_by_axis(self.plan.mesh, sent),
            grad_norm=figures.grad_norm,
            projected_grad=figures.projected_grad,
            copies=copies,
            metrics=figures.metrics,
        )

    def use_rule(
        self, numbers: Mapping[str, Any], spared: Mapping[str, Any], spared_rate: float
    ) -> None:
        """First order: give the update rule other numbers from the next step on.

        Args:
            numbers: settings of ``plan.optimizer`` by name: ``weight_decay``, ``betas``, ``eps``.
            spared: those of parameters that weight decay spares.
            spared_rate: the learning rate of these; that of the others comes with each step.

        Raises:
            ValueError: a number is out of range, or the method is zeroth-order, whose ledger has
                them once for all steps.
        """
        checkpointed = self.estimator.checkpointed
        if checkpointed is None:
            raise ValueError(
                f"method {self.plan.method!r} is zeroth-order: its ledger has the numbers of"
                " optimizer.* once, for all steps"
            )
        rule = self.plan.optimizer
        updates = cast(MasterUpdates, checkpointed)
        updates.use(replace(rule, **numbers), replace(rule, **spared), spared_rate)

    def _exchanged_bytes(self) -> int:
        """Return bytes that blocks have sent so far while they computed."""
        return 0 if self._row_place is None else self._row_place.exchange.sent_bytes

    def _exchanged(self, nbytes: int) -> tuple[Sent, ...]:
        """Return bytes that blocks sent while they computed, by axis and lane."""
        mesh = self.plan.mesh
        return exchanged(mesh, context_axis(mesh), nbytes) if nbytes else ()

    def follow(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Zeroth order: take over steps that another process made, lines of a ledger; the weights
        follow with the next walk."""
        for line in lines:
            self._keeps_ledger.record(entry_of(line, self.steps_done + 1))
            self.steps_done += 1

    def flush(self) -> None:
        """Zeroth order: apply every update that waits, and write the weights back to their tier.
        Over ranks: wait until every slice is refreshed. Before the weights are looked at
        (evaluation, generation, saving) this happens by itself.

        Raises:
            RuntimeError: a slice could not be refreshed; the message names the step.
        """
        self._catch_up()
        self._executor.settle()
        self.engine.trained.settle()

    def _catch_up(self) -> None:
        """Apply every update that waits."""
        if self.estimator.waiting():
            program = self.program(StepKind.FLUSH, Shape(1, 1))
            self._executor.run(program, self.estimator, self.timeline)

    def gradients(self, batch: Batch, *, local_batch: bool = False) -> dict[str, Tensor]:
        """Return the gradient of the mean loss, float32, by canonical parameter name; nothing is
        updated. ``batch`` and ``local_batch`` are as in :meth:`step`.

        Raises:
            ValueError: the method does not differentiate, or the batch is refused as in
                :meth:`step`.
        """
        gradients = self.engine.gradients
        if gradients is None:
            raise ValueError(
                f"method {self.plan.method!r} is zeroth-order: it has no gradients; use plain or"
                " mebp"
            )
        if local_batch:
            require_own_rows(self.plan, None)
        request = Step(self.steps_done + 1)
        self._train(StepKind.GRADIENTS, batch, request, local_batch=local_batch)
        return gradients.take()

    def _train(
        self, step_kind: StepKind, batch: Batch, step: Step, *, local_batch: bool = False
    ) -> tuple[Program, int]:
        """Run a step, or its gradients alone; a step that fails changes nothing. Return its
        program, and the rows that were copies."""
        parts = self._share_of(step_kind, batch, step, local_batch=local_batch)
        step = replace(step, tokens=parts.counts.tokens, counts=parts.counts, numbers=parts.numbers)
        on_device = parts.on(
            self.device, hides_unseen=not self._reads_padding, place=self._row_place
        )
        while True:
            pieces = self.sharing.share(step.number, self.plan.forward_passes, len(on_device))
            program = self.program(step_kind, parts.shape, pieces=pieces)
            self.estimator.begin(on_device, parts.labels, step)
            try:
                self._executor.run(program, self.estimator, self.timeline, step=step.number)
            except BaseException as error:
                with suppress(Exception):  # what they made is undone
                    self._executor.settle()
                self.estimator.undo()
                if not isinstance(error, WalkAgain):
                    raise
            else:
                return program, parts.copies

    def _share_of(
        self, step_kind: StepKind, batch: Batch, step: Step, *, local_batch: bool
    ) -> BatchParts:
        """Return what this rank walks of a step's batch, which all ranks have compared where each
        takes a share of it."""
        targets = {} if step.words is None else {"targets": step.words.targets_B}
        packs = self.engine.cut.walks_documents(self.plan)
        if self.plan.home.gathered:
            return cut_rows(
                batch,
                self.plan,
                self.ranks,
                Cut(
                    str(step_kind),
                    self.plan.gradient_accumulation_steps,
                    packs,
                    self.spec.vocab_size,
                    local_batch,
                    further_columns=self._objective is not None,
                    entries=self.plan.objective_facts.needs,
                ),
                step.number,
                {name: str(digest_of({name: values})) for name, values in targets.items()},
            )
        parts: BatchParts | None = None
        error = ""
        try:
            parts = cut_shared(
                batch,
                self.plan,
                packs=packs,
                vocab_size=self.spec.vocab_size,
                further_columns=self._objective is not None,
            )
        except ValueError as raised:
            error = str(raised)
        facts = batch if not targets else {**batch, **targets}
        self.ranks.read(facts, shapes_of(batch), error)
        if step.words is not None:  # the losses that ranks exchange are as many as its rows
            self.ranks.begin(step.number, ())
        elif self.ranks.refused_inside():
            self.sharing.refuse(step.number, error, self.plan.forward_passes, self.plan.cuts)
        assert parts is not None, "a refused batch raises an error on every rank"
        self.sharing.read(facts)
        return parts

    # ---- evaluation ------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, *, batches: int = 1, local_batch: bool = False) -> EvalResult:
        """Return the summed loss of a batch in evaluation mode, and the tokens that it is a sum
        over; under an objective of log-probabilities the cross-entropy of all answers. Ranks call
        this with the same batch, each walks its share of the sequences, and all get the same
        answer: one process's, but for the rounding of products with fewer rows. Each visit of a
        block computes the batch in ``batches`` parts, so that its weights are fetched and decoded
        once for all of them. With ``local_batch`` each rank brings rows of its own, as in
        :meth:`step`, and the answer is of those of all.

        Raises:
            ValueError: on every rank: another rank has another batch, or cuts it into other parts;
                with ``local_batch`` as in :meth:`step`.
        """
        if local_batch:
            require_own_rows(self.plan, None)
        parts = self._share_to_evaluate(batch, batches, local_batch=local_batch)
        return EvalResult(math.fsum(self._evaluated(parts, batches)), parts.counts.tokens)

    def label_losses(self, batch: Batch, *, batches: int = 1, packs: bool = False) -> Tensor:
        """Return the loss summed over the labels of each sequence, float64 [B] on the CPU, in
        evaluation mode: what label words are ranked by. Ranks share the sequences, and visits the
        parts, as in :meth:`evaluate`. With ``packs`` short ones lie side by side, as in a step,
        where the model walks them so: without their padding."""
        rows, _ = batch_shape(batch)
        packs = packs and self.engine.cut.walks_documents(self.plan)
        parts = self._share_to_evaluate(batch, batches, by_row=True, packs=packs)
        sequences = parts.shape.batch if packs else 0
        losses = self._evaluated(parts, batches, by_row=True, sequences=sequences)
        return torch.tensor(losses[:rows], dtype=torch.float64)

    def _share_to_evaluate(
        self,
        batch: Batch,
        batches: int,
        *,
        by_row: bool = False,
        local_batch: bool = False,
        packs: bool = False,
    ) -> BatchParts:
        """Return what this rank walks of a batch, when all ranks have agreed on it."""
        self.flush()
        packs = packs or (not by_row and self.engine.cut.walks_documents(self.plan))
        call = "label_losses" if by_row else "evaluate"
        cut = Cut(
            call,
            batches,
            packs,
            self.spec.vocab_size,
            local_batch,
            further_columns=self._objective is not None,
        )
        return cut_rows(batch, self.plan, self.ranks, cut, self.steps_done + 1)

    def _evaluated(
        self, parts: BatchParts, batches: int, *, by_row: bool = False, sequences: int = 0
    ) -> list[float]:
        """Return summed losses of the batch, in its order: of each sequence, or of each rank's
        share of each part where the model's own loss is asked for."""
        on_device = parts.on(
            self.device, hides_unseen=not self._reads_padding, place=self._row_place
        )
        self._forward.begin(on_device, parts.labels, Losses(by_row, sequences))
        program = self.program(StepKind.EVALUATE, parts.shape, batches=batches)
        self._executor.run(program, self._forward, self.timeline)
        losses = [self._forward.losses_of(m).tolist() for m in range(batches)]
        everyone = self.ranks.exchange([loss for part in losses for loss in part])
        everyone = everyone[-self.plan.mesh.stage_ranks :]  # the last stage has losses
        context = self.plan.mesh.context
        shares = [everyone[begin : begin + context] for begin in range(0, len(everyone), context)]
        sums = [[sum(parts) for parts in zip(*share, strict=True)] for share in shares]
        rows = len(losses[0])
        return [
            loss
            for m in range(batches)
            for of_share in sums
            for loss in of_share[m * rows : (m + 1) * rows]
        ]

    def next_logits(self, batch: Mapping[str, Any]) -> Tensor:
        """Return logits after each sequence's last token, float32 [B, V], in evaluation mode. A
        batch with ``past_key_values`` and ``use_cache: True`` continues what that cache holds, and
        is taken into it.

        Raises:
            ValueError: stages of a pipeline hold the blocks.
        """
        require_all_blocks(self.plan)
        self.flush()
        if is_cpu(batch["input_ids"].device):  # a token that was just drawn is the model's
            require_ids(batch["input_ids"], self.spec.vocab_size)
        ids_BS = batch["input_ids"].to(self.device)
        inputs = {**batch, "input_ids": ids_BS, "labels": torch.full_like(ids_BS, -100)}
        self._forward.begin([inputs], [inputs["labels"].to("cpu")], NextLogits())
        program = self.program(StepKind.EVALUATE, Shape(*ids_BS.shape))
        self._executor.run(program, self._forward, self.timeline)
        assert self._forward.logits_BV is not None
        return self._forward.logits_BV

    generate = generation.generate

    evaluate_with_logits = kept_logits.evaluate_with_logits

    # ---- programs --------------------------------------------------------------------------------

    def costs(self, shape: Shape) -> Costs:
        """Return costs of each kind of unit while it computes, see
        :mod:`blockwalk.walk.unit_costs`: measured once, on no weights."""
        return self._programs.costs(shape)

    def program(
        self,
        step_kind: StepKind,
        shape: Shape,
        *,
        foresee: bool = False,
        batches: int = 1,
        pieces: tuple[Piece, ...] = (),
    ) -> Program:
        """Return the program of one kind of step, as the walker now stands: see
        :meth:`blockwalk.walk.programs.Programs.of`."""
        return self._programs.of(
            step_kind,
            shape,
            self.estimator.waiting(),
            foresee=foresee,
            batches=batches,
            pieces=pieces,
        )

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the trainables' masters, of optimizer states and of the step counter:
        all that a resumed run needs of the walker. Blocks that the ranks of a node hold together
        are gathered while rank 0 reads them: the others call :meth:`join_gathers`."""
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.live_state().items()}

    def live_state(self) -> dict[str, Any]:
        """Return the tensors that :meth:`state_dict` copies, themselves: for a writer that is done
        before the next step.

        Raises:
            FloatingPointError: first order: a value is not finite.
        """
        self.flush()
        self._require_finite()
        return {"steps_done": self.steps_done, **self.engine.state_dict()}

    def join_gathers(self) -> None:
        """Zeroth order: call this on every rank but 0 while rank 0 saves. It joins the gathers that
        assemble the sliced blocks."""
        if self.ranks.rank < self.ranks.slices:
            self.engine.trained.join_gathers()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. With a ledger that has gone further, so does the
        walker: ``steps_done`` is then the ledger's.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        steps = int(state["steps_done"])
        if self.ledger is not None and self.ledger.steps < steps:
            raise ValueError(
                f"{self.ledger.path} has {counted(self.ledger.steps, 'step')}, the saved state"
                f" {steps}: not of one run"
            )
        self._executor.settle()
        if self.ledger is None:
            self.estimator.resume(steps)
        self.estimator.load_state_dict(
            {key: value for key, value in state.items() if key != "steps_done"}
        )
        self.steps_done = steps if self.ledger is None else self.ledger.steps

    def load_with_ledger(self, state: Mapping[str, Any], saved: StrPath) -> None:
        """Zeroth order: take over what :meth:`state_dict` gave. The ledger that was saved beside it
        takes the place of this walker's.

        Raises:
            ValueError: it is another run's, or has not the steps of the saved state.
        """
        assert self.ledger is not None, "this walker keeps no ledger"
        path = self.ledger.path
        header = self.ledger.header
        self.drop_ledger()
        self.load_state_dict(state)
        first(lambda: atomic_files.write_bytes(path, Path(saved).read_bytes()))
        self.ledger = _shared_ledger(path, header)
        if self.ledger.steps != self.steps_done:
            raise ValueError(
                f"{saved} has {counted(self.ledger.steps, 'step')}, and the weights beside it"
                f" {self.steps_done}: not of one run"
            )
        self._keeps_ledger.take_up(self.ledger)

    def drop_ledger(self) -> None:
        """Zeroth order: keep no ledger from here on."""
        if self.ledger is not None:
            self.ledger.close()
        self.ledger = None

    def save_state(
        self, folder: StrPath, *, wait: bool = True, beside: Mapping[str, str] | None = None
    ) -> None:
        """First order: write a checkpoint that any mesh and method can go on from, each rank its
        own part. With ``wait`` False it is written behind the next steps; ``beside`` are further
        files of it, by name. See :class:`blockwalk.checkpoints.distributed.Saver`.

        Raises:
            FloatingPointError: a value is not finite.
            RuntimeError: ranks that hold copies of a master, a moment or a frozen parameter have
                different bits.
        """
        saver = self._state_saver()
        if not self._facts.ledger:
            self._require_alike()
        self._require_finite()
        saver.save(folder, self.steps_done, wait=wait, beside=beside)

    def wait_saved(self) -> None:
        """Wait until a checkpoint that is being written behind the steps is whole."""
        if self._saver is not None:
            self._saver.wait()

    def load_state(self, folder: StrPath) -> None:
        """First order: go on from what :meth:`save_state` wrote, on any mesh. A run that began when
        weight decay reached norms and biases too goes on so: :meth:`notes` says it."""
        self._executor.settle()
        self.steps_done = self._state_saver().load(folder)

    def notes(self) -> list[str]:
        """Return sentences on what a resumed run does otherwise than its plan says."""
        checkpointed = self.estimator.checkpointed
        return [] if checkpointed is None else checkpointed.notes()

    def _state_saver(self) -> Saver:
        checkpointed = self.estimator.checkpointed
        if checkpointed is None:
            raise ValueError(
                f"method {self.plan.method!r} is zeroth-order: its ledger is its checkpoint"
            )
        if self._saver is None:
            from blockwalk.checkpoints.distributed import Saver

            self._saver = Saver(checkpointed)
        return self._saver

    def _require_alike(self) -> None:
        """Raise RuntimeError, on every rank, where ranks hold different copies of a piece of state:
        replicas sum alike, so that copies have the same bits."""
        if self.ranks.world > 1:
            record = "its ledger" if self._facts.ledger else "its last checkpoint"
            self.ranks.compare_copies(self.steps_done, self.engine.sums_of_copies(), record)

    def _require_finite(self) -> None:
        """Raise FloatingPointError, on every rank, where a master or an optimizer state has a NaN
        or an infinity. A ledger has no entry whose losses are not finite."""
        if self._facts.ledger:
            return
        ends = {name: t.aminmax() for name, t in self.engine.state_dict().items() if t.numel()}
        infinite = [
            name.replace("\0", ".")
            for name, extremes in ends.items()
            if not all(map(math.isfinite, extremes))
        ]
        if any(count for (count,) in self.ranks.exchange([float(len(infinite))])):
            raise FloatingPointError(
                f"{', '.join(infinite[:3]) or 'a tensor of another rank'} is not finite after step"
                f" {self.steps_done}: an update overflowed, and nothing was saved. Go on from an"
                " earlier checkpoint with a lower optimizer.learning_rate"
            )

    def save_pretrained(self, folder: StrPath) -> None:
        """Write what was trained: an adapter in PEFT's format, or the whole model as safetensors.

        Raises:
            FloatingPointError: first order: a value is not finite.
            RuntimeError: first order: ranks that hold copies of a parameter have different bits.
        """
        self.flush()
        if not self._facts.ledger:
            self._require_alike()
        self._require_finite()
        if self.ranks.rank and self._facts.shares_forwards:
            self.join_gathers()
        else:
            self.engine.save_pretrained(Path(folder))

    def close(self) -> None:
        """Let go of threads, files and scratch; all ranks together."""
        with suppress(Exception):  # nobody will read what a failed one should have made
            self._executor.settle()
        if self._watch is not None and self._begins_watch:
            self._watch.close()
        self.lanes.close()
        if self._saver is not None:
            self._saver.close()
        self.engine.close()
        self.ranks.close()
        if self.ledger is not None:
            self.ledger.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Walker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self.plan.mesh.world == 1:
            # a rank that failed does not wait for others: its process ends, and their watch ends
            # them
            self.close()


def _shared_ledger(path: Path, header: Mapping[str, Any]) -> Ledger:
    """Return the run's ledger: rank 0's file, of which the others keep a copy in memory."""
    opened: list[Ledger] = []

    def open_ledger() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        ledger = Ledger(path, header)
        opened.append(ledger)
        return ledger.header, [asdict(entry) for entry in ledger.entries]

    of_rank_0, entries = first(open_ledger)
    return opened[0] if opened else Ledger(path, of_rank_0, entries=entries)

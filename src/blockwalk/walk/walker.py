"""The walker: a model and a plan, ready to train. It is the user's handle; programs are run by
:mod:`blockwalk.walk.executor`."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockwalk.checkpoints.ledger import Ledger, LedgerCopy, entry_of
from blockwalk.cutting.adapters import as_adapters
from blockwalk.cutting.batch_facts import BatchFacts, note
from blockwalk.data.batch import Batch, loss_tokens, micro_batches, require_ids, share
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.data.packing import cut_padding, pack_batch
from blockwalk.engine import frozen_codec
from blockwalk.engine.engine import Engine
from blockwalk.engine.model_handle import ModelHandle
from blockwalk.estimators.asked import Asked
from blockwalk.estimators.backprop import Backprop
from blockwalk.estimators.zeroth_order.estimator import ZerothOrder
from blockwalk.estimators.zeroth_order.ledger_header import header, run_of
from blockwalk.estimators.zeroth_order.mezo_original import MezoOriginal
from blockwalk.estimators.zeroth_order.objectives import as_objective
from blockwalk.numerics.device import chosen, is_cpu, sent
from blockwalk.plan.mesh import Piece
from blockwalk.plan.plan import Plan, refuse_dropout
from blockwalk.plan.schedules import schedule_of
from blockwalk.plan.words import counted
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, Pending
from blockwalk.program.program import Lane, Program, Shape, StepKind
from blockwalk.program.state_sizes import maps_graphs
from blockwalk.ranks.agreement import (
    facts_of,
    gather_json,
    model_digest,
    require_agreement,
    versions,
)
from blockwalk.ranks.elastic import Unfinished
from blockwalk.ranks.groups import started
from blockwalk.ranks.shared_forwards import SharedForwards, first, make_ranks
from blockwalk.ranks.watch import Watch, begin_watch
from blockwalk.system.paths import StrPath
from blockwalk.system.process_memory import page_cache
from blockwalk.walk import generation
from blockwalk.walk.executor import Executor, Timeline
from blockwalk.walk.lanes import Lanes

if TYPE_CHECKING:
    from peft import LoraConfig

    from blockwalk.checkpoints.distributed import Saver
    from blockwalk.plan.choices import Adapters
    from blockwalk.walk.unit_costs import UnitCosts


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
    grad_norm: float | None = None
    """The gradient's norm before clipping, where the plan clips."""
    projected_grad: float | None = None
    """The scalar g of a zeroth-order step."""


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
        ranks: zeroth order: those that share its steps, where they come and go
            (:mod:`blockwalk.ranks.elastic`).

    Raises:
        ValueError: the model cannot be walked, or does not fit the plan, or the ledger is another
            run's.

    >>> walker = Walker("Qwen2.5-0.5B", blockwalk.method("mebp"), lora={"rank": 8})  # doctest: +SKIP
    >>> walker.step(batch).loss                                                               # doctest: +SKIP
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
        ranks: SharedForwards | None = None,
    ) -> None:
        if objective is not None and not plan.zeroth_order:
            plan = replace(plan, loss="objective")
        lora = as_adapters(lora)
        adapters = lora is not None or hasattr(model, "peft_config")
        self.plan, reason = frozen_codec.chosen(plan, model, adapters=adapters)
        plan = self.plan
        if training:
            refuse_dropout(plan, lora)
        self._schedule = (
            schedule_of(plan.optimizer) if training else None
        )  # refused before the model is opened
        if adapters or not training:
            frozen_codec.say_codec(plan, model, reason)
        self.device = chosen(device)
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="blockwalk-") if workdir is None else None
        )
        folder = Path(self._temporary.name if self._temporary else os.fspath(workdir or ""))
        started(plan.mesh)
        self._begins_watch = plan.mesh.world > 1 and Watch.current is None
        self._watch = begin_watch(plan.mesh) if self._begins_watch else Watch.current
        self.ranks = ranks or make_ranks(plan, self.device)
        packs = folder
        if self.ranks.world > 1:
            node = self.ranks.rank // plan.mesh.ranks_per_node * plan.mesh.ranks_per_node
            packs = Path(
                gather_json(os.path.abspath(folder))[node]
            )  # the ranks of a node pack once
            folder = folder / f"rank-{self.ranks.rank}"
            digests = {"the model's weights": model_digest(model)}
            if isinstance(lora, str | os.PathLike):
                digests["the adapter's weights"] = model_digest(lora)
            require_agreement({**facts_of({"plan": plan.shared()}), **digests, **versions()})
        run = first(lambda: run_of(ledger))
        opened = ModelHandle(
            model,
            plan,
            lora=lora,
            device=self.device,
            workdir=folder,
            packs=packs,
            training=training,
        )
        self.engine = Engine(opened, run, self.ranks)
        if self.ranks.world > 1 and plan.zeroth_order:
            require_agreement({"the weights to go on with": str(self.engine.buckets.checksum)})
            self.ranks.durable = any(
                told for (told,) in self.ranks.exchange([plan.trainable.on_disk])
            )
        self.lanes = Lanes(self.device)
        self._reads_padding = objective is not None  # it may read any logits
        self.timeline: Timeline | None = None
        """Programs that ran, with the host seconds of their ops; None records none (see
        ``simulate.trace``)."""
        self._lora = lora or next(
            iter(getattr(self.engine.module, "peft_config", {}).values()), None
        )
        self._costs: UnitCosts | None = None
        self._page_cache = page_cache(folder) if plan.recompute == "auto" else 0
        self.steps_done = 0
        self._saver: Saver | None = None
        self.ledger: Ledger | None = None
        self.estimator: Backprop | ZerothOrder
        if plan.zeroth_order:
            function = None if objective is None else as_objective(objective)
            make = MezoOriginal if plan.zo.noise == "mezo" else ZerothOrder
            self.estimator = estimator = make(self.engine, function, self.ranks)
            if ledger is not None:
                self.ledger = self._open_ledger(Path(ledger), header(self.engine, lora, run))
                self.steps_done = estimator.take_up(self.ledger)
        elif ledger is not None:
            raise ValueError(
                f"method {plan.method!r} differentiates: a ledger belongs to zeroth order"
            )
        else:
            self.estimator = Backprop(self.engine, self.ranks, objective)

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

        Raises:
            ValueError: shapes that do not fit, a token that the model has no row for, a step
                without a single label, or other data than on another rank.
            FloatingPointError: the loss or a gradient is not finite; weights and optimizer states
                are as they were.
        """
        began = time.perf_counter()
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
        asked = Asked(self.steps_done + 1, learning_rate, training=True, seed=seed, words=words)
        program = self._run(StepKind.TRAIN, batch, asked)
        state = self.estimator.state
        assert state is not None
        self.steps_done += 1
        self.estimator.compare(self.steps_done, self.flush)
        if self._watch is not None:
            self._watch.end_step()
        return StepResult(
            step=self.steps_done,
            loss=state.loss,
            tokens=state.tokens,
            seconds=time.perf_counter() - began,
            learning_rate=learning_rate,
            bytes=program.bytes_by_lane(self.estimator.graph_bytes),
            grad_norm=state.grad_norm,
            projected_grad=state.projected_grad,
        )

    def follow(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Zeroth order: take over steps that another process made, lines of a ledger; the weights
        follow with the next walk."""
        assert isinstance(self.estimator, ZerothOrder)
        for line in lines:
            self.estimator.record(entry_of(line, self.steps_done + 1))
            self.steps_done += 1

    def flush(self) -> None:
        """Zeroth order: apply every update that waits, and write the weights back to their tier.
        Before the weights are looked at (evaluation, generation, saving) this happens by itself."""
        self._catch_up()
        self.engine.settle()

    def _catch_up(self) -> None:
        if self.estimator.waiting():
            self._execute(self.program(StepKind.FLUSH, Shape(1, 1)))

    def _open_ledger(self, path: Path, head: Mapping[str, Any]) -> Ledger:
        """Return the run's ledger: rank 0's file, of which the others keep a copy in memory."""
        opened: list[Ledger] = []

        def ask() -> tuple[dict[str, Any], list[dict[str, Any]]]:
            opened.append(Ledger(path, head))
            return opened[0].header, [asdict(entry) for entry in opened[0].entries]

        found, entries = first(ask)
        return opened[0] if opened else LedgerCopy(path, found, entries)

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradient of the mean loss, float32, by canonical parameter name; nothing is
        updated.

        Raises:
            ValueError: the method does not differentiate.
        """
        if self.plan.zeroth_order:
            raise ValueError(
                f"method {self.plan.method!r} is zeroth-order: it has no gradients; use plain or"
                " mebp"
            )
        self._run(StepKind.GRADIENTS, batch, Asked(self.steps_done + 1, training=True))
        return self.engine.gradients.take()

    def evaluate(self, batch: Batch, *, batches: int = 1) -> EvalResult:
        """Return the summed loss of a batch in evaluation mode, and the tokens that it is a sum
        over. Ranks call this with the same batch, each walks its share of the sequences, and all
        get the same answer: one process's, but for the rounding of products with fewer rows. Each
        visit of a block computes the batch in ``batches`` parts, so that its weights are fetched
        and decoded once for all of them.

        Raises:
            ValueError: on every rank: another rank has another batch, or cuts it into other parts.
        """
        return EvalResult(math.fsum(self._evaluated(batch, batches)), loss_tokens(batch))

    def label_losses(self, batch: Batch, *, batches: int = 1) -> Tensor:
        """Return the loss summed over the labels of each sequence, float64 [B] on the CPU, in
        evaluation mode: what label words are ranked by. Ranks share the sequences, and visits the
        parts, as in :meth:`evaluate`."""
        rows = len(batch["input_ids"])
        return torch.tensor(
            self._evaluated(batch, batches, by_row=True)[:rows], dtype=torch.float64
        )

    def _evaluated(self, batch: Batch, batches: int, *, by_row: bool = False) -> list[float]:
        """Return summed losses of the batch, in its order: of each sequence, or of each rank's
        share of each part where the model's own loss is asked for."""
        self.flush()
        self._run(
            StepKind.EVALUATE, batch, Asked(self.steps_done + 1, by_row=by_row), batches=batches
        )
        state = self.estimator.state
        assert state is not None
        own = [state.answers.row_losses[m].tolist() for m in range(batches)]
        of_ranks = self.ranks.exchange([loss for part in own for loss in part])
        each = len(own[0])
        return [
            loss
            for m in range(batches)
            for part in of_ranks
            for loss in part[m * each : (m + 1) * each]
        ]

    def next_logits(self, batch: Mapping[str, Any]) -> Tensor:
        """Return logits after each sequence's last token, float32 [B, V], in evaluation mode. A
        batch with ``past_key_values`` and ``use_cache: True`` continues what that cache holds, and
        is taken into it."""
        self.flush()
        if is_cpu(batch["input_ids"].device):  # a token that was just drawn is the model's
            require_ids(batch["input_ids"], self.spec.vocab_size)
        ids_BS = batch["input_ids"].to(self.device)
        whole = {**batch, "input_ids": ids_BS, "labels": torch.full_like(ids_BS, -100)}
        labels = [whole["labels"].to("cpu")]
        self.estimator.begin([whole], labels, Asked(self.steps_done + 1, next_token=True))
        self._execute(self.program(StepKind.EVALUATE, Shape(*ids_BS.shape)))
        state = self.estimator.state
        assert state is not None
        assert state.answers.logits_BV is not None
        return state.answers.logits_BV

    generate = generation.generate

    # ---- programs --------------------------------------------------------------------------------

    def costs(self, shape: Shape) -> Costs:
        """Return costs of each kind of unit while it computes, see
        :mod:`blockwalk.walk.unit_costs`: measured once, on no weights."""
        from blockwalk.walk.unit_costs import UnitCosts

        if self._costs is None:
            self._costs = UnitCosts(
                self.engine.cut.base.config,
                lora=self._lora,
                device=self.device.type,
                padded=True,
                cut=True,
            )
        return self._costs(self.plan, shape)

    def program(
        self,
        step_kind: StepKind,
        shape: Shape,
        *,
        foresee: bool = False,
        batches: int = 1,
        pieces: tuple[Piece, ...] = (),
    ) -> Program:
        """Return the program of one kind of step at the shape of one micro-batch (of which an
        evaluation has ``batches``), as the walker now stands; cached. ``pieces`` as
        :func:`blockwalk.program.compile.compile` takes them.

        ``foresee`` asks for the blocks' transients and FLOPs as well; a plan that spends its budget
        on kept graphs (``recompute: auto``) or on kept node slices (``cache.threshold``) always has
        them, for its ops depend on them."""
        graphs = self.plan.recompute == "auto" and not maps_graphs(self.plan, self.device.type)
        spends = self.plan.budget is not None and (graphs or self.plan.cache.threshold > 0)
        costs = self.costs(shape) if step_kind.trains and (foresee or spends) else Costs()
        pending = Pending()
        if self.plan.update.deferred:
            entries = self.estimator.waiting()
            pending = Pending(entries, flush=entries >= self.plan.update.flush_every)
        elif step_kind is StepKind.FLUSH:
            pending = Pending(1, flush=True)
        elif self.plan.sharded:
            pending = Pending(dirty=self.engine.dirty)
        given: dict[str, Any] = {
            "costs": costs,
            "pending": pending,
            "batches": batches,
            "pieces": pieces,
        }
        given |= {
            "coordinates": self.ranks.coordinates(self.ranks.rank),
            "page_cache": self._page_cache,
        }
        return compile(self.plan, self.spec, step_kind, shape, device=self.device.type, **given)

    def _run(self, step_kind: StepKind, batch: Batch, asked: Asked, *, batches: int = 1) -> Program:
        beside = {} if asked.words is None else {"targets": asked.words.targets_B}
        if not asked.training:
            beside["parts"] = torch.tensor([batches, asked.by_row])
        (whole,) = micro_batches(batch, 1)
        self.ranks.read({**batch, **beside})
        if self.plan.sharded or (self.ranks.world > 1 and not asked.training):
            self.ranks.begin(asked.step)
        count = self.plan.gradient_accumulation_steps if asked.training else batches
        shared = self.plan.sharded or not asked.training
        cuts = count * (self.ranks.world if shared else self.plan.mesh.data)
        rows = -(-len(whole["input_ids"]) // cuts)
        if asked.training and self.engine.cut.walks_documents(self.plan):
            whole = pack_batch(whole, cuts)
        if shared:
            parts = share(whole, count, self.ranks.world, self.ranks.rank)
            asked = replace(asked, tokens=loss_tokens(whole))
        else:
            parts = micro_batches(whole, cuts)
        # as foreseen, of rows that lie side by side as well
        shape = Shape(rows, -(-parts[0]["input_ids"].numel() // rows))
        pieces = (
            self.ranks.share(asked.step, self.plan.forward_passes, len(parts))
            if asked.training
            else ()
        )
        program = self.program(step_kind, shape, batches=batches, pieces=pieces)
        parts = [cut_padding(each, unmask=self.plan.loss_facts.by_chunks) for each in parts]
        for each in [whole] if shared else parts:  # all ranks refuse what one cannot walk
            require_ids(each["input_ids"], self.spec.vocab_size)
        labels = [each["labels"].to("cpu") for each in parts]
        self.estimator.begin([self._sent(each) for each in parts], labels, asked)
        try:
            self._execute(program)
        except BaseException as error:
            self.engine.undo()
            if isinstance(error, Unfinished):
                return self._run(step_kind, batch, asked)
            raise
        return program

    def _execute(self, program: Program) -> None:
        Executor(self.engine, self.lanes).run(program, self.estimator, self.timeline)

    def _sent(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a micro-batch on the device."""
        there = {key: sent(each, self.device) for key, each in batch.items()}
        if not is_cpu(self.device):
            facts = BatchFacts.of(batch)
            if facts is not None and self._reads_padding:
                facts = replace(facts, hides_unseen=False)
            note(there["input_ids"], facts)
        return there

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
        self.estimator.require_finite(self.steps_done)
        return {"steps_done": self.steps_done, **self.engine.state_dict()}

    def join_gathers(self) -> None:
        """Zeroth order: call this on every rank but 0 while rank 0 saves. It joins the gathers that
        assemble the sliced blocks."""
        if self.ranks.rank < self.ranks.slices:
            self.engine.buckets.join_gathers()

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
        if self.ledger is None:
            self.estimator.resume([], after=steps)
        self.engine.load_state_dict(
            {key: value for key, value in state.items() if key != "steps_done"}
        )
        self.steps_done = steps if self.ledger is None else self.ledger.steps

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
        self.estimator.require_alike(self.steps_done)
        self.estimator.require_finite(self.steps_done)
        saver.save(folder, self.steps_done, wait=wait, beside=beside)

    def wait_saved(self) -> None:
        """Wait until a checkpoint that is being written behind the steps is whole."""
        if self._saver is not None:
            self._saver.wait()

    def load_state(self, folder: StrPath) -> None:
        """First order: go on from what :meth:`save_state` wrote, on any mesh. A run that began when
        weight decay reached norms and biases too goes on so: :meth:`notes` says it."""
        self.steps_done = self._state_saver().load(folder)

    def notes(self) -> list[str]:
        """Return sentences on what a resumed run does otherwise than its plan says."""
        settings = self.plan.optimizer
        if (
            not self.engine.keeps_decay_of_all
            or settings.decay == "all"
            or not settings.weight_decay
        ):
            return []
        return [
            "weight decay reaches norms and biases too, as when this run began; a new run spares"
            " them (optimizer.decay)"
        ]

    def _state_saver(self) -> Saver:
        if self.plan.zeroth_order:
            raise ValueError(
                f"method {self.plan.method!r} is zeroth-order: its ledger is its checkpoint"
            )
        if self._saver is None:
            from blockwalk.checkpoints.distributed import Saver

            self._saver = Saver(self.engine)
        return self._saver

    def save_pretrained(self, folder: StrPath) -> None:
        """Write what was trained: an adapter in PEFT's format, or the whole model as safetensors.

        Raises:
            FloatingPointError: first order: a value is not finite.
            RuntimeError: first order: ranks that hold copies of a parameter have different bits.
        """
        self.flush()
        self.estimator.require_alike(self.steps_done)
        self.estimator.require_finite(self.steps_done)
        if self.ranks.rank and not self.plan.sharded:
            self.join_gathers()
        else:
            self.engine.save_pretrained(Path(folder))

    def close(self) -> None:
        """Let go of threads, files and scratch; all ranks together."""
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

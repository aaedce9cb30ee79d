"""A ``transformers.Trainer`` whose training step is a walk. Arguments, data sets, collators,
callbacks, schedulers, evaluation, checkpoints and hub uploads are transformers' own; weights,
gradients and the optimizer are the walker's.

The Trainer holds a handle in the place of the model: two parameters that are never used, so that
its optimizer and scheduler have something to count with, and nothing of it moves weights that the
walk streams. One stands for the parameters that weight decay reaches, the other for those that it
spares."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from blockwalk.data.batch import Batch
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.data.tokenizer import tokenizer_of
from blockwalk.integrations import trainer_objective, trainer_state
from blockwalk.integrations.trainer_batches import GlobalBatch, global_batch, in_rows, tensors_of
from blockwalk.integrations.trainer_callbacks import RATES, tell
from blockwalk.integrations.trainer_data import (
    NUMBERS,
    HeldOutNumbers,
    RowNumbers,
    TrainerData,
    numbered,
    numbers_of_all,
    pairs_of,
    read_data,
    referenced,
)
from blockwalk.integrations.trainer_table import PASSED, read_arguments, refuse_methods
from blockwalk.models.model_source import model_source
from blockwalk.numerics.device import is_cpu
from blockwalk.plan.methods import method
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import DataSettings
from blockwalk.plan.settings import override, unnamed_codec
from blockwalk.plan.update_rules import RULES
from blockwalk.system.paths import StrPath
from blockwalk.walk.walker import Walker

_IMPLEMENTATIONS = ("", "torch", "torch_fused")
"""Endings of TrainingArguments' names of update rules whose arithmetic is the plan's."""


class _Handle(nn.Module):
    """The model, as a Trainer sees it."""

    walker: Any
    config: Any

    def __init__(self, walker: Walker) -> None:
        super().__init__()
        self.__dict__["walker"] = walker  # no submodule: nothing of it is moved, cast or counted
        self.__dict__["config"] = walker.engine.module.config
        self.decayed = nn.Parameter(torch.zeros(()))
        self.spared = nn.Parameter(torch.zeros(()))

    def forward(self, **inputs: Tensor) -> dict[str, Any]:
        return {"loss": torch.tensor(self.walker.evaluate(tensors_of(inputs)).loss)}


class BlockwalkTrainer(Trainer):
    """A Trainer for models that do not fit in memory.

    Args:
        model: a model's folder, its name on the hub, a block store, or a model in memory.
        args: learning rate, scheduler, betas, weight decay, clipping, batch size, accumulation,
            seed and everything else but the device and the precision.
        plan: the method; see :func:`blockwalk.method`. ``mebp`` with adapters and ``plain``
            without, unless given; frozen weights are rounded only where half of the memory cannot
            hold them.
        lora: adapters; see :class:`blockwalk.Walker`.
        data: records by the settings of a run's ``data.*``, in place of data sets and collator:
            texts, conversations, classes with label words, a task, or pairs. A model in memory
            needs its tokenizer as ``processing_class`` beside it. Data sets with TRL's columns
            ``chosen`` and ``rejected`` are read as they are, and ``args`` may be a ``DPOConfig``.
        more: what ``transformers.Trainer`` takes besides.

    Raises:
        ValueError: arguments that the walk does not follow, by name.
    """

    def __init__(
        self,
        model: StrPath | nn.Module,
        args: TrainingArguments | None = None,
        *,
        plan: Plan | None = None,
        lora: Any = None,
        data: DataSettings | Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        args = copy.copy(args) if args is not None else TrainingArguments("runs/trainer")
        refuse_methods(type(self), BlockwalkTrainer)
        half = args.fp16
        judged = trainer_objective.is_judged(more.get("train_dataset"))
        of_objective = (trainer_objective.FOLLOWED, trainer_objective.MEANINGLESS)
        notes = read_arguments(args, *(of_objective if judged else ()))
        for name, value in more.items():
            if name not in PASSED and value is not None and value != (None, None):
                raise ValueError(
                    f"{name} needs the model in memory, which the walk never has; leave it out"
                )
        plan, more_notes = _plan(args, plan, "mebp" if lora is not None else "plain", half=half)
        if judged:
            plan = trainer_objective.with_objective(plan, args)
        trainer_objective.require_objective(plan)
        trainer_state.require_savable(args, plan)
        for note in (*notes, *more_notes):
            warnings.warn(note, stacklevel=2)
        # A step is one walk, cut by the plan.
        args.per_device_train_batch_size *= args.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1
        args.max_grad_norm = 0.0
        args.neftune_noise_alpha = None
        if is_cpu(args.device):
            args.dataloader_pin_memory = False  # torch would warn that there is no accelerator
        sets = None
        if data is not None or judged:
            sets, more["processing_class"] = _data_sets(model, args, plan, data, more)
        workdir = Path(str(args.output_dir)) / "scratch"
        walker = Walker(
            model,
            plan,
            lora=lora,
            workdir=workdir,
            device=args.device,
            ledger=trainer_state.begin_ledger(workdir, plan),
        )
        self.walker = walker
        if sets is not None:
            sets = referenced(sets, walker, args.per_device_eval_batch_size)
            more["train_dataset"] = sets.train
            more["eval_dataset"] = sets.held_out
            more["data_collator"] = numbered
        super().__init__(model=_Handle(walker), args=args, **more)

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns that the model takes: one that the walk does not follow is refused with
        its batch, by name."""
        if self._signature_columns is None:
            names = inspect.signature(self.walker.engine.cut.base.forward).parameters
            columns: Any = [*dict.fromkeys([*names, "label", "label_ids", *self.label_names])]
            self._signature_columns = columns

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Leave out what no model takes. A data set without tokens is refused by its columns."""
        names = dataset.column_names
        if self.args.remove_unused_columns and "input_ids" not in names:
            raise ValueError(
                f"the {description or 'data'} set has the columns {', '.join(names)}, and no"
                " input_ids: BlockwalkTrainer takes records as tokens; blockwalk.train and"
                " blockwalk train read messages, prompts and completions, and texts"
            )
        return super()._remove_unused_columns(dataset, description)

    @property
    def callback_handler(self) -> Any:
        """The callbacks, which are told through views: see :mod:`.trainer_callbacks`."""
        return self.__dict__["callback_handler"]

    @callback_handler.setter
    def callback_handler(self, handler: Any) -> None:
        handler.call_event = functools.partial(tell, self)
        self.__dict__["callback_handler"] = handler

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer that transformers' schedulers count with and callbacks change, with
        the groups of a Trainer's; the walker's rule does the work."""
        handle: Any = self.model
        rule = self.walker.plan.optimizer
        groups = [{"params": [handle.decayed, handle.spared], "weight_decay": rule.weight_decay}]
        if rule.decay == "matrices":
            groups = [
                {"params": [handle.decayed], "weight_decay": rule.weight_decay},
                {"params": [handle.spared], "weight_decay": 0.0},
            ]
        optimizer: torch.optim.Optimizer
        if rule.name == "adamw":
            rate = self.args.learning_rate
            optimizer = torch.optim.AdamW(groups, lr=rate, betas=rule.betas, eps=rule.eps)
        else:
            optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate)
        self.optimizer = optimizer
        return optimizer

    def _follow_optimizer(self) -> float:
        """Take the numbers of the parameter groups for the next step, and return its learning
        rate."""
        optimizer: Any = self.optimizer
        decayed = optimizer.param_groups[0]
        spared = optimizer.param_groups[-1]
        if not self.walker.plan.estimator.facts.ledger:
            self.walker.use_rule(_rule_of(decayed), _rule_of(spared), spared["lr"])
        return float(decayed["lr"])

    def training_step(
        self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """One walk over the batch, with the numbers that the scheduler and callbacks gave the
        optimizer. Answers the mean loss."""
        model.train()
        plan = self.walker.plan
        cuts = plan.gradient_accumulation_steps * plan.mesh.data
        batch: Batch | LabelWordBatch
        if isinstance(self.train_dataset, RowNumbers):
            numbers = numbers_of_all(inputs, self.args.world_size)
            batch = self.train_dataset.batch([*itertools.chain(*numbers)], cuts)
        else:
            group = plan.objective_facts.group
            batch = in_rows(global_batch(inputs, self.args.world_size).batch, cuts, group=group)
        trainer_state.keep_ledger(self.walker, Path(str(self.args.output_dir)))
        result = self.walker.step(batch, learning_rate=self._follow_optimizer())
        self.last_result = result
        return torch.tensor(result.loss, device=self.args.device)

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool = True,
        ignore_keys: Any = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the loss of a batch, [], in evaluation mode; and for metrics its logits [B, S, V]
        and labels [B, S]."""
        if NUMBERS in inputs:
            # Without candidates, as a held-out set of rows has none.
            batch = self._held_out_rows.batch(inputs[NUMBERS].tolist())
            inputs = cast(Batch, batch)
        rows = global_batch(inputs, self.args.world_size)
        mean_loss, logits_BSV = self._evaluated(rows, with_logits=not prediction_loss_only)
        loss = torch.tensor(mean_loss, device=self.args.device)
        return loss, logits_BSV, None if logits_BSV is None else rows.own["labels"]

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as transformers does; held-out candidates and answers of ``data`` are measured
        all at once."""
        dataset = getattr(dataloader, "dataset", None)
        if isinstance(dataset, RowNumbers):
            self._held_out_rows = dataset
        if not isinstance(dataset, HeldOutNumbers):
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )

        def tell_callbacks(_: int) -> None:
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )

        metrics = None if prediction_loss_only else self.compute_metrics
        figures, prediction = dataset.evaluate(self.walker, metrics, tell_callbacks)
        predictions: Any = None if prediction is None else prediction.predictions
        return EvalLoopOutput(
            predictions=predictions,
            label_ids=None if prediction is None else prediction.label_ids,
            metrics={f"{metric_key_prefix}_{name}": value for name, value in figures.items()},
            num_samples=len(dataset),
        )

    def _evaluated(self, rows: GlobalBatch, *, with_logits: bool) -> tuple[float, Tensor | None]:
        """Return the mean loss of this rank's rows, and their logits where they are asked for."""
        logits_BSV = None
        if with_logits:
            mean_loss, logits_BSV = self.walker.evaluate_with_logits(rows.batch)
            logits_BSV = logits_BSV[:, : rows.own["input_ids"].shape[1]]
        elif self.args.world_size == 1:
            mean_loss = self.walker.evaluate(rows.batch).loss
        if self.args.world_size > 1:
            losses_B = self.walker.label_losses(rows.batch)
            mean_loss = float(rows.mine(losses_B).sum()) / max(rows.own_tokens, 1)
        return mean_loss, logits_BSV

    def log(self, logs: dict[str, float], *more: Any) -> None:
        """Log as transformers does, with the step's gradient norm, what its objective answers and
        its bytes a lane."""
        result = getattr(self, "last_result", None)
        if "loss" in logs and result is not None:
            logs.pop("grad_norm", None)
            if result.grad_norm is not None:
                logs["grad_norm"] = result.grad_norm
            logs |= result.metrics
            logs |= {f"bytes_{lane}": nbytes for lane, nbytes in result.bytes.items()}
        super().log(logs, *more)

    def num_trainable(self) -> int:
        """Return parameters that are trained."""
        return int(self.walker.spec.numel(trainable=True))

    # ---- checkpoints -----------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write what was trained (an adapter in PEFT's format, or the model), the tokenizer and the
        arguments."""
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self.walker.save_pretrained(folder)
        if not self.args.should_save:
            return
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        # The best weights are loaded from it.
        if self.args.save_only_model and self.args.load_best_model_at_end:
            folder = Path(self._get_output_dir(trial=trial))
            trainer_state.save(self.walker, folder / f"checkpoint-{self.state.global_step}")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        trainer_state.save(self.walker, Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._load_state(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the rates that the schedule and callbacks had left. Checkpoints of a version with
        one parameter group give its numbers to both."""
        if checkpoint is not None:
            trainer_state.widen_groups(Path(checkpoint), self.optimizer, self.lr_scheduler)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        self._load_state(Path(str(self.state.best_model_checkpoint)))

    def _load_state(self, checkpoint: Path) -> None:
        trainer_state.load(self.walker, checkpoint)
        for note in self.walker.notes():
            warnings.warn(note, stacklevel=2)


def _data_sets(
    model: StrPath | nn.Module,
    args: TrainingArguments,
    plan: Plan,
    data: DataSettings | Mapping[str, Any] | None,
    more: Mapping[str, Any],
) -> tuple[TrainerData, Any]:
    """Return a Trainer's data sets and tokenizer for settings of data, or for data sets of pairs.

    Raises:
        ValueError: a data set or a collator is given as well, a model in memory has no tokenizer
            beside it, or the data cannot be read.
    """
    replaced = ["data_collator"]
    if data is not None:
        replaced += ["train_dataset", "eval_dataset"]
    for name in replaced:
        if more.get(name) is not None and data is None:
            raise ValueError(
                f"{name} is given, and pairs of chosen and rejected are collated by the walk; leave"
                " it out"
            )
        if more.get(name) is not None:
            raise ValueError(f"data and {name} are both given; leave one out")
    tokenizer = more.get("processing_class")
    if tokenizer is None:
        if isinstance(model, nn.Module):
            raise ValueError(
                "data holds texts, and a model in memory has no tokenizer: give it as"
                " processing_class"
            )
        settings = data if isinstance(data, DataSettings) else DataSettings()
        tokenizer = tokenizer_of(model_source(model), settings)
    eval_rows = args.per_device_eval_batch_size * args.world_size
    if data is not None:
        return read_data(data, tokenizer, plan, eval_rows), tokenizer
    length = getattr(args, "max_length", None)
    return pairs_of(more, tokenizer, plan, length, eval_rows), tokenizer


def _rule_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings of the update rule."""
    return {name: group[name] for name in RATES if name != "lr" and name in group}


def _rule(args: TrainingArguments, plan: Plan) -> tuple[str, list[str]]:
    """Return the name of the update rule, and notes: that of ``optim``, which is followed where a
    user has set it or the plan differentiates.

    Raises:
        ValueError: the walk has no such rule.
    """
    optimizer = str(getattr(args.optim, "value", args.optim))
    default = TrainingArguments.default_optim
    if optimizer == default and not plan.estimator.facts.walks_back:
        own_rule = plan.optimizer.name
        return own_rule, [
            f"optim is {optimizer}, its default; the rule is the plan's own, {own_rule}"
        ]
    rule, _, implementation = optimizer.partition("_")
    if rule not in RULES or implementation not in _IMPLEMENTATIONS:
        names = ", ".join(name for name, facts in RULES.items() if not facts.zeroth_order_only)
        raise ValueError(
            f"optim is {optimizer}; the walk has {names}, and each with _torch behind it"
        )
    return rule, []


def _clipping(args: TrainingArguments, plan: Plan) -> tuple[float, list[str]]:
    """Return the norm that gradients are clipped to, 0 for none, and notes.

    Raises:
        ValueError: a user has set one, and the plan has no gradient.
    """
    clipping = args.max_grad_norm
    has_default = clipping == TrainingArguments.max_grad_norm
    if clipping and not plan.estimator.facts.walks_back:
        if not has_default:
            raise ValueError(
                f"max_grad_norm is {clipping}, and method {plan.method!r} has no gradient to clip;"
                " set max_grad_norm: 0"
            )
        return 0.0, [
            f"max_grad_norm is {clipping}, its default, and zeroth order has no gradient: nothing"
            " is clipped"
        ]
    if has_default and plan.update.at_turn:
        return 0.0, [
            f"max_grad_norm is {clipping}, its default, and this plan updates blocks at their turn,"
            " before the gradient's norm is known: nothing is clipped. Take update.timing: step to"
            " clip"
        ]
    return clipping, []


def _plan(
    args: TrainingArguments, user_plan: Plan | None, name: str, *, half: bool
) -> tuple[Plan, list[str]]:
    """Return the user's plan, or the method of a name, with TrainingArguments' optimizer, seed and
    accumulation; beside it notes. ``half`` is fp16.

    Raises:
        ValueError: an argument that the walk does not follow.
    """
    plan = user_plan or method(name)
    notes = []
    rule, rule_notes = _rule(args, plan)
    notes += rule_notes
    if args.dataloader_drop_last and args.gradient_accumulation_steps > 1:
        raise ValueError(
            "dataloader_drop_last would leave out the rest of a step here, and of a micro-batch"
            " in a Trainer; set gradient_accumulation_steps: 1, or leave it out"
        )
    clipping, clipping_notes = _clipping(args, plan)
    notes += clipping_notes
    settings: dict[str, Any] = {
        "optimizer.name": rule,
        "optimizer.learning_rate": args.learning_rate,
        "optimizer.betas": (args.adam_beta1, args.adam_beta2),
        "optimizer.eps": args.adam_epsilon,
        "optimizer.weight_decay": args.weight_decay,
        "optimizer.max_grad_norm": clipping,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "neftune_noise_alpha": args.neftune_noise_alpha or 0.0,
        "seed": args.seed,
    }
    if plan.compute_dtype == "auto" and (args.bf16 or half):
        settings["compute_dtype"] = "bfloat16"
    if user_plan is not None:
        return override(plan, settings), notes
    return unnamed_codec(method(name, **settings)), notes

"""A ``transformers.Trainer`` whose training step is a walk. Arguments, data sets, collators, callbacks, schedulers, evaluation,
checkpoints and hub uploads are transformers' own; weights, gradients and the optimizer are the walker's.

The Trainer holds a handle in the place of the model: one parameter that is never used, so that its optimizer and scheduler have
something to count with, and nothing of it moves weights that the walk streams.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from blockwalk.data.batching import filled
from blockwalk.plan.methods import method
from blockwalk.plan.plan import Plan
from blockwalk.plan.settings import override
from blockwalk.plan.update_rules import RULES
from blockwalk.system.paths import StrPath
from blockwalk.walk.walker import Walker

STATE = "walker"
"""The folder of a checkpoint that holds the walker's state."""

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
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        found = self.walker.evaluate({"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels})
        return {"loss": torch.tensor(found.loss)}


class BlockwalkTrainer(Trainer):
    """A Trainer for models that do not fit in memory.

    Args:
        model: a model's folder, its name on the hub, a block store, or a model in memory.
        args: learning rate, scheduler, betas, weight decay, clipping, batch size, accumulation, seed and everything else but
            the device and the precision.
        plan: the method; see :func:`blockwalk.method`. ``mebp`` with adapters and ``plain`` without, unless given.
        lora: adapters; see :class:`blockwalk.Walker`.
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
        **more: Any,
    ) -> None:
        args = copy.copy(args) if args is not None else TrainingArguments("runs/trainer")
        plan = _plan(args, plan, "mebp" if lora is not None else "plain")
        args.per_device_train_batch_size *= args.gradient_accumulation_steps  # a step is one walk, cut by the plan
        args.gradient_accumulation_steps, args.max_grad_norm, args.neftune_noise_alpha = 1, 0.0, None
        for name in ("compute_metrics", "compute_loss_func", "optimizers", "model_init"):
            if more.get(name) is not None:
                raise ValueError(f"{name} needs the model in memory, which the walk never has; leave it out")
        walker = Walker(model, plan, lora=lora, workdir=Path(str(args.output_dir)) / "scratch", device=args.device)
        self.walker = walker
        super().__init__(model=_Handle(walker), args=args, **more)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer that transformers' schedulers count with; the walker's rule does the work."""
        handle: Any = self.model
        self.optimizer = torch.optim.SGD([handle.unused], lr=self.args.learning_rate)
        return self.optimizer

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One walk over the batch, at the scheduler's learning rate. Answers the mean loss."""
        model.train()
        result = self.walker.step(
            _batch(inputs, self.walker.plan.gradient_accumulation_steps), learning_rate=self._get_learning_rate()
        )
        self.last_result = result
        return torch.tensor(result.loss, device=self.args.device)

    def prediction_step(self, model: Any, inputs: Mapping[str, Any], *_: Any, **__: Any) -> tuple[Any, None, None]:
        """The loss of a batch, [], in evaluation mode."""
        return torch.tensor(self.walker.evaluate(_batch(inputs)).loss, device=self.args.device), None, None

    def log(self, logs: dict[str, float], *more: Any) -> None:
        """Log as transformers does, with the step's gradient norm where the plan clips, and its bytes a lane."""
        result = getattr(self, "last_result", None)
        if "loss" in logs and result is not None:
            logs.pop("grad_norm", None)
            if result.grad_norm is not None:
                logs["grad_norm"] = result.grad_norm
            logs |= {f"bytes_{lane}": nbytes for lane, nbytes in result.bytes.items()}
        super().log(logs, *more)

    def num_trainable(self) -> int:
        """Parameters that are trained."""
        return int(self.walker.spec.numel(trainable=True))

    # ---- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write what was trained (an adapter in PEFT's format, or the model), the tokenizer and the arguments."""
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        self.walker.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.walker.save_state(Path(output_dir) / STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.walker.load_state(Path(resume_from_checkpoint) / STATE)

    def _load_best_model(self) -> None:
        self.walker.load_state(Path(str(self.state.best_model_checkpoint)) / STATE)


def _batch(inputs: Mapping[str, Any], multiple: int = 1) -> dict[str, Tensor]:
    """The tensors of a collator's batch that a walk takes, :func:`filled` up to a multiple of so many rows."""
    if missing := {"input_ids", "labels"} - set(inputs):
        raise ValueError(
            f"the data collator gives no {', '.join(sorted(missing))}; for language modelling take"
            " DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    names = [name for name in ("input_ids", "attention_mask", "labels") if name in inputs]
    return filled({name: inputs[name] for name in names}, multiple)


def _plan(args: TrainingArguments, given: Plan | None, name: str) -> Plan:
    """The plan that is given, or the method of a name, with TrainingArguments' optimizer, seed and accumulation.

    Raises:
        ValueError: an argument that the walk does not follow.
    """
    plan = given or method(name)
    if plan.zeroth_order or plan.mesh.world > 1 or args.world_size > 1:
        raise ValueError(
            f"BlockwalkTrainer walks first-order methods on one rank, not {plan.method!r} on"
            f" {max(plan.mesh.world, args.world_size)}; blockwalk train has zeroth order and ranks"
        )
    rule, _, implementation = str(getattr(args.optim, "value", args.optim)).partition("_")
    if rule not in RULES or implementation not in _IMPLEMENTATIONS:
        known = [name for name, facts in RULES.items() if not facts.zeroth_order_only]
        raise ValueError(f"optim is {args.optim}; the walk has {', '.join(known)}, and each with _torch behind it")
    for setting in ("deepspeed", "fsdp", "torch_compile"):
        if getattr(args, setting, None):
            raise ValueError(f"{setting} is {getattr(args, setting)}; the walk does not follow it: leave it out")
    settings = {
        **({"compute_dtype": "bfloat16"} if plan.compute_dtype == "auto" and (args.bf16 or args.fp16) else {}),
        "optimizer.name": rule,
        "optimizer.learning_rate": args.learning_rate,
        "optimizer.betas": (args.adam_beta1, args.adam_beta2),
        "optimizer.eps": args.adam_epsilon,
        "optimizer.weight_decay": args.weight_decay,
        "optimizer.max_grad_norm": args.max_grad_norm,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "neftune_noise_alpha": args.neftune_noise_alpha or 0.0,
        "seed": args.seed,
    }
    return method(name, **settings) if given is None else override(given, settings)

"""The walker: a model and a plan, ready to train. The user's handle, and the executor of programs on this machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blockwalk.compile import Costs, compile
from blockwalk.engine import Engine
from blockwalk.estimators.backprop import Backprop
from blockwalk.lanes import Lanes, Mark
from blockwalk.plan import Plan
from blockwalk.program import Lane, OpKind, Program, Shape, StepKind
from blockwalk.schedules import make_schedule

if TYPE_CHECKING:
    from blockwalk.config import LoraSettings

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did."""

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
    """Before clipping, where the plan clips."""
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
    """Trains a model under a plan, one block at a time.

    Args:
        model: a checkpoint folder, a block store, or a ``transformers`` causal model in memory. Given a path, the weights
            are never all in memory unless the plan says so.
        plan: see :func:`blockwalk.method`.
        lora: train these adapters (settings, or the folder of a saved adapter) instead of the model's own parameters.
        device: ``cpu`` or ``cuda``; CUDA where there is one unless given.
        workdir: scratch files and packed stores go here, and stay; a temporary folder unless given.

    Raises:
        ValueError: the model cannot be walked, or does not fit the plan.

    >>> walker = Walker("Qwen2.5-0.5B", blockwalk.method("mebp"), lora=LoraSettings(rank=8))  # doctest: +SKIP
    >>> walker.step(batch).loss                                                               # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        plan: Plan,
        *,
        lora: LoraSettings | str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        workdir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.plan = plan
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._temporary = tempfile.TemporaryDirectory(prefix="blockwalk-") if workdir is None else None
        folder = Path(self._temporary.name if self._temporary else os.fspath(workdir or ""))
        self.engine = Engine(model, plan, lora=lora, device=self.device, workdir=folder)
        self.lanes = Lanes(self.device)
        self.estimator = Backprop(self.engine)
        self.costs = Costs()
        self.steps_done = 0
        options = plan.optimizer
        self._schedule = make_schedule(
            options.schedule, options.learning_rate, options.warmup_steps, options.total_steps, options.min_ratio
        )

    @property
    def spec(self) -> Any:
        """The model as the walk sees it: a :class:`~blockwalk.state.ModelSpec`."""
        return self.engine.spec

    # ---- training ---------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step on a whole batch, cut into ``plan.gradient_accumulation_steps`` micro-batches.

        Args:
            batch: ``input_ids``, ``labels`` and optionally ``attention_mask``, each int64 [B, S]; labels are not shifted,
                and −100 is ignored.

        Raises:
            ValueError: shapes that do not fit, or a step without a single label.
            FloatingPointError: the loss is not finite; the weights are as they were where updates wait for the step's end.
        """
        began = time.perf_counter()
        learning_rate = self._schedule(self.steps_done)
        self.engine.module.train()
        program = self._run(StepKind.TRAIN, batch, learning_rate)
        state = self.estimator.state
        assert state is not None
        self.steps_done += 1
        return StepResult(
            step=self.steps_done,
            loss=state.loss_sum / state.tokens,
            tokens=state.tokens,
            seconds=time.perf_counter() - began,
            learning_rate=learning_rate,
            bytes=program.bytes_by_lane(),
            grad_norm=state.grad_norm,
        )

    def gradients(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The gradient of the mean loss, float32, by canonical parameter name; nothing is updated."""
        self.engine.module.train()
        self._run(StepKind.GRADIENTS, batch, 0.0)
        gradients = dict(self.engine.gradients)
        self.engine.gradients.clear()
        return gradients

    def evaluate(self, batch: Batch) -> EvalResult:
        """The summed loss of a batch in evaluation mode, and the tokens that it is a sum over."""
        self.engine.module.eval()
        self._run(StepKind.EVALUATE, batch, 0.0)
        state = self.estimator.state
        assert state is not None
        return EvalResult(state.loss_sum, state.tokens)

    # ---- the executor -----------------------------------------------------------------------------------------------

    def program(self, step_kind: StepKind, shape: Shape) -> Program:
        """The program of one kind of step at the shape of one micro-batch; cached."""
        return compile(self.plan, self.spec, step_kind, shape, costs=self.costs, device=self.device.type)

    def _run(self, step_kind: StepKind, batch: Batch, learning_rate: float) -> Program:
        training = step_kind in (StepKind.TRAIN, StepKind.GRADIENTS)
        batches = self._micro_batches(batch, self.plan.gradient_accumulation_steps if training else 1)
        program = self.program(step_kind, Shape(*batches[0]["input_ids"].shape))
        self.estimator.begin(batches, step=self.steps_done + 1, learning_rate=learning_rate, training=training)
        self._execute(program)
        return program

    def _execute(self, program: Program) -> list[Mark]:
        """Run a program's ops, each on its lane, in the program's order."""
        movers = {OpKind.FETCH: self.engine.fetch, OpKind.EVICT: self.engine.evict, OpKind.STORE: self.engine.store}
        marks: list[Mark] = []
        try:
            for op in program.ops:
                work = movers.get(op.kind, self.estimator.prepare)(op)
                marks.append(self.lanes.submit(op.lane, work, (marks[dep] for dep in op.deps)))
        finally:
            self.lanes.drain(marks)
        return marks

    def _micro_batches(self, batch: Batch, count: int) -> list[dict[str, torch.Tensor]]:
        """The batch on the device, cut into ``count`` equal parts."""
        if "input_ids" not in batch or "labels" not in batch:
            raise ValueError(f"a batch needs input_ids and labels; this one has {', '.join(batch) or 'nothing'}")
        shape = batch["input_ids"].shape
        if len(shape) != 2 or any(value.shape != shape for value in batch.values()):
            shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
            raise ValueError(f"every tensor of a batch must be [batch, sequence] of one shape; got {shapes}")
        if shape[0] % count:
            raise ValueError(
                f"the batch has {shape[0]} sequences, which gradient_accumulation_steps={count} does not divide"
            )
        moved = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
        parts = {key: value.chunk(count) for key, value in moved.items()}
        return [{key: parts[key][m] for key in parts} for m in range(count)]

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Trainables' masters, optimizer states and the step counter: all that a resumed run needs of the walker."""
        return {"steps_done": self.steps_done, **self.engine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        self.engine.load_state_dict({key: value for key, value in state.items() if key != "steps_done"})
        self.steps_done = int(state["steps_done"])

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write what was trained: an adapter in PEFT's format, or the whole model as safetensors."""
        self.engine.save_pretrained(Path(folder))

    def close(self) -> None:
        """Let go of threads, files and scratch."""
        self.lanes.close()
        self.engine.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Walker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

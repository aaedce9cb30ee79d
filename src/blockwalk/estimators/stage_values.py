"""Hidden states and their gradients on their way from stage to stage: the ops SEND and RECV.

B batch, S sequence, D hidden."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from blockwalk.data.batch import Batch
from blockwalk.engine.engine import Engine
from blockwalk.engine.home import Job
from blockwalk.plan.placement import StateKind
from blockwalk.program.program import Op
from blockwalk.ranks.stages import Stages

Received = dict[tuple[StateKind, int, int], Tensor]
"""Values by kind, the unit that made them, and micro-batch."""


def send(engine: Engine, op: Op, value_BSD: Tensor, batch: Batch) -> Job:
    """Return the work of a SEND.

    Raises:
        ValueError: a block's answer has another form than the stages have agreed on.
    """
    expected = (_shape(engine, batch), engine.compute_dtype)
    if (tuple(value_BSD.shape), value_BSD.dtype) != expected:
        raise ValueError(
            f"{engine.spec.units[op.unit].name} answers {tuple(value_BSD.shape)} in"
            f" {value_BSD.dtype}, and stages hand on hidden states {expected[0]} in {expected[1]}:"
            " set mesh.pipeline: 1"
        )
    return partial(_stages(engine).send, value_BSD, op.lane)


def receive(engine: Engine, op: Op, batch: Batch, received: Received) -> Job:
    """Return the work of a RECV, which fills what is among ``received`` from now on."""
    assert op.part is not None
    value_BSD = torch.empty(_shape(engine, batch), dtype=engine.compute_dtype, device=engine.device)
    received[op.part, op.unit, op.micro_batch] = value_BSD
    return partial(_stages(engine).receive, value_BSD, op.lane)


def _shape(engine: Engine, batch: Batch) -> tuple[int, ...]:
    return (*batch["input_ids"].shape, engine.spec.hidden_size)


def _stages(engine: Engine) -> Stages:
    assert engine.groups is not None
    assert engine.groups.stages is not None
    return engine.groups.stages

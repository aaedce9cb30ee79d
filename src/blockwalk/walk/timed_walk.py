"""A few steps of a shallow instance of a model, each op timed: the process of
:mod:`blockwalk.walk.timed_units`.

``python -m blockwalk.walk.timed_walk FILE`` reads a request and prints a line of JSON."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from blockwalk.cutting.shrink import shallow
from blockwalk.cutting.skeleton import build_skeleton, model_class
from blockwalk.engine.frozen_codec import already_said
from blockwalk.numerics.codecs.layout import dtype_of
from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.losses import IGNORE
from blockwalk.program.costs import TimedOp
from blockwalk.program.program import COMPUTES, OpKind
from blockwalk.system.process_memory import free_memory
from blockwalk.walk.timed_units import Request
from blockwalk.walk.walker import Walker

LEAST_STEPS = 3
LEAST_SECONDS = 2.0
MOST_SECONDS = 15.0
"""Steps are timed until there are so many and they have taken so long, or, one at least, until they
have taken the most."""
BYTES_OF_A_WEIGHT = 20
"""Bytes that a step may hold for a parameter: itself and its file, copy, gradient and moments."""


def _walk(request: Request, folder: Path) -> dict[TimedOp, float]:
    """Return the seconds of each kind of op, timed in this process; files go to ``folder``."""
    plan = request.plan
    # Ranks time their own work at the same time, each without the others.
    alone = plan if plan.mesh.world == 1 else replace(plan, mesh=MeshSettings())
    _make(request, folder / "model")
    adapters = _adapters(request.adapters)
    with (
        already_said(),
        Walker(folder / "model", alone, lora=adapters, workdir=folder / "work") as walker,
    ):
        if missing := request.kinds - {unit.kind for unit in walker.spec.units}:
            raise ValueError(f"a shallow instance has no {', '.join(sorted(missing))}")
        steps = list(_steps(walker, request))
    # A rank updates slices, and here there are none.
    sliced = plan.mesh.world > 1
    return {
        key: median(step[key] for step in steps if key in step)
        for key in steps[-1]
        if not (sliced and key[0] is OpKind.UPDATE)
    }


def _make(request: Request, folder: Path) -> None:
    """Write a shallow instance with drawn weights, of which a few are repeated."""
    from safetensors.torch import save_file

    config = shallow(request.config)
    dtype = dtype_of(request.stored)
    skeleton = build_skeleton(config, dtype, model_class(config))
    weights = sum(param.numel() for param in skeleton.parameters())
    if BYTES_OF_A_WEIGHT * weights > free_memory():
        raise ValueError(f"a shallow instance has {weights} parameters, too many for the memory")
    drawn = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    drawn = drawn.to(dtype)

    def values(param: torch.Tensor) -> torch.Tensor:
        if param.dim() == 1:
            return torch.ones(param.shape, dtype=dtype)
        repeats = -(-param.numel() // drawn.numel())
        return drawn.repeat(repeats)[: param.numel()].view(param.shape)

    folder.mkdir()
    config.save_pretrained(folder)
    tensors = {name: values(param) for name, param in skeleton.named_parameters()}
    save_file(tensors, folder / "model.safetensors")


def _adapters(adapters: Any) -> Any:
    """Return adapters to be made anew: of saved ones those that their configuration describes."""
    if not isinstance(adapters, str | os.PathLike):
        return adapters
    from peft import PeftConfig

    return PeftConfig.from_pretrained(os.fspath(adapters))


def _steps(walker: Walker, request: Request) -> Iterator[dict[TimedOp, float]]:
    """Take steps, and yield the seconds of each kind of op in one: of all but the first, which
    finds nothing as a long run does."""
    plan = walker.plan
    shape = request.shape
    rows = shape.batch * plan.cuts
    ids = torch.randint(3, walker.spec.vocab_size, (rows, shape.sequence))
    labels = ids.clone()
    labels[:, : round((1 - request.learnt) * shape.sequence)] = IGNORE
    batch = {"input_ids": ids, "labels": labels}
    walker.step(batch)
    began = time.perf_counter()
    steps = 0
    seconds = 0.0
    while steps == 0 or (
        seconds < MOST_SECONDS and (steps < LEAST_STEPS or seconds < LEAST_SECONDS)
    ):
        walker.timeline = []
        walker.step(batch)
        by_kind = defaultdict[TimedOp, list[float]](list)
        for _, ops in walker.timeline:
            for op, start, end in ops:
                if op.kind in COMPUTES or op.kind is OpKind.UPDATE:
                    kind = walker.spec.units[op.unit].kind
                    by_kind[op.kind, kind, op.keep_graph].append(end - start)
        yield {key: fmean(times) for key, times in by_kind.items()}
        steps += 1
        seconds = time.perf_counter() - began


if __name__ == "__main__":
    request_file = Path(sys.argv[1])
    timed = _walk(pickle.loads(request_file.read_bytes()), request_file.parent)
    print(json.dumps(list(timed.items())))

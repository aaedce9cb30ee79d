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
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from blockwalk.cutting.shrink import shallow
from blockwalk.cutting.skeleton import build_skeleton, model_class
from blockwalk.engine.frozen_codec import already_said
from blockwalk.numerics.codecs.layout import dtype_of
from blockwalk.plan.choices import MeshSettings
from blockwalk.plan.losses import IGNORE
from blockwalk.plan.sizes import spans
from blockwalk.program.costs import TimedOp
from blockwalk.program.program import COMPUTES, OpKind
from blockwalk.system import row_modules
from blockwalk.system.process_memory import free_memory
from blockwalk.tiers.model_folder import safetensors
from blockwalk.walk.timed_units import Request, TimedStep
from blockwalk.walk.walker import Walker

LEAST_STEPS = 3
LEAST_SECONDS = 2.0
MOST_SECONDS = 15.0
"""Steps are timed until there are so many and they have taken so long, or, one at least, until they
have taken the most."""
BYTES_OF_A_WEIGHT = 20
"""Bytes that a step may hold for a parameter: itself and its file, copy, gradient and moments."""


def _walk(request: Request, folder: Path) -> list[TimedStep]:
    """Return the steps with the seconds of each kind of op, timed in this process; files go to
    ``folder``."""
    torch.set_num_threads(request.threads)
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
        # A rank updates slices, and here there are none.
        timed = (*COMPUTES, OpKind.UPDATE) if plan.mesh.world == 1 else COMPUTES
        return list(_steps(walker, request, timed))


def _make(request: Request, folder: Path) -> None:
    """Write a shallow instance with drawn weights, of which a few are repeated."""
    config = shallow(request.config)
    dtype = dtype_of(request.stored)
    skeleton = build_skeleton(config, dtype, model_class(config))
    weights = sum(param.numel() for param in skeleton.parameters())
    if BYTES_OF_A_WEIGHT * weights > free_memory():
        raise ValueError(f"a shallow instance has {weights} parameters, too many for the memory")
    drawn = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    drawn = drawn.to(dtype)

    entries = {
        name: safetensors.Entry(tuple(param.shape), dtype)
        for name, param in skeleton.named_parameters()
    }

    def values(name: str) -> Iterator[torch.Tensor]:
        shape = entries[name].shape
        if len(shape) == 1:
            yield torch.ones(shape, dtype=dtype)
            return
        for start, stop in spans(0, prod(shape), len(drawn)):
            yield drawn[: stop - start]

    folder.mkdir()
    config.save_pretrained(folder)
    safetensors.write_shards(folder, entries, values)


def _adapters(adapters: Any) -> Any:
    """Return adapters to be made anew: of saved ones those that their configuration describes."""
    if not isinstance(adapters, str | os.PathLike):
        return adapters
    from peft import PeftConfig

    return PeftConfig.from_pretrained(os.fspath(adapters))


def labels_of(ids_BS: torch.Tensor, learnt: float) -> torch.Tensor:
    """Return labels [B, S] of tokens, of which the last are learnt: so large a share of them, and
    one of each row at the least."""
    length = ids_BS.shape[1]
    labels_BS = ids_BS.clone()
    labels_BS[:, : length - max(round(learnt * length), 1)] = IGNORE
    return labels_BS


def _steps(walker: Walker, request: Request, timed: Collection[OpKind]) -> Iterator[TimedStep]:
    """Take steps, and yield the seconds of each kind of op in one: of all but the first, which
    finds nothing as a long run does."""
    plan = walker.plan
    shape = request.shape
    rows = shape.batch * plan.cuts
    ids = torch.randint(3, walker.spec.vocab_size, (rows, shape.sequence))
    batch = {"input_ids": ids, "labels": labels_of(ids, request.learnt)}
    walker.step(batch)
    began = time.monotonic()
    steps = 0
    seconds = 0.0
    while steps == 0 or (
        seconds < MOST_SECONDS and (steps < LEAST_STEPS or seconds < LEAST_SECONDS)
    ):
        walker.timeline = []
        start = time.monotonic()
        walker.step(batch)
        end = time.monotonic()
        by_kind = defaultdict[TimedOp, list[float]](list)
        for _, ops in walker.timeline:
            for op, op_start, op_end in ops:
                if op.kind in timed:
                    kind = walker.spec.units[op.unit].kind
                    by_kind[op.kind, kind, op.keep_graph].append(op_end - op_start)
        means = tuple((key, fmean(times)) for key, times in by_kind.items())
        yield TimedStep(start, end, means)
        steps += 1
        seconds = end - began


if __name__ == "__main__":
    request_file = Path(sys.argv[1])
    modules, request = pickle.loads(request_file.read_bytes())
    row_modules.load_all(modules)  # before the plan, which may name their rows, is read
    steps = _walk(pickle.loads(request), request_file.parent)
    print(json.dumps([asdict(step) for step in steps]))

"""Measurement of the host of an accelerator: how long it takes to start an operation, and for a
turn of a unit beside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from blockwalk.doctor import walks
from blockwalk.numerics.device import wait_for
from blockwalk.program.program import Shape, StepKind
from blockwalk.simulate.hardware import load
from blockwalk.simulate.seconds import CostModel, is_started

if TYPE_CHECKING:
    from blockwalk.walk.walker import Walker

NARROW: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 256}
"""A model so narrow that a device has next to nothing to do for it."""
LAYERS = 12
WALKS: dict[str, tuple[bool, dict[str, Any]]] = {
    "mezo": (False, {}),
    "mebp": (True, {"frozen": "device × raw", "activation": "device"}),
}
"""Methods, whether adapters are trained, and settings: many turns to an operation, and few."""
SHAPE = Shape(1, 8)
STEPS = 5


class HostStep(NamedTuple):
    """A step that waits for the host alone."""

    starts: int
    """Operations that the host starts."""
    turns: int
    """Ops of the compute lane, and updates."""
    seconds: float


def host_seconds(device: torch.device, layers: int = LAYERS) -> tuple[float, float]:
    """Return the host's seconds for an operation that it starts, and for a turn, on an accelerator.

    They are those that explain the steps of two walks over a model of so many layers, without work
    for the device, as a forecast counts operations and turns."""
    with TemporaryDirectory() as folder:
        return explained([_step(name, device, Path(folder), layers) for name in WALKS])


def explained(steps: Sequence[HostStep]) -> tuple[float, float]:
    """Return the seconds a start and a turn that explain two steps: both as they are where both are
    positive, else the one alone that comes nearest."""
    one, other = steps
    determinant = one.starts * other.turns - other.starts * one.turns
    if determinant:
        start = (one.seconds * other.turns - other.seconds * one.turns) / determinant
        turn = (one.starts * other.seconds - other.starts * one.seconds) / determinant
        if min(start, turn) >= 0:
            return start, turn
    starts = _slope([(step.starts, step.seconds) for step in steps])
    turns = _slope([(step.turns, step.seconds) for step in steps])
    missed = [
        sum((step.seconds - start * step.starts - turn * step.turns) ** 2 for step in steps)
        for start, turn in ((starts, 0.0), (0.0, turns))
    ]
    return (starts, 0.0) if missed[0] <= missed[1] else (0.0, turns)


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of the line through the origin that is nearest to some points."""
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)


def _step(name: str, device: torch.device, folder: Path, layers: int) -> HostStep:
    """Return the middle one of a few steps of a walk."""
    with _opened(name, device, folder / name, layers) as walker:
        ids = torch.randint(3, walker.spec.vocab_size, (SHAPE.batch, SHAPE.sequence))
        batch = {"input_ids": ids, "labels": ids.clone()}
        seconds = []
        for _ in range(STEPS + 2):
            wait_for(device)
            began = time.perf_counter()
            walker.step(batch)
            wait_for(device)
            seconds.append(time.perf_counter() - began)
        program = walker.program(StepKind.TRAIN, SHAPE, foresee=True)
        costs = CostModel(walker.plan, walker.spec, load("h200"), walker.costs(SHAPE), program)
        started = [op for op in program.ops if is_started(op)]
        return HostStep(sum(map(costs.starts, started)), len(started), median(seconds[2:]))


@contextmanager
def _opened(name: str, device: torch.device, folder: Path, layers: int) -> Iterator[Walker]:
    from blockwalk.engine.frozen_codec import already_said
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.methods import method
    from blockwalk.walk.walker import Walker

    adapters, settings = WALKS[name]
    walks.make({**NARROW, "num_hidden_layers": layers}, folder)
    with (
        already_said(),
        Walker(
            folder,
            method(name, **settings),
            lora=LoraSettings(rank=4) if adapters else None,
            device=device,
            workdir=folder / "work",
        ) as walker,
    ):
        yield walker

"""A block of each kind while it computes, on this machine's clock: seconds of each kind of op.

A shallow instance of a model (its true widths, few layers, drawn weights) takes a few steps of a
plan in a process of its own (:mod:`blockwalk.walk.timed_walk`)."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from blockwalk.plan.parsing import from_plain
from blockwalk.plan.plan import Plan
from blockwalk.program.costs import TimedOp
from blockwalk.program.program import Shape
from blockwalk.ranks.launch import OF_A_RANK
from blockwalk.system import row_modules
from blockwalk.system.child_python import SAFE_PATH, python_command
from blockwalk.system.load import LEAST, OtherLoad, of_other_ranks

log = logging.getLogger(__name__)

Timed = tuple[tuple[TimedOp, float], ...]

LIMIT = 90.0
"""Seconds after which a process is given up."""

BEGINS = (
    "timing a few steps of a shallow %s at %d × %d for the forecast, once: mostly about 10 s,"
    f" {LIMIT:.0f} at most, in a second process that needs about as much memory as the run"
)
"""Told before: the type of the model, the sequences of a micro-batch and their tokens."""


@dataclass(frozen=True)
class Request:
    """A walk that is to be timed."""

    config: Any
    """The model's ``transformers`` configuration."""
    stored: str
    """The name of the dtype that its weights are stored in."""
    kinds: frozenset[str]
    """The kinds of its units."""
    adapters: Any
    """The adapters that are trained, or the folder of saved ones; None: the model's own
    parameters."""
    plan: Plan
    shape: Shape
    learnt: float
    """The part of the tokens that have a label."""
    threads: int
    """Threads that compute."""


@dataclass(frozen=True)
class TimedStep:
    """One step of the walk."""

    start: float
    """Seconds of :func:`time.monotonic`."""
    end: float
    ops: Timed


def measure(request: Request) -> Timed:
    """Return the seconds of each kind of op, timed in a process of its own: the middle ones of the
    steps beside which nothing else computed.

    Raises:
        ValueError: the model's shallow instance cannot be walked, lacks a kind of unit, or is too
            large for this machine; another process cannot have its configuration; or others
            computed (:mod:`blockwalk.system.load`), all the time or in every step.
    """
    try:
        sent = pickle.dumps((row_modules.files(), pickle.dumps(request)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"another process cannot have the model's configuration: {error}"
        ) from None
    with OtherLoad(beside=of_other_ranks(request.threads)) as load:
        time.sleep(LEAST)
        if busy := load.busy():
            raise ValueError(busy)
        log.warning(BEGINS, request.config.model_type, request.shape.batch, request.shape.sequence)
        steps = _walked(sent, load)
        reasons = [load.busy(step.start, step.end) for step in steps]
    quiet = [dict(step.ops) for step, busy in zip(steps, reasons, strict=True) if not busy]
    if not quiet:
        raise ValueError(f"{reasons[-1]} in each step that was timed")
    return tuple((key, median(step[key] for step in quiet if key in step)) for key in quiet[-1])


def _walked(request: bytes, load: OtherLoad) -> tuple[TimedStep, ...]:
    """Return the steps that a process of its own took."""
    variables = {name: fact for name, fact in os.environ.items() if name not in OF_A_RANK}
    environment = {**variables, **SAFE_PATH}
    with tempfile.TemporaryDirectory(prefix="blockwalk-timed-") as folder:
        file = Path(folder) / "request"
        file.write_bytes(request)
        command = python_command("-W", "ignore", "-m", "blockwalk.walk.timed_walk", str(file))
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            load.belongs(process.pid)
            try:
                printed, errors = process.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                raise ValueError(f"a step of a shallow instance takes over {LIMIT:.0f} s") from None
            finally:
                process.kill()
    if process.returncode:
        lines = errors.strip().splitlines()
        raise ValueError(lines[-1] if lines else "its process was ended")
    steps: tuple[TimedStep, ...]
    steps = from_plain(tuple[TimedStep, ...], json.loads(printed.splitlines()[-1]))
    return steps

"""A block of each kind while it computes, on this machine's clock: seconds of each kind of op.

A shallow instance of a model (its true widths, few layers, drawn weights) takes a few steps of a
plan in a process of its own (:mod:`blockwalk.walk.timed_walk`)."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.plan.plan import Plan
from blockwalk.program.costs import TimedOp
from blockwalk.program.program import OpKind, Shape
from blockwalk.ranks.launch import OF_A_RANK

Timed = tuple[tuple[TimedOp, float], ...]

LIMIT = 90.0
"""Seconds after which a process is given up."""

BEGINS = (
    "timing a few steps of a shallow %s at %d × %d for the forecast, once: mostly about 10 s,"
    f" {LIMIT:.0f} at most"
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


def measure(request: Request) -> Timed:
    """Return the seconds of each kind of op, timed in a process of its own.

    Raises:
        ValueError: the model's shallow instance cannot be walked, lacks a kind of unit, or is too
            large for this machine; or another process cannot have its configuration.
    """
    try:
        sent = pickle.dumps(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"another process cannot have the model's configuration: {error}"
        ) from None
    with tempfile.TemporaryDirectory(prefix="blockwalk-timed-") as folder:
        file = Path(folder) / "request"
        file.write_bytes(sent)
        command = [sys.executable, "-W", "ignore", "-m", "blockwalk.walk.timed_walk", str(file)]
        environment = {name: fact for name, fact in os.environ.items() if name not in OF_A_RANK}
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=LIMIT, check=True
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"a step of a shallow instance takes over {LIMIT:.0f} s") from None
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines()
            raise ValueError(lines[-1] if lines else "its process was ended") from None
    seconds = json.loads(process.stdout.splitlines()[-1])
    return tuple(((OpKind(kind), unit, kept), time) for (kind, unit, kept), time in seconds)

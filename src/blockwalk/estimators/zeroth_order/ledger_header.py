"""The header of a ledger: what a zeroth-order run depends on beside its entries."""

from __future__ import annotations

import os
import uuid
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockwalk.checkpoints.ledger import read_ledger
from blockwalk.estimators.zeroth_order.updates import codecs_of, settings_of
from blockwalk.numerics.noise.key import GENERATOR_VERSION

if TYPE_CHECKING:
    from blockwalk.engine.buckets import Buckets
    from blockwalk.engine.engine import Engine


def run_of(ledger: str | os.PathLike[str] | None) -> str:
    """Return the name of the run that a ledger belongs to: its own, or a new one; none without a
    ledger."""
    if ledger is None:
        return ""
    if Path(ledger).exists():
        return str(read_ledger(ledger)[0]["run"])
    return uuid.uuid4().hex[:12]


def header(engine: Engine, buckets: Buckets, lora: Any, run: str) -> dict[str, Any]:
    """Return the facts of a run in its ledger's header: all that a replay needs beside the entries
    and the base."""
    plan = engine.plan
    settings: Any = None
    if isinstance(lora, str | os.PathLike):
        settings = os.path.abspath(lora)
    elif is_dataclass(lora) and not isinstance(lora, type):
        # new adapters come from no folder
        settings = {name: value for name, value in asdict(lora).items() if name != "from_"}
    return {
        "run": run,
        "base": buckets.checksum,
        "rule": settings_of(plan),
        "noise_version": GENERATOR_VERSION,
        "codec": str(plan.trainable.codec),
        **codecs_of(plan),
        "lora": settings,
        "seed": plan.seed,
        "parameters": [(p.name, p.shape, p.dtype) for p in engine.spec.params(trainable=True)],
    }

"""A run's header, and its weights rebuilt from the base and the ledger."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockwalk.estimators.zo_update import ZerothOrderRule, settings_of
from blockwalk.ledger import read_ledger
from blockwalk.noise import GENERATOR_VERSION

if TYPE_CHECKING:
    from blockwalk.engine import Engine


def run_of(ledger: str | os.PathLike[str] | None) -> str:
    """The name of the run that a ledger belongs to, or a new one."""
    if ledger is not None and Path(ledger).exists():
        return str(read_ledger(ledger)[0]["run"])
    return uuid.uuid4().hex[:12]


def header(engine: Engine, lora: Any, run: str) -> dict[str, Any]:
    """What a ledger says of its run: all that a replay needs beside the entries and the base."""
    plan, buckets = engine.plan, engine.buckets
    trained = [(p.name, list(p.shape), p.dtype) for p in engine.spec.params() if p.trainable]
    settings: Any = dataclasses.asdict(lora) if dataclasses.is_dataclass(lora) and not isinstance(lora, type) else None
    if isinstance(lora, str | os.PathLike):
        settings = os.fspath(lora)
    return {
        "run": run,
        "base": buckets.checksum,
        "rule": settings_of(ZerothOrderRule.of(plan)),
        "noise_version": GENERATOR_VERSION,
        "codec": str(plan.trainable.codec),
        "hessian_codec": str(plan.zo.hessian_codec) if plan.zo.kind == "hizoo" else None,
        "lora": settings if not isinstance(settings, Mapping) else dict(settings),
        "seed": plan.seed,
        "parameters": trained,
    }

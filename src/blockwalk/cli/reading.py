"""Models that a command reads and does not train: the plan for them, and their packed form."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from blockwalk.checkpoints import run_checkpoint
from blockwalk.models.folder import model_folder
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.settings import override
from blockwalk.system import cache


def plan_to_read(run: RunConfig, adapter: Path | None, arguments: argparse.Namespace) -> Plan:
    """The plan for a model that is read and not trained. Without an adapter that learnt over rounded weights there is no reason
    to round them: they are read raw from disk, unless the command line itself names their place or codec."""
    named = {"frozen", "frozen.codec"} & arguments.named
    rounds = run.plan.frozen.codec.encoded
    return override(run.plan, {"frozen": "disk"}) if rounds and adapter is None and not named else run.plan


def packed_model(run: RunConfig, plan: Plan) -> str | Path:
    """The model of a run, or its block store where the plan wants one: what a training in ``output_dir`` left there, else one
    that stays in the cache folder until the model's weights change."""
    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.engine import open_model as opening
    from blockwalk.tiers.block_store.store import is_store

    path = model_folder(run.model).resolve()
    if is_store(path) or not plan.frozen.codec.encoded:
        return run.model
    try:
        packs = cache.folder() / "packed" / cache.key(os.fsencode(path))
        packs.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home directory: packed for this time alone
        return run.model
    scratch = Path(run.output_dir) / run_checkpoint.SCRATCH
    return opening.packed(path, plan.frozen.codec, build_skeleton(path), scratch, packs)

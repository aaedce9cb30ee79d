"""Models that a command reads and does not train: the plan for them, and their packed form."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from blockwalk.checkpoints import run_checkpoint
from blockwalk.models.model_source import model_source
from blockwalk.plan.plan import Plan
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.settings import on_one_rank, override
from blockwalk.ranks.place import place
from blockwalk.system import cache
from blockwalk.system.terminal import say


def plan_to_read(
    run: RunConfig, adapter: Path | None, arguments: argparse.Namespace, *, as_trained: bool = False
) -> Plan:
    """Return the plan for a model that is read and not trained. One process reads what several
    ranks have trained.

    Without an adapter that learnt over rounded weights there is no reason to round them: they are
    read raw from disk, unless the command line itself names their place or codec. A codec that the
    settings leave open is that of the run that trained the adapter."""
    from blockwalk.train.frozen_codec import settled

    if place().world == 1 and run.plan.mesh.world > 1:
        run = replace(run, plan=on_one_rank(run.plan))
    named = {"frozen", "frozen.codec"} & arguments.named
    codec = run.plan.frozen.codec
    if (
        adapter is None
        and not named
        and not as_trained
        and (codec.encoded or codec.facts.chosen_later)
    ):
        return override(run.plan, {"frozen": "disk"})
    run, lines = settled(run, adapter=None if adapter is None else arguments.adapter or adapter)
    for line in lines:
        say(f"note: {line}", file=sys.stderr)
    return run.plan


def packed_model(run: RunConfig, plan: Plan) -> str | Path:
    """Return the model of a run, or its block store where the plan wants one: what a training in
    ``output_dir`` left there, else one that stays in the cache folder until the model's weights
    change."""
    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.engine.pack_cache import packed

    model = model_source(run.model)
    if model.packed or not plan.frozen.codec.encoded:
        return run.model
    path = model.weights_folder.resolve()
    try:
        packs = cache.folder() / "packed" / cache.key(os.fsencode(path))
        packs.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home directory: packed for this time alone
        return run.model
    scratch = Path(run.output_dir) / run_checkpoint.SCRATCH
    return packed(path, plan.frozen.codec, build_skeleton(path), scratch, packs)

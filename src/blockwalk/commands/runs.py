"""``blockwalk plan``, ``train``, ``eval`` and ``generate``: the subcommands that take a run's configuration."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path

from blockwalk import checkpoint, files, launch
from blockwalk.config import RunConfig
from blockwalk.program import Shape
from blockwalk.report.advice import next_plan
from blockwalk.report.forecast import foresee, zeroth_order_advice


def train(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Train, and print what came of it. 0, or 128 + the number of the signal that ended the run early."""
    from blockwalk import train as training

    here = launch.place()
    try:
        with launch.joined(here, Path(run.output_dir), run.start_timeout):
            outcome = training.train(run, trace=arguments.trace)
            print("\n".join(outcome.lines()))  # of ranks other than 0 to their logs
            if outcome.stopped_by is not None:
                print(f"stopped by {outcome.stopped_by.name}; go on with --resume_from_checkpoint latest")
    except training.Stopped as stopped:
        print(f"blockwalk: stopped by {stopped.signal.name} before the run began; nothing was changed", file=sys.stderr)
        if here.world > 1:
            os._exit(128 + stopped.signal)  # a thread may wait for other ranks for ever
        return 128 + stopped.signal
    return 0 if outcome.stopped_by is None else 128 + int(outcome.stopped_by)


def plan(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print the forecast of a training step, read off the model's configuration alone: no weight is touched. With
    ``--hardware`` every method is simulated and ranked instead."""
    if arguments.hardware:
        from blockwalk.commands.planning import plan_for

        return plan_for(run, arguments)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape(run.micro_batch_rows, run.data.max_length)
    forecast = foresee(run, shape, device=device, padded=not run.data.packing)
    for line in (*forecast.lines(), *zeroth_order_advice(run.plan, lora=run.lora is not None)):
        print(line)
    if arguments.program:
        print(forecast.program)
    forecast.check(lambda: next_plan(run, run.plan.budget or 0, shape, device=device))
    return 0


def evaluate(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print loss, and for classification accuracy, on ``data.eval``."""
    from blockwalk.data.encode import load_tokenizer
    from blockwalk.evaluation import HeldOut
    from blockwalk.train import eval_batch_size
    from blockwalk.walker import Walker

    held_out = HeldOut.read(run.data, load_tokenizer(run.model), batch_size=eval_batch_size(run))
    with Walker(_packed(run), run.plan, lora=arguments.adapter, training=False) as walker:
        found = held_out.evaluate(walker)
    print(json.dumps(dataclasses.asdict(found)) if arguments.json else found)
    return 0


def generate(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Print the continuation of a prompt."""
    from blockwalk.data.encode import load_tokenizer
    from blockwalk.generation import stop_ids
    from blockwalk.walker import Walker

    tokenizer = load_tokenizer(run.model)
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if arguments.chat:
        if not tokenizer.chat_template:
            raise ValueError(f"{run.model} has no chat template; leave --chat out")
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=not arguments.chat, return_tensors="pt")["input_ids"]
    stops = stop_ids(run.model, tokenizer)
    with Walker(_packed(run), run.plan, lora=arguments.adapter, training=False) as walker:
        written = walker.generate(
            ids, arguments.max_new_tokens, temperature=arguments.temperature, stop_ids=stops, seed=run.plan.seed
        )
    print(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))
    return 0


def _packed(run: RunConfig) -> str | Path:
    """The model of a run, or its block store where the plan wants one: what a training in ``output_dir`` left there, else one
    that stays in the cache folder until the model's weights change."""
    from blockwalk import opening
    from blockwalk.skeleton import build_skeleton
    from blockwalk.tiers.store import is_store

    path = Path(run.model).resolve()
    if is_store(path) or not run.plan.frozen.codec.encoded:
        return run.model
    cache = files.cache_folder() / "packed" / hashlib.blake2s(os.fsencode(path), digest_size=16).hexdigest()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home directory: packed for this time alone
        return run.model
    scratch = Path(run.output_dir) / checkpoint.SCRATCH
    return opening.packed(path, run.plan.frozen.codec, build_skeleton(path).model, scratch, cache)

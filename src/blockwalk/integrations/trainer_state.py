"""The walker's state in a Trainer's checkpoint.

First order is saved as in any run. Zeroth order is saved as its weights and the number of its
steps, from which the noise of the next ones comes, with the ledger up to there."""

from __future__ import annotations

import json
import logging
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from blockwalk.checkpoints.distributed import write_folder
from blockwalk.checkpoints.ledger import NAME as LEDGER
from blockwalk.checkpoints.pieces import Pieces, Saved
from blockwalk.checkpoints.run_checkpoint import SCALARS
from blockwalk.plan.plan import Plan
from blockwalk.ranks.ranks import first
from blockwalk.system import atomic_files, links
from blockwalk.walk.walker import Walker

log = logging.getLogger(__name__)

FOLDER = "walker"
"""The folder of a checkpoint that holds the walker's state."""


def require_savable(args: Any, plan: Plan) -> None:
    """Raise ValueError for a run whose checkpoints would have no weights: on a durable tier these
    are saved by a ledger, which a Trainer's run has not."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    by_ledger = plan.estimator.facts.ledger and plan.home.outlives(plan)
    if by_ledger and strategy != "no":
        raise ValueError(
            f"trainable is {plan.trainable}, which a ledger saves, and save_strategy is {strategy}:"
            " set trainable: host or save_strategy: no, or train with blockwalk train"
        )


def save(walker: Walker, checkpoint: Path) -> None:
    """Write the walker's state to a checkpoint, in the place of an earlier run's. Ranks call this
    together.

    Raises:
        FloatingPointError: first order: a value is not finite.
    """
    new_folder = checkpoint / f".{FOLDER}.new"
    first(lambda: _clear(new_folder))
    if walker.estimator.checkpointed is not None:
        walker.save_state(new_folder)
    else:
        _save_weights(walker, new_folder)
    first(lambda: _rename(new_folder, checkpoint / FOLDER))


def _save_weights(walker: Walker, folder: Path) -> None:
    """Write the weights of a zeroth-order run, every update applied."""
    state = walker.live_state()
    if walker.ranks.rank:
        walker.join_gathers()
        return
    tensors = {name: value for name, value in state.items() if hasattr(value, "dtype")}
    pieces = {name: Pieces(prod(value.shape), {0: value}) for name, value in tensors.items()}
    scalars = {name: value for name, value in state.items() if name not in tensors}
    sealed = atomic_files.seal(json.dumps(scalars))[0]
    files = {SCALARS: f"{sealed}\n"}
    if walker.ledger is not None:
        files[LEDGER] = walker.ledger.path.read_text(encoding="utf-8")
    write_folder(folder, pieces, walker.steps_done, files)


def load(walker: Walker, checkpoint: Path) -> None:
    """Go on from the walker's state in a checkpoint.

    Raises:
        ValueError: the checkpoint has none, or one that does not fit.
        Damaged: a file of it is not as it was written.
    """
    folder = checkpoint / FOLDER
    if not folder.is_dir():
        raise ValueError(
            f"{checkpoint} has no folder {FOLDER}, which training goes on from: BlockwalkTrainer"
            " writes it unless save_only_model is set"
        )
    if walker.estimator.checkpointed is not None:
        walker.load_state(folder)
        return
    with Saved(folder) as saved:
        weights = {name: saved.whole(name) for name in saved.numel}
        state = {**atomic_files.read_sealed(folder / SCALARS), **weights}
    if walker.ledger is not None and (folder / LEDGER).is_file():
        walker.load_with_ledger(state, folder / LEDGER)
        return
    if walker.ledger is not None:
        log.warning(
            "%s was saved without a %s: none is kept from here on",
            folder,
            LEDGER,
        )
    walker.drop_ledger()
    walker.load_state_dict(state)


def begin_ledger(folder: Path, plan: Plan) -> Path | None:
    """Return the file that a new run's ledger begins in, until its first step; None of a plan that
    keeps none. What an earlier run left there is removed."""
    if not plan.estimator.facts.ledger:
        return None
    path = folder / LEDGER
    if int(os.environ.get("RANK", "0")) == 0:
        path.unlink(missing_ok=True)
    return path


def keep_ledger(walker: Walker, output_dir: Path) -> None:
    """Give a run's ledger its name in the output folder, in an earlier run's place."""
    if walker.ledger is not None and walker.ledger.path.parent != output_dir:
        walker.ledger.rename(output_dir / LEDGER)


def widen_groups(checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
    """Write optimizer and schedule of a checkpoint with one parameter group anew, with as many
    groups as there are now. Ranks call this together."""
    first(lambda: _widen(checkpoint, optimizer, scheduler))


def _widen(checkpoint: Path, optimizer: Any, scheduler: Any) -> None:
    files = [checkpoint / name for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
    count = len(optimizer.param_groups)
    if not all(file.is_file() for file in files):
        return
    groups = torch.load(files[0], weights_only=True)["param_groups"]
    if len(groups) == count or len(groups) != 1:
        return
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["lr"] = groups[0]["lr"]
    schedule = torch.load(files[1], weights_only=True)
    plain = scheduler.state_dict()
    for name, value in schedule.items():
        if isinstance(value, list) and len(value) == 1 < len(plain.get(name) or ()):
            schedule[name] = value * count
    torch.save(state, files[0])
    torch.save(schedule, files[1])


def _clear(folder: Path) -> None:
    links.remove(folder)


def _rename(new_folder: Path, folder: Path) -> None:
    links.remove(folder)
    os.rename(new_folder, folder)

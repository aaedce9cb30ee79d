"""The weights that a command reads: those that a run has trained, or the adapter that ``--adapter``
names (a folder of PEFT's, a run's, or a checkpoint, whose adapter is written for the time)."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockwalk.models.run_folder import ADAPTER_CONFIG, SETTINGS, adapter_of, is_model
from blockwalk.models.saved_template import FILE as TEMPLATE
from blockwalk.plan.parsing import Loader
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.system.atomic_files import read_yaml
from blockwalk.system.terminal import say

NONE = "none"
"""The word by which ``--adapter`` leaves a run's adapter out."""


@contextmanager
def opened_adapter(adapter: str | None, model: str) -> Iterator[Path | None]:
    """Yield the folder of an adapter of a model; None where none is named.

    Raises:
        ValueError: a checkpoint that was not kept, or one that holds no adapter, with what gives
            its weights.
    """
    if not adapter or adapter == NONE:
        yield None
        return
    from blockwalk.convert.checkpoint_adapter import is_checkpoint, write_adapter

    folder = adapter_of(adapter)
    _require_kept(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        refuse_unfinished(folder)
    if not is_checkpoint(folder):
        _note_best(folder.parent)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="blockwalk-adapter-") as temporary:
        out = Path(temporary)
        write_adapter(model, folder, out)
        _write_template(folder, model, out)
        yield out


def trained_by(run: RunConfig, arguments: argparse.Namespace) -> tuple[RunConfig, str | None]:
    """Return the run with the model that it has trained, and the adapter to use: the one that is
    named, or that the run has trained. A line says which."""
    named: str | None = arguments.adapter
    if named is not None:
        return run, None if named == NONE else named
    folder = Path(run.output_dir)
    if arguments.config is None or "model" in arguments.named:
        return run, None
    if not _is_run_of(folder, run.model):
        say(
            f"note: {folder} (output_dir) holds no run of {run.model}: untrained weights are read;"
            " --adapter names others",
            file=sys.stderr,
        )
        return run, None
    if (folder / "adapter" / ADAPTER_CONFIG).is_file():
        say(
            f"note: with the adapter in {folder / 'adapter'} (--adapter {NONE}: without)",
            file=sys.stderr,
        )
        return run, os.fspath(folder / "adapter")
    if is_model(folder / "model"):
        say(
            f"note: the trained model in {folder / 'model'} (--adapter {NONE}: the one before)",
            file=sys.stderr,
        )
        _note_best(folder)
        data = run.data
        if "data.chat_template" not in arguments.named:  # the trained model has its own
            data = dataclasses.replace(data, chat_template="")
        return dataclasses.replace(run, model=os.fspath(folder / "model"), data=data), None
    # The run itself may have been named, or a file for one to come.
    if Path(arguments.config).resolve().parent == folder.resolve():
        refuse_unfinished(folder)
    return run, None


def _is_run_of(folder: Path, model: str) -> bool:
    """Return whether a folder is of a run that began from this model."""
    settings = folder / SETTINGS
    return settings.is_file() and read_yaml(settings, Loader).get("model") == model


def _require_kept(folder: Path) -> None:
    """Raise ValueError for a checkpoint that a run has not kept, with those that it has."""
    from blockwalk.checkpoints import run_checkpoint

    kept = [] if folder.exists() else run_checkpoint.whole(folder.parent)
    if kept:
        raise ValueError(
            f"there is no {folder}; {folder.parent} has {', '.join(path.name for path in kept)}"
            " (keep_checkpoints says how many stay)"
        )


def _note_best(run: Path) -> None:
    """Print which checkpoint of a run is its best, where the weights at its end are not."""
    from blockwalk.train.best import note_on_best

    if note := note_on_best(run):
        say(f"note: {note}", file=sys.stderr)


def refuse_unfinished(folder: Path) -> None:
    """Raise ValueError for the folder of a run that has checkpoints and has not ended, with what
    can be used of it."""
    from blockwalk.checkpoints import run_checkpoint

    newest = run_checkpoint.latest(folder)
    if newest is not None:
        raise ValueError(
            f"{folder} holds no trained adapter or model, since its run has not ended: --adapter"
            f" {newest} takes its newest checkpoint, --adapter {NONE} the model before it"
        )


def _write_template(checkpoint: Path, model: str, out: Path) -> None:
    """Write the chat template that a checkpoint's run gave its model, where it gave one."""
    from blockwalk.checkpoints import run_checkpoint
    from blockwalk.data.tokenizer import tokenizer_of

    data = run_checkpoint.load(checkpoint, weights=False).config["data"]
    if template := data.get("chat_template"):
        tokenizer = tokenizer_of(model, DataSettings(chat_template=template))
        (out / TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")

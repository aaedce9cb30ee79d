"""The configuration of a subcommand's run, from its file and its flags. Nothing here imports
torch."""

from __future__ import annotations

import argparse
import operator
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blockwalk.cli.commands import Command
from blockwalk.cli.imports import load_remembered
from blockwalk.models import run_folder
from blockwalk.models.model_source import model_source
from blockwalk.plan.run_config import RunConfig
from blockwalk.ranks import place
from blockwalk.system.terminal import one_line, say
from blockwalk.train import config
from blockwalk.train.foreign_settings import ForeignSettings, Note

Settings = list[tuple[str, Any]]
"""Settings by dotted name, in the order of the command line."""


def configuration(
    command: Command,
    arguments: argparse.Namespace,
    settings: Settings,
    *,
    runs_here: bool = True,
    starts: bool = False,
) -> RunConfig:
    """Return the configuration of a run. The settings of the command line are kept by name as
    ``arguments.named``.

    Args:
        runs_here: whether the run is on this machine, where the model's folder must be.
        starts: whether this process starts the ranks, which print the notes on settings.

    Raises:
        ValueError: a setting is wrong, or one that the subcommand needs is missing.
    """
    arguments.config, implied = _settings_file(arguments.config)
    settings = [*implied, *settings]
    load_remembered(arguments.config)
    with _notes_printed(starts=starts):
        run = config.load(arguments.config, settings, as_flags=True)
    arguments.named = {name for name, _ in settings}
    for name in command.needs:
        has_task = name.startswith("data.") and bool(run.data.task)
        holds_out = name == "data.eval" and run.data.evaluates
        if not (operator.attrgetter(name)(run) or has_task or holds_out):
            raise ValueError(f"{name} is missing; give it in the YAML file or as --{name}")
    if runs_here and command.reads_weights:
        model_source(run.model).require_weights()
    elif runs_here and not os.path.isfile(run.model):  # the file of a configuration is enough
        model_source(run.model).require_config()
    return run


@contextmanager
def _notes_printed(*, starts: bool) -> Iterator[None]:
    """Print the notes on settings that are read meanwhile to standard error, each once, on the
    first rank; where this process starts the ranks, only if the settings are refused."""
    refused = True
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Note)
            yield
        refused = False
    except ForeignSettings as error:
        if len(error.problems) > 1:
            caught.clear()  # what was taken hides the lines that stop the run
        raise
    finally:
        notes = [warning for warning in caught if issubclass(warning.category, Note)]
        if refused or (not starts and place.place().rank == 0):
            for text in dict.fromkeys(str(note.message) for note in notes):
                say(f"note: {one_line(text)}", file=sys.stderr)
        for warning in caught:
            if warning not in notes:
                warnings.showwarning(
                    warning.message, warning.category, warning.filename, warning.lineno
                )


def _settings_file(argument: str | None) -> tuple[str | None, Settings]:
    """Return the YAML file that a positional argument means, and the settings that it implies: the
    folder of a run has a file, and a model is a setting.

    Raises:
        ValueError: a folder that is neither.
    """
    if argument is None or (not os.path.isdir(argument) and not argument.endswith(".gguf")):
        return argument, []
    file = os.path.join(argument, run_folder.SETTINGS)
    if os.path.isfile(file) and not run_folder.is_model(argument):
        return file, [("output_dir", argument)]  # it may have been moved
    if argument.endswith(".gguf") or run_folder.is_model(argument):
        return None, [("model", argument)]
    raise ValueError(
        f"{argument} is a folder with neither a run ({run_folder.SETTINGS}) nor a model"
        " (config.json): give a YAML file, or --model with the folder of a model"
    )

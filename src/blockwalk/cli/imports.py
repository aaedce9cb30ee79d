"""The modules that bring rows from outside, imported before settings are read. Nothing here imports
torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from blockwalk.models import run_folder
from blockwalk.plan.parsing import Loader
from blockwalk.system import row_modules
from blockwalk.system.atomic_files import read_yaml
from blockwalk.train.config import IMPORT

FLAG = f"--{IMPORT}"


def load_named(words: Sequence[str]) -> None:
    """Import the modules that the words of a command line name.

    Raises:
        ValueError: one of them cannot be imported.
    """
    for entry in _named(words):
        row_modules.load(entry)


def _named(words: Sequence[str]) -> Iterator[str]:
    """Yield each module that ``--import`` names: ``--import a,b --import=c``."""
    for index, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag != FLAG:
            continue
        if not equals:
            text = words[index + 1] if index + 1 < len(words) else ""
        yield from (name.strip() for name in text.strip("[]").split(",") if name.strip())


def load_remembered(file: str | None) -> None:
    """Import the modules that a run's settings name and that its user has allowed for the run's
    folder. Others are refused when the settings are read.

    Raises:
        ValueError: one of them has changed since.
    """
    if file is None or os.path.basename(file) != run_folder.SETTINGS or not os.path.isfile(file):
        return
    settings = read_yaml(Path(file), Loader)
    entries = settings.get(IMPORT) if isinstance(settings, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        row_modules.load_allowed(os.path.dirname(os.path.abspath(file)), str(entry))

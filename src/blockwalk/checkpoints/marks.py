"""The mark in a folder that Blockwalk made: the name of the run that made it. A folder without one
is never removed."""

from __future__ import annotations

import re
import uuid
from enum import StrEnum
from pathlib import Path

from blockwalk.system import atomic_files, links
from blockwalk.system.versions import installed

MARK = ".blockwalk"
"""The name of the file that is the mark."""
_HALF_WRITTEN = re.compile(rf"\.{re.escape(MARK)}\.[0-9a-f]{{8}}{re.escape(atomic_files.PARTIAL)}")


def new_run() -> str:
    """Return a name for a run: 12 hexadecimal digits."""
    return uuid.uuid4().hex[:12]


class Learnt(StrEnum):
    """The kinds of texts that a run learns, by which its model is asked."""

    CHATS = "chats"
    WORDS = "words"
    """Label words after a template."""
    TEXTS = "texts"


def write(folder: Path, run: str, learnt: Learnt | None = None) -> None:
    """Put a run's mark in a folder, as the first thing in it; in one of trained weights with what
    they learnt."""
    facts = {"made by": "blockwalk", "version": installed(("blockwalk",))["blockwalk"], "run": run}
    if learnt is not None:
        facts["learnt"] = str(learnt)
    atomic_files.write_sealed(folder / MARK, facts)


def learnt_of(folder: Path) -> Learnt | None:
    """Return what the weights in a folder learnt; None where its mark does not say."""
    if run_of(folder) is None:
        return None
    learnt = atomic_files.read_sealed(folder / MARK).get("learnt")
    return Learnt(learnt) if learnt in list(Learnt) else None


def run_of(folder: Path) -> str | None:
    """Return the run whose mark a folder has; None where it has none, is a link, or is no
    folder."""
    if folder.is_symlink() or (folder / MARK).is_symlink() or not (folder / MARK).is_file():
        return None
    try:
        return str(atomic_files.read_sealed(folder / MARK).get("run"))
    except atomic_files.Damaged:
        return None


def is_ours(folder: Path) -> bool:
    """Return whether a folder has a mark, or a kill left it before it had one."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return run_of(folder) is not None or all(
        _HALF_WRITTEN.fullmatch(path.name) for path in links.paths_in(folder)
    )

"""Sweeping a run's folder: what ended runs left, known by exact names and contents, and nothing of
anybody else's."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blockwalk.checkpoints import ledger as ledger_module
from blockwalk.checkpoints import marks, run_checkpoint
from blockwalk.checkpoints.run_checkpoint import JOINED, LOGS, REPLACED, RESULTS, SCRATCH
from blockwalk.models.model_source import STORE_INDEX
from blockwalk.system import atomic_files, links

_HEX8 = "[0-9a-f]{8}"
_END = re.escape(atomic_files.PARTIAL)
_FILES = "|".join(
    map(re.escape, (*LOGS, ledger_module.NAME, marks.MARK, "report.html", "loss.svg"))
)
_LEFT = re.compile(
    rf"\.({_FILES})\.{_HEX8}{_END}"
    rf"|\.\.{re.escape(ledger_module.NAME)}\.{_HEX8}{_END}\.{_HEX8}{_END}"
)
"""Names of files that a killed run was writing, beside its logs."""
_LEFT_FOLDER = re.compile(rf"\.({'|'.join(RESULTS)})\.{_HEX8}{_END}")
_LEFT_CHECKPOINT = re.compile(rf"\.checkpoint-\d{{6,}}(\.{_HEX8})?{_END}")
_LEFT_MAP = re.compile(rf"\.scratch-[a-z0-9_]{{8}}{_END}")
_WEIGHTS = "weights-[0-9a-f]{12}"
_PACK = ".+-[a-z0-9]+-[0-9a-f]{32}"
_LEFT_STORE = re.compile(rf"\.({_WEIGHTS}|{_PACK})\.{_HEX8}{_END}")
_STORE_PARTS = re.compile(rf"unit-\d{{5}}\.bin|{re.escape(STORE_INDEX)}")
_RANK = re.compile(r"rank-\d+")


@contextmanager
def one_run(output_dir: Path) -> Iterator[None]:
    """Hold a run's folder for the time of one run. At its end :func:`leftovers` go that were not
    there before it; the others stay until :func:`sweep` is called.

    Raises:
        ValueError: another run is at work in it.
    """
    with atomic_files.locked(output_dir):
        kept = set(leftovers(output_dir))
        # no run of ours was here: empty folders are somebody's
        if marks.run_of(output_dir) is None:
            kept.update(folder for folder in _working_folders(output_dir) if folder.is_dir())
        try:
            yield
        finally:
            _remove(leftovers(output_dir), kept)
            _remove_empty(output_dir, kept)


def sweep(output_dir: Path) -> None:
    """Remove the :func:`leftovers` of ended runs; a folder of trained weights that a killed run was
    about to replace comes back. Call it where nothing refuses the run any more."""
    for name in RESULTS:
        if marks.run_of(output_dir / name) is not None or not os.path.lexists(output_dir / name):
            atomic_files.bring_back(output_dir / name)
    _remove(leftovers(output_dir))


def _remove(paths: Iterable[Path], kept: Container[Path] = ()) -> None:
    for path in paths:
        if path not in kept:
            # a rank that had joined removes its own
            with atomic_files.tolerating_use(path), suppress(FileNotFoundError):
                links.remove(path)


def _remove_empty(output_dir: Path, kept: Container[Path]) -> None:
    """Remove the working folders that are empty; one that is a link, and what was there before,
    stays."""
    for folder in _working_folders(output_dir):
        if folder not in kept and not folder.is_symlink():
            with suppress(OSError):  # not empty, or not there
                folder.rmdir()


def _working_folders(output_dir: Path) -> list[Path]:
    """Return the folders that a run's ranks work in, inner ones first."""
    scratch = output_dir / SCRATCH
    return [*_matching(scratch, _RANK), scratch, *_matching(output_dir / "logs", _RANK)]


def leftovers(output_dir: Path) -> list[Path]:
    """Return the paths in a run's folder that ended runs left and nobody will ask for again: files
    half written, and weights on disk of another run than the ledger's. These stay where the ledger
    that the checkpoints belong to is lost. Each carries our mark: a name with the digits of a run,
    of chance or of a content, and contents of ours."""
    scratch = output_dir / SCRATCH
    logs = output_dir / "logs"
    paths = [path for path in _matching(output_dir, _LEFT_FOLDER) if marks.is_ours(path)]
    for path in _matching(output_dir, _LEFT_CHECKPOINT):
        if path.is_symlink() or run_checkpoint.is_ours(path):
            paths.append(path)
    for folder in (output_dir, *_matching(logs, _RANK)):
        paths += [path for path in _matching(folder, _LEFT) if not path.is_dir()]
    paths += [
        path
        for path in _matching(scratch, re.compile(rf"{JOINED}[a-z0-9_]{{8}}"))
        if marks.is_ours(path)
    ]
    kept = _kept_weights(output_dir)
    for folder in (scratch, *_matching(scratch, _RANK)):
        paths += [path for path in _matching(folder, _LEFT_MAP) if not path.is_dir()]
        paths += [path for path in _matching(folder, _LEFT_STORE) if _is_store_in_part(path)]
        if kept is not None:
            weights = _matching(folder, re.compile(_WEIGHTS))
            paths += [
                path for path in weights if path.name not in kept and (path / STORE_INDEX).is_file()
            ]
    return paths


def working_files(output_dir: Path) -> list[Path]:
    """Return the block stores and :func:`leftovers` in a run's working folder."""
    scratch = output_dir / SCRATCH
    store = re.compile(f"{_WEIGHTS}|{_PACK}")
    stores = [
        path
        for folder in (scratch, *_matching(scratch, _RANK))
        for path in _matching(folder, store)
    ]
    ended = [path for path in leftovers(output_dir) if scratch in path.parents]
    return list(dict.fromkeys([*stores, *ended]))


def _matching(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the paths in a folder that have such names; none where there is no folder."""
    return [path for path in links.paths_in(folder) if name.fullmatch(path.name)]


def _is_store_in_part(folder: Path) -> bool:
    """Return whether a folder holds a block store's units, or the files that are copied before
    them, or nothing yet."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = [path.name for path in links.paths_in(folder)]
    return (
        not names or "config.json" in names or any(_STORE_PARTS.fullmatch(name) for name in names)
    )


def _kept_weights(output_dir: Path) -> set[str] | None:
    """Return names of the weights on disk that belong to a ledger, this run's or a replaced one's;
    None: nobody can tell."""
    names = set()
    with suppress(ValueError):  # a damaged ledger is for whoever reads it to report
        ledger = output_dir / ledger_module.NAME
        newest = run_checkpoint.latest(output_dir)
        if not ledger.exists() and newest is not None and run_checkpoint.has_ledger(newest):
            return None
        for path in (ledger, output_dir / REPLACED / ledger_module.NAME):
            if path.exists():
                names.add(f"weights-{ledger_module.read_ledger(path)[0]['run']}")
        return names
    return None

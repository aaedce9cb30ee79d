"""The start of a run, fresh or from a checkpoint, and the earlier files that stand in its way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import ledger as ledger_module
from blockwalk.checkpoints import marks
from blockwalk.checkpoints.run_checkpoint import (
    LOGS,
    REPLACED,
    is_ours,
    ledger_position,
    named_like_checkpoints,
    read_scalars,
    step_of,
    verify,
    whole,
)
from blockwalk.plan.words import counted
from blockwalk.system import atomic_files, links
from blockwalk.system.atomic_files import Damaged
from blockwalk.system.paths import StrPath


@dataclass(frozen=True, slots=True)
class Start:
    """The point where a run starts, and the earlier run's files that stand in its way; nothing has
    been touched yet."""

    output_dir: str
    checkpoint: str | None
    """The checkpoint from which the run resumes; None: a fresh start."""
    in_the_way: Sequence[str]
    damaged: Sequence[str] = ()
    """A message about each damaged checkpoint that is newer than ``checkpoint``."""
    run: str = ""
    """The name of the run: that of the checkpoint's where it goes on in the same folder, else a new
    one."""
    overwrites: bool = False
    """Whether what an earlier run left may be replaced: ``overwrite_output_dir``, now or when this
    run began."""

    @property
    def ledger(self) -> Path:
        """The ledger that the walker opens: a fresh run's has a name beside the earlier run's until
        :meth:`clear`."""
        name = ledger_module.NAME
        fresh = f".{name}.{self.run[:8]}{atomic_files.PARTIAL}"
        return Path(self.output_dir) / (name if self.checkpoint is not None else fresh)

    def may_replace(self, result: Path) -> bool:
        """Return whether a folder with trained weights is this run's own, or may be replaced by
        it."""
        return self.overwrites or marks.run_of(result) == self.run

    def clear(self) -> None:
        """Clear the way, when the run really starts: an earlier run goes to :data:`REPLACED`,
        newest checkpoint first, its ledger after them, so that what a kill leaves is a run that can
        be resumed. :func:`prune` removes it."""
        folder = Path(self.output_dir)
        if self.in_the_way:
            self._move_away(folder)
        if marks.run_of(folder) != self.run:
            marks.write(folder, self.run)

    def _move_away(self, folder: Path) -> None:
        replaced = folder / REPLACED
        logs = [folder / name for name in LOGS]
        links.remove(replaced)
        replaced.mkdir()
        marks.write(replaced, self.run)
        paths = [*map(Path, reversed(self.in_the_way)), *(logs if self.checkpoint is None else [])]
        for path in paths:
            # one that cannot be read: the mark of ``replaced`` is this run's
            if path.name == marks.MARK:
                links.remove(path)
            elif os.path.lexists(path):
                os.rename(path, replaced / path.name)
        atomic_files.fsync(replaced)
        atomic_files.fsync(folder)


def prepare(folder: StrPath, resume_from_checkpoint: str, overwrite: bool) -> Start:
    """Decide where a run starts: nothing is changed before :meth:`Start.clear`.

    Raises:
        ValueError: there is no such checkpoint, or an earlier run, or files that no run of
            Blockwalk made, stand in the way and ``overwrite`` is false.
    """
    output_dir = Path(folder)
    ledger = output_dir / ledger_module.NAME
    checkpoint: Path | None = None
    in_the_way: list[Path] = []
    damaged: dict[Path, str] = {}
    if resume_from_checkpoint == "latest":
        checkpoint, damaged = _newest_undamaged(output_dir)
        if checkpoint is None and not overwrite:
            _refuse_lone_ledger(ledger)
    elif resume_from_checkpoint:
        checkpoint = _named_checkpoint(Path(resume_from_checkpoint), ledger)
        in_the_way = [path for path in whole(output_dir) if step_of(path) > step_of(checkpoint)]
    else:
        in_the_way = [*([ledger] if os.path.lexists(ledger) else []), *whole(output_dir)]
    if in_the_way and not overwrite:
        raise ValueError(
            f"{output_dir} holds an earlier run's {in_the_way[-1].name}; continue it with"
            " resume_from_checkpoint: latest, choose another output_dir, or set"
            " overwrite_output_dir: true"
        )
    continued = {} if checkpoint is None else _continued_run(checkpoint, output_dir)
    foreign = _foreign_files(output_dir, has_run=bool(continued))
    if foreign and not overwrite:
        raise ValueError(
            f"{foreign[0]} ({kind_of(foreign[0])}) is there already, and no run made it: move it"
            " away, choose another output_dir, or set overwrite_output_dir: true, which replaces it"
        )
    in_the_way += [path for path in foreign if path not in in_the_way]
    replaced = [str(path) for path in (*in_the_way, *damaged)]
    if replaced:
        _refuse_foreign_replaced(output_dir / REPLACED)
    config = continued.get("config", {})
    data = continued.get("data", {})
    return Start(
        output_dir=str(output_dir),
        checkpoint=None if checkpoint is None else str(checkpoint),
        in_the_way=replaced,
        damaged=list(damaged.values()),
        run=str(data.get("run") or marks.new_run()),
        overwrites=overwrite or bool(config.get("overwrite_output_dir")),
    )


def _refuse_lone_ledger(ledger: Path) -> None:
    """Raise ValueError where a ledger has steps; no checkpoint stands beside it."""
    if ledger.exists() and (steps := len(ledger_module.read_ledger(ledger)[1])):
        raise ValueError(
            f"{ledger} has {counted(steps, 'step')}, and no checkpoint stands beside it, which says"
            " where the data go on; put the checkpoints back, rebuild the weights with blockwalk"
            " replay, or begin again with overwrite_output_dir: true"
        )


def _named_checkpoint(checkpoint: Path, ledger: Path) -> Path:
    """Return a checkpoint that the user names, after reading all of it.

    Raises:
        ValueError: it is not there, or ``ledger`` of a zeroth-order run is.
        Damaged: a file of it is missing, or is not as it was written.
    """
    if not checkpoint.is_dir():
        raise ValueError(f"resume_from_checkpoint: {checkpoint} is not there")
    verify(checkpoint)
    if ledger.exists():
        raise ValueError(
            f"{ledger.parent} holds a zeroth-order run, which goes on where its ledger ends; set"
            " resume_from_checkpoint: latest"
        )
    return checkpoint


def _continued_run(checkpoint: Path, output_dir: Path) -> dict[str, Any]:
    """Return the state of the run that goes on in its own folder; empty where the checkpoint lies
    in another.

    Raises:
        ValueError: the ledger that the checkpoint belongs to is not in ``output_dir``.
    """
    state = read_scalars(checkpoint)
    position = ledger_position(state)
    if position is not None:
        ledger_module.require(output_dir / ledger_module.NAME, position, checkpoint)
    return state if _same_folder(checkpoint.parent, output_dir) else {}


def _foreign_files(output_dir: Path, *, has_run: bool) -> list[Path]:
    """Return what is named like a run's files and was made by none."""
    foreign = [path for path in named_like_checkpoints(output_dir) if not is_ours(path)]
    if not has_run and marks.run_of(output_dir) is None:
        paths = (output_dir / name for name in (marks.MARK, *LOGS))
        foreign += [path for path in paths if os.path.lexists(path)]
    return foreign


def _refuse_foreign_replaced(folder: Path) -> None:
    """Raise ValueError where somebody else's files have the name of the folder that an earlier run
    would go to."""
    if os.path.lexists(folder) and not marks.is_ours(folder):
        raise ValueError(
            f"{folder} ({kind_of(folder)}) is there already, and no run made it; an earlier run is"
            " kept there until this one's first checkpoint: move it away, or choose another"
            " output_dir"
        )


def refuse_result(start: Start, name: str) -> None:
    """Refuse a run whose trained weights would replace what it did not make.

    Raises:
        ValueError: the folder that they go to exists, another run or nobody of ours made it, and
            ``overwrite_output_dir`` was not set.
    """
    place = Path(start.output_dir) / name
    candidates = [*([place] if os.path.lexists(place) else []), *atomic_files.left_aside(place)]
    if not candidates or start.may_replace(candidates[0]):
        return
    run = marks.run_of(candidates[0])
    maker = "this run did not make it"
    if run is not None:
        maker = f"run {run} made it, which this one does not go on with"
    raise ValueError(
        f"{place} ({kind_of(candidates[0])}) is where the trained weights would go, and {maker}:"
        " move it away, choose another output_dir, or set overwrite_output_dir: true, which"
        " replaces it"
    )


def kind_of(path: Path) -> str:
    """Return words for a path: a file, a link and where it leads, or a folder and some of what it
    holds."""
    if path.is_symlink():
        return f"a link to {os.readlink(path)}"
    if not path.is_dir():
        return "a file"
    names = [file.name for file in links.paths_in(path)]
    if not names:
        return "an empty folder"
    return f"a folder with {', '.join(names[:3])}{', ...' if names[3:] else ''}"


def _same_folder(one: Path, other: Path) -> bool:
    return one.is_dir() and other.is_dir() and os.path.samefile(one, other)


def _newest_undamaged(output_dir: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest checkpoint with the bytes that were written, if there is any; and what is
    wrong with the newer ones.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(whole(output_dir)):
        try:
            verify(path)
        except Damaged as error:
            damaged[path] = str(error)
        else:
            return path, {
                newer: f"{why}; going on from {path.name}"
                for newer, why in reversed(damaged.items())
            }
    if damaged:
        raise ValueError(
            f"{'; '.join(damaged.values())}: no checkpoint of {output_dir} is left to go on from;"
            " choose another output_dir, or begin again with overwrite_output_dir: true and without"
            " resume_from_checkpoint"
        )
    return None, {}

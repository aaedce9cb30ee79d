"""Checkpoints: everything that a run needs to go on as if it had never stopped, in a folder that is whole or not there.

    output_dir/checkpoint-000123/
        state.json          step, data position, the walker's scalars, resolved configuration, versions, a digest
        rank-00000.*        trainables and optimizer state, with checksums: see blockwalk.checkpoints.pieces

A checkpoint is written beside its place, synced and renamed; a process killed in between leaves a hidden leftover that
:func:`latest` does not see. Tensors are written one after the other, so that saving takes no memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import ledger as ledger_module
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.run_config import RunConfig
from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import Damaged
from blockwalk.system.paths import StrPath
from blockwalk.system.versions import installed

FORMAT = 2
SCRATCH = "scratch"
"""The walker's working folder below the run's: packed weights, and those of a zeroth-order run on disk."""
JOINED = "joined-"
"""The beginning of the names of working folders, below :data:`SCRATCH`, of ranks that join an elastic run."""
REPLACED = "replaced"
"""The folder in which a run that another one replaces stays until that one's first checkpoint is whole."""
CHANGED = "changed.jsonl"
"""The settings that resumed runs changed: one line for each of them that did."""
LOGS = ("metrics.jsonl", "evaluations.jsonl", "skipped.jsonl", CHANGED, "config.yaml", "forecast.json", "trace.json")
"""Files that a run writes beside its checkpoints and its ledger."""
SCALARS = "state.json"
_NAME = re.compile(r"checkpoint-(\d{6,})")

FIXED = ("model", "method", "seed", "batch_size", "lora", "prefix", "data")
"""Settings without which the saved state means something else; any other may change when a run is resumed, and what is
evaluated (``data.eval...``) too."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as :func:`save` writes it and :func:`load` reads it: ``walker`` is ``Walker.live_state()``, for
    ``Walker.load_state_dict``, ``data`` the loader's."""

    step: int
    walker: dict[str, Any]
    data: dict[str, Any]
    config: dict[str, Any]
    """The resolved configuration of the run that wrote it, as ``RunConfig.to_mapping()``."""
    slices: Path | None = None
    """The folder for ``Walker.load_state``, of a first-order run; ``walker`` then holds scalars alone."""
    ledger: ledger_module.Mark | None = None
    """The place of the ledger's last entry, of a zeroth-order run."""


def save(output_dir: Path, made: Checkpoint, *, keep: int = 2) -> Path:
    """Write ``checkpoint-{step}`` of one process, and remove all but the newest ``keep``. A flat tensor of ``made.walker``
    may be what gives its rows one after the other; the rest, as ``made.data`` and ``made.config``, is what JSON can hold.
    """
    from blockwalk.checkpoints.distributed import write_folder
    from blockwalk.checkpoints.pieces import Pieces

    tensors = {name: value for name, value in made.walker.items() if hasattr(value, "dtype")}
    path = path_of(output_dir, made.step)
    held = {name: Pieces(prod(tensor.shape), {0: tensor}) for name, tensor in tensors.items()}
    write_folder(path, held, made.step, {SCALARS: scalars_text(made)})
    prune(output_dir, keep)
    return path


def path_of(output_dir: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return output_dir / f"checkpoint-{step:06d}"


def scalars_text(made: Checkpoint) -> str:
    """The text of the file :data:`SCALARS`, as sealed JSON: all of a checkpoint but its tensors."""
    state = {
        "format": FORMAT,
        "step": made.step,
        "walker": {name: value for name, value in made.walker.items() if not hasattr(value, "dtype")},
        "data": made.data,
        "config": made.config,
        "ledger": None if made.ledger is None else [made.ledger.steps, made.ledger.digest],
        "versions": installed(),
    }
    return atomic_files.seal(json.dumps(state, indent=1))[0] + "\n"


def prune(output_dir: Path, keep: int) -> None:
    """Remove all whole checkpoints but the newest ``keep``, and the run that they replace."""
    found = whole(output_dir)
    for old in found[:-keep]:
        hidden = old.with_name(f".{old.name}{atomic_files.PARTIAL}")  # it stops being named like a checkpoint first
        os.rename(old, hidden)
        shutil.rmtree(hidden)
    if found:
        shutil.rmtree(output_dir / REPLACED, ignore_errors=True)


def load(path: Path, *, weights: bool = True) -> Checkpoint:
    """Read a checkpoint. Its tensors are mapped from the file, not copied: do not write to them. Without ``weights``
    its scalars alone are read.

    Raises:
        Damaged: a file of it is missing, or is not as it was written.
        ValueError: the checkpoint has another format.
    """
    from blockwalk.checkpoints import pieces

    state, walker = _scalars(path), {}
    ledger = _mark(state)
    if ledger is not None and weights:
        with pieces.Saved(path) as saved:
            walker = {name: saved.whole(name) for name in saved.numel}
    walker |= state["walker"]
    return Checkpoint(state["step"], walker, state["data"], state["config"], path if ledger is None else None, ledger)


def _scalars(path: Path) -> dict[str, Any]:
    """The values that :func:`scalars_text` wrote to a checkpoint."""
    from blockwalk.checkpoints import pieces

    pieces.refuse_format_1(path)
    state = atomic_files.read_sealed(path / SCALARS)
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has checkpoint format {state.get('format')}; this version reads format {FORMAT}")
    with atomic_files.reading(path / SCALARS):
        objects = [state[name].items() for name in ("walker", "data", "config")]
        if not isinstance(state["step"], int) or (state["ledger"] is not None and len(state["ledger"]) != 2):
            raise TypeError(f"step {state['step']!r}, ledger {state['ledger']!r}, {len(objects)} objects")
    return state


def _mark(state: Mapping[str, Any]) -> ledger_module.Mark | None:
    return None if state["ledger"] is None else ledger_module.Mark(*state["ledger"])


def verify(path: Path) -> None:
    """Read a checkpoint and compare every byte with its checksum.

    Raises:
        Damaged: a file of it is missing, or is not as it was written.
        ValueError: the checkpoint has another format.
    """
    from blockwalk.checkpoints import pieces

    _scalars(path)
    with pieces.Saved(path) as saved:
        saved.verify()


def whole(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first: each had everything when it took its name."""
    if not output_dir.is_dir():
        return []
    return sorted((p for p in output_dir.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()), key=step_of)


def latest(output_dir: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    found = whole(output_dir)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    """The step that a checkpoint's name carries."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint, such as checkpoint-000100")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class Start:
    """The point where a run starts, and the earlier run's files that stand in its way; nothing has been touched yet."""

    output_dir: str
    checkpoint: str | None
    """The checkpoint from which the run resumes; None: a fresh start."""
    in_the_way: Sequence[str]
    damaged: Sequence[str] = ()
    """A message about each damaged checkpoint that is newer than ``checkpoint``."""

    @property
    def ledger(self) -> Path:
        """The ledger that the walker opens: a fresh run's has a name beside the earlier run's until :meth:`clear`."""
        name = ledger_module.NAME
        return Path(self.output_dir) / (name if self.checkpoint is not None else f".{name}{atomic_files.PARTIAL}")

    def clear(self) -> None:
        """Clear the way, when the run really starts: an earlier run goes to :data:`REPLACED`, newest checkpoint first, its
        ledger after them, so that what a kill leaves is a run that can be resumed. :func:`prune` removes it."""
        if not self.in_the_way:
            return
        folder = Path(self.output_dir)
        replaced, logs = folder / REPLACED, [folder / name for name in LOGS]
        if replaced.exists():
            shutil.rmtree(replaced)
        replaced.mkdir()
        for path in (*map(Path, reversed(self.in_the_way)), *(logs if self.checkpoint is None else [])):
            if path.exists():
                os.rename(path, replaced / path.name)
        atomic_files.fsync(replaced)
        atomic_files.fsync(folder)


@contextmanager
def one_run(output_dir: Path) -> Iterator[None]:
    """Hold a run's folder for the time of one run, and sweep what runs that ended before they began have left there.

    Raises:
        ValueError: another run is at work in it.
    """
    with atomic_files.locked(output_dir):
        sweep(output_dir)
        try:
            yield
        finally:
            sweep(output_dir)


def sweep(output_dir: Path) -> None:
    """Remove what nobody will ask for again: files half written, and weights on disk of another run than the ledger's. They
    stay where the ledger that the checkpoints belong to is lost."""
    ledger, scratch = output_dir / ledger_module.NAME, output_dir / SCRATCH
    kept = "weights-*"
    with suppress(ValueError):  # a damaged ledger is for whoever reads it to report
        last = latest(output_dir)
        if ledger.exists() or last is None or _mark(_scalars(last)) is None:
            kept = f"weights-{ledger_module.read_ledger(ledger)[0]['run'] if ledger.exists() else ''}"
    for joined in scratch.glob(f"{JOINED}*"):  # of ranks that were killed
        shutil.rmtree(joined, ignore_errors=True)
    for folder in (*scratch.glob("rank-*"), scratch, *output_dir.glob("logs/rank-*/"), output_dir):
        if not folder.is_dir():
            continue
        atomic_files.remove_leftovers(folder)
        for weights in folder.glob("weights-*"):
            if not weights.match(kept):
                shutil.rmtree(weights)
        if folder != output_dir and not any(folder.iterdir()):
            folder.rmdir()


def prepare(folder: StrPath, resume_from_checkpoint: str, overwrite: bool) -> Start:
    """Decide where a run starts: nothing is changed before :meth:`Start.clear`.

    Raises:
        ValueError: there is no such checkpoint, or an earlier run stands in the way and ``overwrite`` is false.
    """
    output_dir = Path(folder)
    ledger = output_dir / ledger_module.NAME
    start: Path | None = None
    in_the_way: list[Path] = []
    damaged: dict[Path, str] = {}
    if resume_from_checkpoint == "latest":
        start, damaged = _newest_undamaged(output_dir)
        if start is None and not overwrite and ledger.exists() and (steps := len(ledger_module.read_ledger(ledger)[1])):
            raise ValueError(
                f"{ledger} has {steps} steps, and no checkpoint stands beside it, which says where the data go on; put the"
                " checkpoints back, rebuild the weights with blockwalk replay, or begin again with overwrite_output_dir: true"
            )
    elif resume_from_checkpoint:
        start = Path(resume_from_checkpoint)
        if not start.is_dir():
            raise ValueError(f"resume_from_checkpoint: {start} is not there")
        verify(start)
        if ledger.exists():
            raise ValueError(
                f"{output_dir} holds a zeroth-order run, which goes on where its ledger ends; set"
                " resume_from_checkpoint: latest"
            )
        in_the_way = [p for p in whole(output_dir) if step_of(p) > step_of(start)]
    else:
        in_the_way = [*([ledger] if ledger.exists() else []), *whole(output_dir)]
    if in_the_way and not overwrite:
        raise ValueError(
            f"{output_dir} holds an earlier run's {in_the_way[-1].name}; continue it with resume_from_checkpoint:"
            " latest, choose another output_dir, or set overwrite_output_dir: true"
        )
    if start is not None and (mark := _mark(_scalars(start))) is not None:
        ledger_module.require(ledger, mark, start)
    replaced = [str(path) for path in (*in_the_way, *damaged)]
    return Start(str(output_dir), None if start is None else str(start), replaced, list(damaged.values()))


def _newest_undamaged(output_dir: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint with the bytes that were written, if there is any; and what is wrong with the newer ones.

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
            return path, {newer: f"{why}; going on from {path.name}" for newer, why in reversed(damaged.items())}
    if damaged:
        raise ValueError(
            f"{'; '.join(damaged.values())}: no checkpoint of {output_dir} is left to go on from; choose another output_dir, or"
            " begin again with overwrite_output_dir: true and without resume_from_checkpoint"
        )
    return None, {}


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any], *, any_method: bool = False) -> list[str]:
    """The settings that a resumed run changes, as ``name: old → new``. A first-order run goes on under any first-order
    method (``any_method``). Settings that the checkpoint does not know, for it is older, had their defaults.

    Raises:
        ValueError: one of :data:`FIXED` changes.
    """
    changes, default = [], RunConfig(lora=LoraSettings()).to_mapping()
    for name, value in now.items():
        if name in ("resume_from_checkpoint", "output_dir", "overwrite_output_dir"):
            continue
        before = saved.get(name, default.get(name))
        pairs = {name: (before, value)}
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            pairs = {f"{name}.{part}": (before.get(part, default[name].get(part)), new) for part, new in value.items()}
        for key, (old, new) in pairs.items():
            fixed = name in FIXED and not key.startswith("data.eval") and not (any_method and name == "method")
            if old != new and fixed:
                raise ValueError(f"the checkpoint was made with {key}: {old}, and the run has {new}; they must agree")
            if old != new:
                changes.append(f"{key}: {old} → {new}")
    return changes

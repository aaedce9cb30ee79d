"""Checkpoints: everything that a run needs to go on as if it had never stopped, in a folder that is
whole or not there.

    output_dir/checkpoint-000123/
        state.json     step, data position, the walker's scalars, resolved configuration,
                       versions, a digest
        rank-00000.*   trainables and optimizer state, with checksums:
                       see blockwalk.checkpoints.pieces

A checkpoint is written beside its place, synced and renamed; a process killed in between leaves a
hidden leftover that :func:`latest` does not see. Tensors are written one after the other, so that
saving takes no memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import ledger as ledger_module
from blockwalk.checkpoints import marks
from blockwalk.system import atomic_files, links
from blockwalk.system.versions import installed

FORMAT = 2
SCRATCH = "scratch"
"""The walker's working folder below the run's: packed weights, and those of a zeroth-order run on
disk."""
JOINED = "joined-"
"""The beginning of the names of working folders, below :data:`SCRATCH`, of ranks that join an
elastic run."""
REPLACED = "replaced"
"""The folder in which a run that another one replaces stays until that one's first checkpoint is
whole."""
RESULTS = ("adapter", "model")
"""The folders of trained weights that a run leaves."""
CHANGED = "changed.jsonl"
"""The settings that resumed runs changed: one line for each of them that did."""
REFERENCES = "reference.jsonl"
"""The log-probabilities of an objective's reference."""
LOGS = (
    REFERENCES,
    "metrics.jsonl",
    "evaluations.jsonl",
    "skipped.jsonl",
    CHANGED,
    "config.yaml",
    "forecast.json",
    "trace.json",
)
"""Files that a run writes beside its checkpoints and its ledger."""
SCALARS = "state.json"
_NAME = re.compile(r"checkpoint-(\d{6,})")
_PARTS = re.compile(
    r"state\.json|rank-\d{5}\..+|\.(state\.json|rank-\d{5}\.json)\.[0-9a-f]{8}\.partial"
    r"|\.metadata|state\.safetensors"
)
"""Names of the files of a checkpoint, whole or half written, and of the older format."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as :func:`save` writes it and :func:`load` reads it: ``walker`` is
    ``Walker.live_state()``, for ``Walker.load_state_dict``, ``data`` the loader's."""

    step: int
    walker: dict[str, Any]
    data: dict[str, Any]
    config: dict[str, Any]
    """The resolved configuration of the run that wrote it, as ``RunConfig.to_mapping()``."""
    slices: Path | None = None
    """The folder for ``Walker.load_state``, of a first-order run; ``walker`` then holds scalars
    alone."""
    ledger: ledger_module.LedgerPosition | None = None
    """The place of the ledger's last entry, of a zeroth-order run."""


def save(output_dir: Path, made: Checkpoint, *, keep: int = 2, best: str = "") -> Path:
    """Write ``checkpoint-{step}`` of one process, and remove all but the newest ``keep`` and the
    one named ``best``. A flat tensor of ``made.walker`` may be what gives its rows one after the
    other; the rest, as ``made.data`` and ``made.config``, is what JSON can hold."""
    from blockwalk.checkpoints.distributed import write_folder
    from blockwalk.checkpoints.pieces import Pieces

    tensors = {name: value for name, value in made.walker.items() if hasattr(value, "dtype")}
    path = path_of(output_dir, made.step)
    pieces_by_name = {
        name: Pieces(prod(tensor.shape), {0: tensor}) for name, tensor in tensors.items()
    }
    write_folder(path, pieces_by_name, made.step, {SCALARS: scalars_text(made)})
    prune(output_dir, keep, best)
    return path


def path_of(output_dir: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return output_dir / f"checkpoint-{step:06d}"


def scalars_text(made: Checkpoint) -> str:
    """Return the text of the file :data:`SCALARS`, as sealed JSON: all of a checkpoint but its
    tensors."""
    state = {
        "format": FORMAT,
        "step": made.step,
        "walker": {
            name: value for name, value in made.walker.items() if not hasattr(value, "dtype")
        },
        "data": made.data,
        "config": made.config,
        "ledger": None if made.ledger is None else [made.ledger.steps, made.ledger.digest],
        "versions": installed(),
    }
    return atomic_files.seal(json.dumps(state, indent=1))[0] + "\n"


def prune(output_dir: Path, keep: int, best: str = "") -> None:
    """Remove all whole checkpoints but the newest ``keep`` and the one named ``best``, and the run
    that they replace. A link goes itself, and where it leads stays."""
    checkpoints = whole(output_dir)
    for old in checkpoints[:-keep]:
        if old.name != best:
            atomic_files.discard(old)
    if checkpoints and marks.is_ours(output_dir / REPLACED):
        with atomic_files.tolerating_use(output_dir / REPLACED):
            links.remove(output_dir / REPLACED)


def load(path: Path, *, weights: bool = True) -> Checkpoint:
    """Read a checkpoint. Its tensors are mapped from the file, not copied: do not write to them.
    Without ``weights`` its scalars alone are read.

    Raises:
        Damaged: a file of it is missing, or is not as it was written.
        ValueError: the checkpoint has another format.
    """
    from blockwalk.checkpoints import pieces

    state = read_scalars(path)
    walker = {}
    ledger = ledger_position(state)
    if ledger is not None and weights:
        with pieces.Saved(path) as saved:
            walker = {name: saved.whole(name) for name in saved.numel}
    walker |= state["walker"]
    return Checkpoint(
        state["step"],
        walker,
        state["data"],
        state["config"],
        path if ledger is None else None,
        ledger,
    )


def read_scalars(path: Path) -> dict[str, Any]:
    """Return the values that :func:`scalars_text` wrote to a checkpoint."""
    from blockwalk.checkpoints import pieces

    pieces.refuse_format_1(path)
    state = atomic_files.read_sealed(path / SCALARS)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {state.get('format')}; this version reads format"
            f" {FORMAT}"
        )
    named = _NAME.fullmatch(path.name)
    if named is not None and int(named[1]) != state.get("step"):
        raise ValueError(
            f"{path} is named like step {int(named[1])} and holds step {state.get('step')}: give it"
            " its name again, or move it away"
        )
    with atomic_files.reading(path / SCALARS):
        objects = [state[name].items() for name in ("walker", "data", "config")]
        if not isinstance(state["step"], int) or (
            state["ledger"] is not None and len(state["ledger"]) != 2
        ):
            raise TypeError(
                f"step {state['step']!r}, ledger {state['ledger']!r}, {len(objects)} objects"
            )
    return state


def ledger_position(state: Mapping[str, Any]) -> ledger_module.LedgerPosition | None:
    return None if state["ledger"] is None else ledger_module.LedgerPosition(*state["ledger"])


def has_ledger(path: Path) -> bool:
    """Return whether a checkpoint belongs to a ledger: one of a zeroth-order run does."""
    return ledger_position(read_scalars(path)) is not None


def verify(path: Path) -> None:
    """Read a checkpoint and compare every byte with its checksum.

    Raises:
        Damaged: a file of it is missing, or is not as it was written.
        ValueError: the checkpoint has another format.
    """
    from blockwalk.checkpoints import pieces

    read_scalars(path)
    with pieces.Saved(path) as saved:
        saved.verify()


def whole(output_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first: each had everything when it took its name. A
    folder of such a name with none of a checkpoint's files in it is somebody else's, and not among
    them."""
    return [path for path in named_like_checkpoints(output_dir) if is_ours(path)]


def named_like_checkpoints(output_dir: Path) -> list[Path]:
    """Return everything in a folder that is named like a checkpoint, oldest first."""
    paths = links.paths_in(output_dir)
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=step_of)


def is_ours(path: Path) -> bool:
    """Return whether a path is a folder, or a link to one, with some of a checkpoint's files in it,
    or an empty one."""
    if not path.is_dir():
        return False
    names = [file.name for file in links.paths_in(path)]
    return not names or any(map(_PARTS.fullmatch, names))


def latest(output_dir: Path) -> Path | None:
    """Return the newest checkpoint, if there is one."""
    checkpoints = whole(output_dir)
    return checkpoints[-1] if checkpoints else None


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name carries."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint, such as checkpoint-000100")
    return int(match[1])

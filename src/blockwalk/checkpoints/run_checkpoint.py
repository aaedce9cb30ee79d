"""Checkpoints: everything that a run needs to go on as if it had never stopped, in a folder that is
whole or not there.

    output_dir/checkpoint-000123/
        state.json          step, data position, the walker's scalars, resolved configuration, versions, a digest
        rank-00000.*        trainables and optimizer state, with checksums: see blockwalk.checkpoints.pieces

A checkpoint is written beside its place, synced and renamed; a process killed in between leaves a
hidden leftover that :func:`latest` does not see. Tensors are written one after the other, so that
saving takes no memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from blockwalk.checkpoints import ledger as ledger_module
from blockwalk.checkpoints import marks
from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.words import counted
from blockwalk.system import atomic_files, links
from blockwalk.system.atomic_files import Damaged
from blockwalk.system.paths import StrPath
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
LOGS = (
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
SAME_WEIGHTS = (
    "; the same content, by a digest of its configuration and weights (of a block store, its index)"
)
_NAME = re.compile(r"checkpoint-(\d{6,})")
_PARTS = re.compile(
    r"state\.json|rank-\d{5}\..+|\.(state\.json|rank-\d{5}\.json)\.[0-9a-f]{8}\.partial|\.metadata|state\.safetensors"
)
"""Names of the files of a checkpoint, whole or half written, and of the older format."""

FIXED = ("model", "method", "seed", "batch_size", "lora", "prefix", "data")
"""Settings without which the saved state means something else; any other may change when a run is
resumed, and what is evaluated (:data:`ONLY_EVALUATION`) too."""
ONLY_EVALUATION = ("data.eval", "data.shots", "data.task_part", "data.task_eval", "data.show_first")
"""The beginnings of names of settings that no training step reads."""
WORDS = ("data.template", "data.label_", "data.task")
"""The beginnings of names of settings that say which words are ranked, by ``zo.objective`` in
training too: the digest of the examples has the right words alone."""


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
    held = {name: Pieces(prod(tensor.shape), {0: tensor}) for name, tensor in tensors.items()}
    write_folder(path, held, made.step, {SCALARS: scalars_text(made)})
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
    found = whole(output_dir)
    for old in found[:-keep]:
        if old.name != best:
            atomic_files.discard(old)
    if found and marks.is_ours(output_dir / REPLACED):
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

    state = _scalars(path)
    walker = {}
    ledger = _mark(state)
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


def _scalars(path: Path) -> dict[str, Any]:
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


def _mark(state: Mapping[str, Any]) -> ledger_module.LedgerPosition | None:
    return None if state["ledger"] is None else ledger_module.LedgerPosition(*state["ledger"])


def has_ledger(path: Path) -> bool:
    """Whether a checkpoint belongs to a ledger: one of a zeroth-order run does."""
    return _mark(_scalars(path)) is not None


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
    """Return the checkpoints of a run, oldest first: each had everything when it took its name. A
    folder of such a name with none of a checkpoint's files in it is somebody else's, and not among
    them."""
    return [path for path in _named(output_dir) if is_ours(path)]


def _named(output_dir: Path) -> list[Path]:
    """Return everything in a folder that is named like a checkpoint, oldest first."""
    if not output_dir.is_dir():
        return []
    return sorted(
        (path for path in output_dir.iterdir() if _NAME.fullmatch(path.name)), key=step_of
    )


def is_ours(path: Path) -> bool:
    """Whether a path is a folder, or a link to one, with some of a checkpoint's files in it, or an
    empty one."""
    if not path.is_dir():
        return False
    names = [file.name for file in path.iterdir()]
    return not names or any(map(_PARTS.fullmatch, names))


def latest(output_dir: Path) -> Path | None:
    """Return the newest checkpoint, if there is one."""
    found = whole(output_dir)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name carries."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint, such as checkpoint-000100")
    return int(match[1])


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
        """Whether a folder with trained weights is this run's own, or may be replaced by it."""
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
        for path in (
            *map(Path, reversed(self.in_the_way)),
            *(logs if self.checkpoint is None else []),
        ):
            if (
                path.name == marks.MARK
            ):  # one that cannot be read: the mark of ``replaced`` is this run's
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
    start: Path | None = None
    in_the_way: list[Path] = []
    damaged: dict[Path, str] = {}
    foreign = [path for path in _named(output_dir) if not is_ours(path)]
    if resume_from_checkpoint == "latest":
        start, damaged = _newest_undamaged(output_dir)
        if (
            start is None
            and not overwrite
            and ledger.exists()
            and (steps := len(ledger_module.read_ledger(ledger)[1]))
        ):
            raise ValueError(
                f"{ledger} has {counted(steps, 'step')}, and no checkpoint stands beside it, which"
                " says where the data go on; put the checkpoints back, rebuild the weights with"
                " blockwalk replay, or begin again with overwrite_output_dir: true"
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
        in_the_way = [*([ledger] if os.path.lexists(ledger) else []), *whole(output_dir)]
    if in_the_way and not overwrite:
        raise ValueError(
            f"{output_dir} holds an earlier run's {in_the_way[-1].name}; continue it with"
            " resume_from_checkpoint: latest, choose another output_dir, or set"
            " overwrite_output_dir: true"
        )
    saved = None if start is None else _scalars(start)
    if start is not None and saved is not None and (mark := _mark(saved)) is not None:
        ledger_module.require(ledger, mark, start)
    goes_on = saved if start is not None and _same_folder(start.parent, output_dir) else None
    if goes_on is None and marks.run_of(output_dir) is None:
        foreign += [
            output_dir / name for name in (marks.MARK, *LOGS) if os.path.lexists(output_dir / name)
        ]
    if foreign and not overwrite:
        raise ValueError(
            f"{foreign[0]} ({kind_of(foreign[0])}) is there already, and no run made it: move it"
            " away, choose another output_dir, or set overwrite_output_dir: true, which replaces it"
        )
    in_the_way += [path for path in foreign if path not in in_the_way]
    replaced = [str(path) for path in (*in_the_way, *damaged)]
    if (
        replaced
        and os.path.lexists(output_dir / REPLACED)
        and not marks.is_ours(output_dir / REPLACED)
    ):
        raise ValueError(
            f"{output_dir / REPLACED} ({kind_of(output_dir / REPLACED)}) is there already, and no"
            " run made it; an earlier run is kept there until this one's first checkpoint: move it"
            " away, or choose another output_dir"
        )
    overwrites = overwrite or bool(goes_on and goes_on["config"].get("overwrite_output_dir"))
    run = str((goes_on or {"data": {}})["data"].get("run") or marks.new_run())
    return Start(
        output_dir=str(output_dir),
        checkpoint=None if start is None else str(start),
        in_the_way=replaced,
        damaged=list(damaged.values()),
        run=run,
        overwrites=overwrites,
    )


def refuse_result(start: Start, name: str) -> None:
    """Refuse a run whose trained weights would replace what it did not make.

    Raises:
        ValueError: the folder that they go to exists, another run or nobody of ours made it, and
            ``overwrite_output_dir`` was not set.
    """
    place = Path(start.output_dir) / name
    taken = place if os.path.lexists(place) else next(iter(atomic_files.left_aside(place)), None)
    if taken is None or start.may_replace(taken):
        return
    run = marks.run_of(taken)
    maker = (
        "this run did not make it"
        if run is None
        else f"run {run} made it, which this one does not go on with"
    )
    raise ValueError(
        f"{place} ({kind_of(taken)}) is where the trained weights would go, and {maker}: move it"
        " away, choose another output_dir, or set overwrite_output_dir: true, which replaces it"
    )


def kind_of(path: Path) -> str:
    """Return words for a path: a file, a link and where it leads, or a folder and some of what it
    holds."""
    if path.is_symlink():
        return f"a link to {os.readlink(path)}"
    if not path.is_dir():
        return "a file"
    names = sorted(each.name for each in path.iterdir())
    return (
        f"a folder with {', '.join(names[:3])}{', ...' if names[3:] else ''}"
        if names
        else "an empty folder"
    )


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


def changed_settings(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    any_method: bool = False,
    same_model: bool = False,
    same_data: bool = False,
) -> list[str]:
    """Return the settings that a resumed run changes, as ``name: old → new``. Settings that the
    checkpoint does not know, for it is older, had their defaults.

    Args:
        any_method: the run goes on under any first-order method.
        same_model: the model's content is that of the checkpoint's run, whatever its name.
        same_data: the examples are those of the checkpoint's run, whatever the settings that they
            are made by.

    Raises:
        ValueError: one of :data:`FIXED` changes, and not in name alone.
    """
    words = WORDS if (now.get("zo") or {}).get("objective", "loss") != "loss" else ()
    changes = []
    default = RunConfig(lora=LoraSettings()).to_mapping()
    for name, value in now.items():
        if name in ("resume_from_checkpoint", "output_dir", "overwrite_output_dir"):
            continue
        before = saved.get(name, default.get(name))
        pairs = {name: (before, value)}
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            pairs = {
                f"{name}.{part}": (before.get(part, default[name].get(part)), new)
                for part, new in value.items()
            }
        for key, (old, new) in pairs.items():
            if old == new:
                continue
            free = key.startswith(ONLY_EVALUATION) or (any_method and name == "method")
            alike = (name == "model" and same_model) or (
                name == "data" and same_data and not key.startswith(words)
            )
            if name in FIXED and not free and not alike:
                raise ValueError(
                    f"the checkpoint was made with {key}: {old}, and the run has {new}; they must"
                    " agree"
                )
            same = SAME_WEIGHTS if name == "model" else "; the same examples" if alike else ""
            changes.append(f"{key}: {old} → {new}{same}")
    return changes

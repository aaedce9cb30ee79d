"""Checkpoints: everything that a run needs to go on as if it had never stopped, in a folder that is whole or not there.

    output_dir/checkpoint-000123/
        state.safetensors   trainables and optimizer state; of a run over ranks instead .metadata and each rank's *.distcp
        state.json          step, data position, the walker's scalars, resolved configuration, versions

A checkpoint is written beside its place, synced and renamed; a process killed in between leaves a hidden leftover that
:func:`latest` does not see. Tensors are written one after the other, so that saving takes no memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from blockwalk import files
from blockwalk import ledger as ledger_module

FORMAT = 1
SCRATCH = "scratch"
"""The walker's working folder below the run's: packed weights, and those of a zeroth-order run on disk."""
TENSORS, SCALARS = "state.safetensors", "state.json"
SLICES = ".metadata"
"""What torch.distributed.checkpoint writes when every rank's slices are there."""
_NAME = re.compile(r"checkpoint-(\d{6,})")
_PACKAGES = ("blockwalk", "torch", "transformers", "peft", "safetensors", "numpy")

FIXED = ("model", "method", "seed", "batch_size", "lora", "data")
"""Settings without which the saved state means something else; any other may change when a run is resumed."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What :func:`load` reads: ``walker`` for ``Walker.load_state_dict``, ``data`` for the loader's."""

    step: int
    walker: dict[str, Any]
    data: dict[str, Any]
    config: dict[str, Any]
    """The resolved configuration of the run that wrote it."""
    slices: Path | None = None
    """Of a run over ranks the folder for ``Walker.load_state``; ``walker`` then holds scalars alone."""


def save(
    output_dir: Path,
    step: int,
    *,
    walker: Mapping[str, Any],
    data: Mapping[str, Any],
    config: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write ``checkpoint-{step}`` and remove all but the newest ``keep``.

    Args:
        output_dir: the run's folder.
        step: optimizer steps done.
        walker: ``Walker.live_state()``: tensors (or what gives its rows one after the other), and scalars that JSON can hold.
        data: the loader's ``state_dict()``, as JSON.
        config: ``RunConfig.to_mapping()``.
        keep: whole checkpoints that stay, this one included.
    """
    from blockwalk import safetensors_file
    from blockwalk.safetensors_file import Entry

    tensors = {name: value for name, value in walker.items() if hasattr(value, "dtype")}
    scalars = {name: value for name, value in walker.items() if name not in tensors}
    path = path_of(output_dir, step)
    with files.atomic_folder(path) as folder:
        entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        values = (piece for tensor in tensors.values() for piece in safetensors_file.pieces(tensor))
        safetensors_file.write(folder / TENSORS, entries, values)
        (folder / SCALARS).write_text(scalars_text(step, scalars, data, config), encoding="utf-8")
    prune(output_dir, keep)
    return path


def path_of(output_dir: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return output_dir / f"checkpoint-{step:06d}"


def scalars_text(step: int, walker: Mapping[str, Any], data: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What :data:`SCALARS` holds, as JSON; arguments as :func:`save`, of the walker without tensors."""
    state = {
        "format": FORMAT,
        "step": step,
        "walker": dict(walker),
        "data": dict(data),
        "config": dict(config),
        "versions": versions(),
    }
    return json.dumps(state, indent=1) + "\n"


def prune(output_dir: Path, keep: int) -> None:
    """Remove all whole checkpoints but the newest ``keep``."""
    for old in whole(output_dir)[:-keep]:
        _remove(old)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint. Its tensors are mapped from the file, not copied: do not write to them.

    Raises:
        ValueError: the folder holds no whole checkpoint, or one of another format.
    """
    from safetensors.torch import load_file

    if not _is_whole(path):
        raise ValueError(f"{path} is no checkpoint: {SCALARS} and {TENSORS} (or the slices of all ranks) must be there")
    state = json.loads((path / SCALARS).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise ValueError(f"{path} has checkpoint format {state['format']}; this version reads format {FORMAT}")
    slices = path if (path / SLICES).is_file() else None
    walker = {**({} if slices else load_file(path / TENSORS)), **state["walker"]}
    return Checkpoint(state["step"], walker, state["data"], state["config"], slices)


def whole(output_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    if not output_dir.is_dir():
        return []
    found = [p for p in output_dir.iterdir() if _NAME.fullmatch(p.name) and _is_whole(p)]
    return sorted(found, key=step_of)


def latest(output_dir: Path) -> Path | None:
    """The newest whole checkpoint, if there is one."""
    found = whole(output_dir)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    """The step that a checkpoint's name carries."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint, such as checkpoint-000100")
    return int(match[1])


def prepare(output_dir: Path, resume_from_checkpoint: str, *, overwrite: bool) -> Path | None:
    """Decide where a run starts, and clear the way for it: the checkpoint to resume from, or None for a fresh start.

    Raises:
        ValueError: there is no such checkpoint, or an earlier run stands in the way and ``overwrite`` is false.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    ledger = output_dir / ledger_module.NAME
    start: Path | None = None
    in_the_way: list[Path] = []
    if resume_from_checkpoint == "latest":
        start = latest(output_dir)
    elif resume_from_checkpoint:
        start = Path(resume_from_checkpoint)
        if not _is_whole(start):
            raise ValueError(f"resume_from_checkpoint: {start} holds no whole checkpoint")
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
    files.remove_leftovers(output_dir)
    for path in reversed(in_the_way):
        _remove(path)
    if start is None:  # what a run left that did not come to its first checkpoint
        ledger.unlink(missing_ok=True)
        shutil.rmtree(output_dir / SCRATCH, ignore_errors=True)
    return start


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any], *, any_method: bool = False) -> list[str]:
    """The settings that a resumed run changes, as ``name: old → new``. A run over ranks goes on under any first-order method,
    and one of a single process over ranks (``any_method``).

    Raises:
        ValueError: one of :data:`FIXED` changes.
    """
    changes = []
    for name, value in now.items():
        if name in ("resume_from_checkpoint", "output_dir", "overwrite_output_dir"):
            continue
        before = saved.get(name)
        pairs = {name: (before, value)}
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            pairs = {f"{name}.{part}": (before.get(part), new) for part, new in value.items()}
        for key, (old, new) in pairs.items():
            if old != new and name in FIXED and not (any_method and name == "method"):
                raise ValueError(f"the checkpoint was made with {key}: {old}, and the run has {new}; they must agree")
            if old != new:
                changes.append(f"{key}: {old} → {new}")
    return changes


def versions() -> dict[str, str]:
    """Installed versions of the packages that a run's numbers depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _is_whole(path: Path) -> bool:
    return (path / SCALARS).is_file() and ((path / TENSORS).is_file() or (path / SLICES).is_file())


def _remove(path: Path) -> None:
    """Remove a checkpoint, which stops being named like one first, or a file."""
    if path.is_file():
        path.unlink()
    else:
        hidden = path.with_name(f".{path.name}{files.PARTIAL}")
        os.rename(path, hidden)
        shutil.rmtree(hidden)

"""Places of outputs, compared with what is read to make them: a result must not lie over its own
sources."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from blockwalk.models.model_source import model_source
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath

Identity = tuple[int, int]
"""Device and inode: equal for hard links, bind mounts, and spellings that a file system takes for
one."""


def model_paths(model: StrPath) -> list[Path]:
    """Return the folder of a model, its GGUF file if it is one, and every file that a link in them
    leads to.

    Raises:
        ValueError: there is no such model.
    """
    named = [Path(model)] if os.path.exists(model) else []
    return _with_targets([*named, model_source(model).folder])


def adapter_paths(adapter: StrPath) -> list[Path]:
    """Return the folder of an adapter, and every file that a link in it leads to."""
    return _with_targets([Path(adapter)])


def data_paths(source: str) -> list[Path]:
    """Return the file of a data source, or the files of its folder; none of one on the hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        return [file for file in path.iterdir() if file.is_file()]
    return [path] if path.is_file() else []


def _with_targets(folders: list[Path]) -> list[Path]:
    links = [
        file
        for folder in folders
        if folder.is_dir()
        for file in folder.iterdir()
        if file.is_symlink()
    ]
    return [*folders, *(link.resolve() for link in links)]


def refuse_overlap(
    place: StrPath, sources: Mapping[str, list[Path]], setting: str, *, inside: bool = True
) -> None:
    """Refuse an output whose place is a source, holds one, or lies in one.

    Args:
        place: the output's path; it need not exist.
        sources: paths that are read, by what they are, such as "the model".
        setting: the setting or the argument that names another place.
        inside: whether a place in a source's folder is refused too.

    Raises:
        ValueError: it is; the message names both, and the setting.
    """
    for kind, paths in sources.items():
        for path in paths:
            relation = _relation(Path(place), path, inside)
            if relation is not None:
                raise ValueError(
                    f"{os.fspath(place)} {relation} {kind} ({path}), which is read and never"
                    f" written over: choose another {setting}"
                )


def refuse_output(out: StrPath, setting: str = "output", **sources: list[Path]) -> None:
    """Refuse an output that exists already, or lies over ``sources``, as :func:`refuse_overlap`
    says.

    Raises:
        ValueError: it does.
    """
    refuse_overlap(out, {f"the {kind}": paths for kind, paths in sources.items()}, setting)
    atomic_files.refuse_existing(out)


def _relation(place: Path, source: Path, inside: bool) -> str | None:
    """Return the relation of a place to a source, as a verb; None: they have nothing to do with one
    another."""
    real_place = Path(os.path.realpath(place))
    real_source = Path(os.path.realpath(source))
    place_identity = _identity(real_place)
    source_identity = _identity(real_source)
    if real_place == real_source or (
        place_identity is not None and place_identity == source_identity
    ):
        return "is"
    if real_source.is_relative_to(real_place) or place_identity in _around(real_source):
        return "holds"
    if source_identity in _below(real_place):
        return "holds"
    shared = _below(real_source) & _around(real_place)
    if inside and (real_place.is_relative_to(real_source) or shared):
        return "lies in"
    return None


def _identity(path: Path) -> Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _around(path: Path) -> set[Identity]:
    """Return the folders around a path, as far as they exist."""
    return {identity for folder in path.parents if (identity := _identity(folder))}


def _below(path: Path) -> set[Identity]:
    """Return a folder, if it is one, and the folders in it: one of them may be mounted elsewhere
    too."""
    return set(_identities(path)) if path.is_dir() else set()


def _identities(path: Path) -> Iterator[Identity]:
    for folder, _, _ in os.walk(path):
        if identity := _identity(Path(folder)):
            yield identity

"""Pointers of git-lfs: small text files that a clone holds in place of large ones, until ``git lfs
pull`` brings those."""

from __future__ import annotations

from pathlib import Path

from blockwalk.system.paths import StrPath

_BEGIN = b"version https://git-lfs"


def refuse_pointer(path: StrPath) -> None:
    """Check that a file is no git-lfs pointer; whatever is no file passes.

    Raises:
        ValueError: it is one.
    """
    path = Path(path)
    if not path.is_file():
        return
    with path.open("rb") as file:
        beginning = file.read(len(_BEGIN))
    if beginning == _BEGIN:
        raise ValueError(f"{path} is a git-lfs pointer, not the file: run git lfs pull")


def refuse_pointers(folder: StrPath) -> None:
    """Check that no file of a folder is a git-lfs pointer.

    Raises:
        ValueError: one is; the first by name.
    """
    for path in sorted(Path(folder).iterdir()):
        refuse_pointer(path)

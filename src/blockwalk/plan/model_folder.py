"""The folder that a user names as the model: what must lie in it, checked by name before anything is read. No torch."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

INDEX = "model.safetensors.index.json"
STORE_INDEX = "store.json"
"""The file that makes a folder a block store."""


def require_config(path: str | os.PathLike[str]) -> Path:
    """The folder of a model, which holds its ``config.json``.

    Raises:
        ValueError: there is no such folder or no ``config.json`` in it; what is there instead, and what to do.
    """
    folder = _existing(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: {folder} has no config.json{_instead(folder)}; give the folder of a model ({_FORM})")
    return folder


def require_weights(path: str | os.PathLike[str]) -> None:
    """Check that a model's folder holds weights: a block store, or safetensors that are all there.

    Raises:
        ValueError: it does not; as :func:`require_config` and :func:`checkpoint_files`.
    """
    if not (require_config(path) / STORE_INDEX).is_file():
        checkpoint_files(path)


def checkpoint_files(path: str | os.PathLike[str]) -> list[str]:
    """The safetensors files of a model folder, by name: ``model.safetensors``, or those that its index lists.

    Raises:
        ValueError: there are none, or the index lists one that is missing.
    """
    folder = _existing(path)
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if not (folder / INDEX).is_file():
        raise ValueError(f"model: {folder} has neither model.safetensors nor {INDEX}{_instead(folder)}")
    files = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"model: {folder} is incomplete: its index lists {', '.join(missing)}, which is not there")
    return files


_FORM = "config.json, *.safetensors"


def _existing(path: str | os.PathLike[str]) -> Path:
    """The folder at ``path``, or ValueError where there is none."""
    folder, name = Path(path), os.fspath(path)
    if folder.is_file():
        raise ValueError(f"model: {name} is a file; give the folder of a model ({_FORM})")
    if not folder.is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        raise ValueError(
            f"model: there is no folder {name}. Names of the hub are not read yet: download it with `hf download {name}"
            f" --local-dir {folder.name}`, and set model: {folder.name}"
        )
    if not folder.is_dir():
        raise ValueError(f"model: there is no folder {name}; give that of a downloaded model ({_FORM})")
    return folder


def _instead(folder: Path) -> str:
    """The files in a folder without safetensors that its owner may have taken for a model, in words."""
    for suffix, what in (
        (".gguf", "is GGUF, which is not read: take the safetensors that it was made from"),
        (
            ".bin",
            "must be converted to safetensors first: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        ),
    ):
        for path in sorted(folder.glob(f"*{suffix}")):
            return f"; {path.name} {what}"
    return ""

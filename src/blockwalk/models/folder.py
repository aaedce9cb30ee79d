"""The model that a user names, and the folder that it is read from. No torch.

A name is the folder of a model, a block store, a GGUF file, or a name of the hub: ``owner/name``,
``owner/name@revision``, or ``owner/name/file.gguf``. Whoever reads something of a model asks
:func:`model_folder` where it lies; what must lie there is checked by name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from blockwalk.models import gguf, hub
from blockwalk.models.quantised import quantisation
from blockwalk.plan.placement import Codec
from blockwalk.system.atomic_files import read_json, reading
from blockwalk.system.paths import StrPath

INDEX = "model.safetensors.index.json"
STORE_INDEX = "store.json"
"""The file that makes a folder a block store."""
_SINGLE = ("model.safetensors", "pytorch_model.bin")
"""The files that hold a whole checkpoint, best first; each may be cut in parts, which an index of
its name lists."""
_PART = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
"""The name of a part of a checkpoint that an index lists."""
_HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?P<file>/[^@]+\.gguf)?(@(?P<revision>.+))?")


def model_folder(name: StrPath, *, weights: bool = True) -> Path:
    """Return the folder of a model: a folder itself, the hub's files in its cache, downloaded where
    they are not there yet, or the one that stands for a GGUF file.

    ``weights=False`` is satisfied with the configuration and the tokenizer.

    Raises:
        ValueError: there is no such thing; what is there instead, and what to do.
    """
    if (file := _gguf_file(name)) is not None:
        return gguf.folder_of(file)
    path = Path(name)
    text = os.fspath(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"model: {text} is a file; give the folder of a model ({_FORM})")
    if found := _HUB_NAME.fullmatch(text):
        return _snapshot(found["repo"], found["revision"], weights=weights)
    raise ValueError(f"model: there is no folder {text}; give that of a downloaded model ({_FORM})")


def lies_in(name: StrPath) -> Codec | None:
    """Return the codec that most of a model's weights are in where it comes in codes, which are
    read as they lie; else None."""
    if (file := _gguf_file(name)) is not None:
        codec = gguf.read_header(file).main_codec
        return codec if codec.encoded else None
    found = None if Path(name).is_file() else quantisation(model_folder(name, weights=False))
    return found and found[0]


def form_of(name: StrPath) -> str:
    """Return the name of the form that most of a model's weights are in where it comes in codes, as
    its format has it; else an empty text."""
    if (file := _gguf_file(name)) is not None:
        return gguf.name_of(gguf.read_header(file).main_codec)
    codec = lies_in(name)
    return "" if codec is None else str(codec)


def _of_hub(name: StrPath) -> re.Match[str] | None:
    """Return the parts of a name of the hub; None for what is here."""
    return None if Path(name).exists() else _HUB_NAME.fullmatch(os.fspath(name))


def _gguf_file(name: StrPath) -> Path | None:
    """Return the GGUF file that a name says: itself, one of the hub's, or the only weights in a
    folder without configuration.

    Raises:
        ValueError: the hub has no such file, or a folder has several.
    """
    path = Path(name)
    found = _of_hub(name)
    if found and (file := found["file"]):
        path = (
            hub.download(found["repo"], found["revision"], gguf.pattern_of_parts(file[1:]))
            / file[1:]
        )
        if not path.is_file():
            raise ValueError(f"model: the hub's {found['repo']} has no {file[1:]}")
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").is_file() and not (path / gguf.MADE).is_file():
        return None
    files = sorted({gguf.parts_of(file)[0] for file in path.glob("*.gguf")})
    if len(files) > 1:
        raise ValueError(
            f"model: {path} holds several GGUF files, {', '.join(p.name for p in files)}: name"
            " one of them"
        )
    made = (path / gguf.MADE).is_file()
    return Path(os.readlink(files[0])) if made else files[0] if files else None


_BESIDE = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*")
"""Files beside the weights: configuration, tokenizer, the indexes of parts, licence."""


def _snapshot(repo: str, revision: str | None, *, weights: bool) -> Path:
    """Return the folder in the hub's cache that holds a repository's model."""
    folder = hub.download(repo, revision, *_BESIDE)
    for whole in _SINGLE if weights else ():
        parts = listed_parts(folder, whole)
        hub.download(repo, revision, *(parts or [whole]))
        if parts or (folder / whole).is_file():
            break
    return folder


def repository(name: StrPath) -> tuple[str, str | None]:
    """Return the name that an adapter gives its base, and the revision: of a hub's repository, with
    the GGUF file in it that was named, or the path as it is and None."""
    found = _of_hub(name)
    return (
        (found["repo"] + (found["file"] or ""), found["revision"])
        if found
        else (os.fspath(name), None)
    )


def file_of(name: StrPath, file: str) -> Path:
    """Return a file that is named by its path, or by the repository of the hub that holds it as
    ``file``."""
    found = _of_hub(name)
    return hub.download(found["repo"], found["revision"], file) / file if found else Path(name)


def require_config(name: StrPath) -> Path:
    """Return the folder of a model, which holds its ``config.json``.

    Raises:
        ValueError: there is no such folder or no ``config.json`` in it; what is there instead, and
            what to do.
    """
    folder = model_folder(name, weights=False)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model: {folder} has no config.json; give the folder of a model ({_FORM})"
        )
    return folder


def require_weights(name: StrPath) -> None:
    """Check that a model's folder holds weights: a block store, or a checkpoint that is all there.

    Raises:
        ValueError: it does not; as :func:`require_config` and :func:`checkpoint_files`.
    """
    require_config(name)
    if not (model_folder(name) / STORE_INDEX).is_file():
        checkpoint_files(name)


def checkpoint_files(name: StrPath) -> list[str]:
    """Return the files that hold a model's weights, by name: one whole file, or the parts that an
    index lists; safetensors where there are any, else ``.bin``.

    Raises:
        ValueError: there are none, or the index lists one that is missing.
    """
    folder = model_folder(name)
    for whole in _SINGLE:
        if (folder / whole).is_file():
            return [whole]
        if parts := listed_parts(folder, whole):
            missing = [part for part in parts if not (folder / part).is_file()]
            if missing:
                raise ValueError(
                    f"model: {folder} is incomplete: its index lists {', '.join(missing)}, which"
                    " is not there"
                )
            return parts
    if (folder / gguf.MADE).is_file():
        return sorted(path.name for path in folder.glob("*.gguf"))
    if parts := sorted(path.name for path in folder.iterdir() if _PART.fullmatch(path.name)):
        index = _PART.sub(r"\1.\2.index.json", parts[0])
        raise ValueError(
            f"model: {folder} holds parts of a checkpoint, {parts[0]} and {len(parts) - 1} more,"
            " and not the index that lists"
            f" them ({index}): download it too"
        )
    raise ValueError(
        f"model: {folder} has neither model.safetensors nor {INDEX}, and no pytorch_model.bin"
    )


def listed_parts(folder: Path, whole: str) -> list[str]:
    """Return the parts that a whole file is cut in, by the index of its name; none without an
    index.

    Raises:
        Damaged: the index lists no names of files beside it.
    """
    index = folder / f"{whole}.index.json"
    if not index.is_file():
        return []
    with reading(index):
        parts = sorted(set(read_json(index)["weight_map"].values()))
        if outside := [part for part in parts if Path(part).name != part]:
            raise LookupError(f"{outside[0]!r} is no name of a file beside it")
        return parts


_FORM = "config.json, *.safetensors or pytorch_model.bin; or name a .gguf file"

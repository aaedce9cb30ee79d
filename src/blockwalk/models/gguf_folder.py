"""The model folder that stands for a GGUF file: what transformers makes of its metadata, beside a
link to the file itself.

A GGUF file holds a configuration, a tokenizer and a chat template as metadata. They are written
once, in the cache, as the files of a model folder: whatever reads a model's folder reads a GGUF.
The tensors stay where they are. No torch, but in transformers, when a folder is made.

A folder's name has the state of the GGUF file (inode, size, times): another file has another
folder. :data:`MADE` has the digest of every file in it, and each process compares them."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from blockwalk.models import gguf_splits
from blockwalk.models.gguf import Header, TensorInfo, parts_of, read_header
from blockwalk.models.gguf_architectures import FACTORS
from blockwalk.models.gguf_config import settings_of
from blockwalk.plan.placement import Codec
from blockwalk.system import atomic_files, cache, versions
from blockwalk.system.file_states import FileState, state_of

log = logging.getLogger(__name__)

MADE = "gguf.json"
"""The file of a folder that stands for a GGUF file: its seal, the digests of the others."""
_FORM = 3
"""The number of the rules by which such a folder is made; another number makes it anew."""


READS_TOKENIZERS = "5.23"
"""The first version of transformers whose tokenizer of a GGUF file begins a text with the token
that the file says. Those before leave it out, in silence."""


def folder_of(path: Path) -> Path:
    """Return the model folder that stands for a GGUF file: configuration, tokenizer, chat template,
    and a link to the file, or to each of its parts.

    It is made once, in the cache folder, and again when the file changes or a bit of what was made
    does; if the cache cannot be written, for this process.

    Raises:
        ValueError: as :func:`read_header`; metadata that transformers cannot use; a file that
            changed meanwhile; or a version of transformers before :data:`READS_TOKENIZERS`.
    """
    if versions.is_older("transformers", READS_TOKENIZERS):
        raise ValueError(
            f"model: {path} is GGUF, which needs transformers {READS_TOKENIZERS} or newer: before,"
            " texts do not begin with the token that the file says. pip install -U transformers"
        )
    parts = tuple(parts_of(path.absolute()))
    states = tuple(map(state_of, parts))
    header = read_header(path)
    try:
        folder = cache.folder() / "gguf" / f"{parts[0].stem}-{_key(parts, states)}"
        if not _stands_for(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with atomic_files.in_turn(folder.with_name(f"{folder.name}.lock")):
                if not _stands_for(folder):
                    with atomic_files.atomic_folder(folder, replace=True) as new_folder:
                        _write(new_folder, parts, header)
    except OSError as error:
        log.warning(
            "the cache folder cannot be used (%s): what stands for %s is made for this process"
            " alone; BLOCKWALK_CACHE moves the cache folder",
            error,
            path,
        )
        folder = _private(parts, states)
    if tuple(map(state_of, parts)) != states:
        raise ValueError(
            f"model: {path} changed while it was read: wait until it is written, and start again"
        )
    return folder


def _key(parts: Sequence[Path], states: Sequence[FileState]) -> str:
    """Return the key of GGUF files at their places as they are now. Their device is no part of it:
    machines that share a disk know it by other numbers."""
    return cache.key(json.dumps([_FORM, list(map(str, parts)), states]).encode())


@lru_cache(8)
def _private(parts: Sequence[Path], states: Sequence[FileState]) -> Path:
    """Return a folder that stands for GGUF files in their state now, made for this process."""
    folder = Path(tempfile.mkdtemp(prefix="blockwalk-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with atomic_files.naming(folder / MADE):
        _write(folder, parts, read_header(parts[0]))
    return folder


def _stands_for(folder: Path) -> bool:
    """Whether a folder was made, and every file in it is as it was made."""
    try:
        seal = atomic_files.read_sealed(folder / MADE)
        return bool(seal["files"] == _digests(folder))
    except (OSError, ValueError, LookupError):
        return False


@lru_cache(64)
def _digest(file: Path, state: FileState) -> str:
    """Return the digest of a file; of a link, where it leads. ``state`` makes a process read a file
    again after it changed."""
    if file.is_symlink():
        return os.readlink(file)
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file in a folder but its seal, by name."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != MADE]
    return {str(file.relative_to(folder)): _digest(file, state_of(file)) for file in files}


def _write(folder: Path, parts: Sequence[Path], header: Header) -> None:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedTokenizerFast

    path = parts[0]
    settings = _settings(path, header)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        try:
            gguf_splits.pre_tokenizer(str(header.metadata.get("tokenizer.ggml.pre", "")))
        except ValueError as error:
            raise ValueError(f"model: {path} {error}") from None
    for part in parts:
        os.symlink(part, folder / part.name)
    try:
        config = AutoConfig.for_model(**settings)
        config.dtype = header.main_codec.facts.dtype or "bfloat16"
        config.save_pretrained(folder)
        if header.metadata.get("tokenizer.ggml.tokens"):
            PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=path.name).save_pretrained(
                folder
            )
            _split_in_order(folder / "tokenizer.json", header.metadata)
    except ImportError:
        raise ValueError(
            f"model: {path} is GGUF, which needs the gguf package: pip install 'blockwalk[gguf]'"
        ) from None
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        if getattr(error, "errno", None) is not None:  # of the disk, not of the metadata
            raise
        text = " ".join(str(error).split())
        raise ValueError(
            f"model: {path}: transformers cannot use its metadata: {type(error).__name__}: {text}"
        ) from None
    names = ("eos", "eot", "eom")  # llama.cpp ends generation at each
    ends = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    if stops := sorted({end for end in ends if end is not None}):
        atomic_files.write_json(folder / "generation_config.json", {"eos_token_id": stops})
    atomic_files.write_sealed(folder / MADE, {"files": _digests(folder)})


def _split_in_order(file: Path, metadata: Mapping[str, Any]) -> None:
    """Write how text is split as llama.cpp does it: transformers leaves out some names, and the
    blank before pieces."""
    values = {
        key: metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "add_space_prefix")
    }
    blank = values["add_space_prefix"] is not False
    tokenizer = atomic_files.read_json(file)
    split = gguf_splits.in_order(
        tokenizer, str(values["model"]), str(values["pre"] or ""), blank=blank
    )
    atomic_files.write_json(file, split)


def _settings(path: Path, header: Header) -> dict[str, Any]:
    """Return the settings of transformers' configuration, ``model_type`` among them."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    factors = {name: _numbers(path, tensors[name]) for name in FACTORS if name in tensors}
    try:
        return settings_of(f"model: {path}", header.metadata, shapes, factors)
    except (TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(
            f"model: {path} is altered: its metadata are of other kinds than llama.cpp's: {error}"
        ) from None


def _numbers(path: Path, tensor: TensorInfo) -> tuple[float, ...]:
    """Return the values of a vector in float32."""
    if tensor.codec is not Codec.FP32 or len(tensor.shape) != 1:
        raise ValueError(
            f"model: {path}: {tensor.name} is read as a vector in F32, and this one is"
            f" {tensor.shape} in {tensor.codec}"
        )
    with open(path.parent / tensor.file, "rb") as file:
        file.seek(tensor.offset)
        return struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.nbytes))

"""Files that ``torch.save`` wrote (``pytorch_model.bin``): where the tensors lie in them, without
reading any.

The names, shapes and dtypes are those of torch's own weights-only loader, run on fake tensors: it
answers the place of each storage in the file, unpacks no storage, and executes nothing that the
file may hold."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from blockwalk.system.atomic_files import reading
from blockwalk.system.lfs import refuse_pointer
from blockwalk.tiers.model_folder.stored import StoredTensor


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file of ``torch.save``, by name, without reading them.

    Raises:
        ValueError: another format, one from before torch 1.6, a truncated file, or one that holds
            more than named tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    advice = (
        "load it with AutoModelForCausalLM.from_pretrained(...) and save it with"
        " save_pretrained(...)"
    )
    with path.open("rb") as file:
        if (
            file.read(4) != b"PK\3\4"
        ):  # a bare pickle: torch's reader would take as many bytes as it asks for
            refuse_pointer(path)
            raise ValueError(
                f"{path} is no file of torch.save, or is in the format from before torch 1.6,"
                f" which cannot be mapped: {advice}"
            )
    _refuse_compressed(path)
    try:
        with reading(path), FakeTensorMode():
            loaded: Any = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{path} holds more than tensors, and is not read: {_first_line(error)}; {advice}"
        ) from None
    except (RuntimeError, AssertionError) as error:  # torch asserts what a crafted file says
        raise ValueError(
            f"{path} is no file of torch.save, or truncated: {_first_line(error)}"
        ) from None
    named = isinstance(loaded, dict) and all(
        isinstance(tensor, torch.Tensor) for tensor in loaded.values()
    )
    if not named or not loaded:
        raise ValueError(
            f"{path} holds {type(loaded).__name__}, not tensors by name: it is no checkpoint of a"
            " model"
        )
    size = path.stat().st_size
    tensors = {}
    for key, tensor in loaded.items():
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if begin is None:
            raise ValueError(f"{path}: {key} has no bytes of its own: {advice}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{path}: {key} is stored as a view with strides {tensor.stride()}: {advice}"
            )
        offset = begin + tensor.storage_offset() * tensor.element_size()
        nbytes = tensor.nbytes
        if offset + nbytes > size:
            raise ValueError(
                f"{path} is truncated: {key} ends at byte {offset + nbytes}, the file has {size}"
            )
        tensors[key] = StoredTensor(
            key, path.name, offset, nbytes, tensor.dtype, tuple(tensor.shape)
        )
    return tensors


def _refuse_compressed(path: Path) -> None:
    """Raise ValueError for an archive with compressed entries, which torch.save does not write: a
    few bytes of the file would unpack to any number."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type]
    except (zipfile.BadZipFile, ValueError, OSError):
        return  # which torch says in its own words
    if packed:
        raise ValueError(
            f"{path} is a zip archive with compressed entries, the first is {packed[0]!r}:"
            " torch.save compresses none, and tensors are read where they lie; save it again with"
            " torch.save"
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]

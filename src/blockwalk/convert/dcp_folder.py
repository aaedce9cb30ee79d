"""Folders of ``torch.distributed.checkpoint`` that others wrote: FSDP's and torchtitan's, with a
``.metadata`` and ``*.distcp`` files, and those of torch's Hugging Face writer, safetensors alone.

``.metadata`` is a pickle. It is read by an unpickler that knows the classes of that file and no
others, so that nothing of it is run; tensors are read by torch's weights-only loader."""

from __future__ import annotations

import io
import json
import pathlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockwalk.plan.words import counted
from blockwalk.system.atomic_files import Damaged, reading

METADATA = ".metadata"
_SHARDING = "DCP_SHARDING_INFO"
"""The key under which torch's Hugging Face writer notes where a rank's tensors begin."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath"),
    "pathlib._local": ("Path", "PosixPath"),
}
"""The globals that a checkpoint's metadata may name, by module; of ``torch`` dtypes as well."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that lies in one file: its first index and its sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(slots=True)
class SpreadTensor:
    """A tensor that ranks wrote in chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)

    def whole(self) -> Tensor:
        """Return the tensor, assembled."""
        out = torch.zeros(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            place = tuple(
                slice(offset, offset + size)
                for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            out[place] = chunk.read()
        return out


def read_folder(folder: Path) -> dict[str, SpreadTensor]:
    """Return the tensors of a folder by their names in it, none of them read yet.

    Raises:
        ValueError: it is no such folder, or its metadata names a foreign global.
        Damaged: a tensor has other elements than its shape, or a file is missing.
    """
    if (folder / METADATA).is_file():
        tensors = _of_metadata(folder)
    elif files := sorted(folder.glob("*.safetensors")):
        tensors = _of_safetensors(files)
    else:
        raise ValueError(
            f"{folder} holds neither {METADATA} nor a .safetensors file: it is no folder of"
            " torch.distributed.checkpoint"
        )
    for name, tensor in tensors.items():
        elements = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        inside = all(
            offset >= 0 and offset + size <= length
            for chunk in tensor.chunks
            for offset, size, length in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        )
        if elements != prod(tensor.shape) or not inside:
            raise Damaged(
                f"{folder} is damaged: {counted(elements, 'element')} of {name}, whose shape is"
                f" {tensor.shape}"
            )
    return tensors


class ForeignGlobal(ValueError):
    """A global in a pickle that a checkpoint's metadata has no use for."""


class _Unpickler(pickle.Unpickler):
    """A reader of metadata that makes values of the known classes alone."""

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            # a path that another system wrote is a path all the same
            if module.startswith("pathlib"):
                return pathlib.PurePosixPath
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ForeignGlobal(
            f"{self._path} names {module}.{name}, which the metadata of a checkpoint has no use"
            " for: it is not read, and nothing of it was run"
        )


def _of_metadata(folder: Path) -> dict[str, SpreadTensor]:
    from torch.distributed.checkpoint.metadata import (
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

    path = folder / METADATA
    try:
        with reading(path):
            metadata = _Unpickler(path, path.read_bytes()).load()
    except (ForeignGlobal, Damaged):
        raise
    except (pickle.UnpicklingError, EOFError, MemoryError, RuntimeError, ValueError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} holds {type(metadata).__name__}, not a checkpoint's metadata")
    tensors: dict[str, SpreadTensor] = {}
    with reading(path):
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                continue  # bytes: settings of an optimizer, counters
            dtype = stored.properties.dtype
            if not isinstance(dtype, torch.dtype) or not isinstance(name, str):
                raise TypeError(f"{name} has dtype {dtype}")
            tensor = SpreadTensor(dtype, tuple(map(index, stored.size)))
            for chunk in stored.chunks:
                info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                sizes = tuple(map(index, chunk.sizes))
                read = _slice_of(folder, name, sizes, info)
                tensor.chunks.append(Chunk(tuple(map(index, chunk.offsets)), sizes, read))
            tensors[name] = tensor
    return tensors


def _slice_of(folder: Path, name: str, sizes: tuple[int, ...], info: Any) -> Callable[[], Tensor]:
    """Return a function that reads a chunk from its place in a ``.distcp`` file."""
    path = folder / str(info.relative_path)
    offset = index(info.offset)
    length = index(info.length)
    if Path(info.relative_path).name != str(info.relative_path):
        raise ValueError(f"{folder / METADATA} names a file elsewhere: {info.relative_path}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(
            f"{path} is written with {', '.join(map(str, info.transform_descriptors))}, which is"
            " not read: save it without transforms"
        )

    def read() -> Tensor:
        try:
            with path.open("rb") as file, reading(path):
                file.seek(offset)
                data = io.BytesIO(file.read(length))
                tensor = torch.load(data, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            text = str(error).partition("\n")[0]
            raise Damaged(f"{path} does not hold {name}: {text}") from None
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
            raise Damaged(f"{path} is damaged: what it holds of {name} is not {sizes}")
        return tensor.detach()

    return read


def _of_safetensors(files: Sequence[Path]) -> dict[str, SpreadTensor]:
    from safetensors import safe_open

    from blockwalk.tiers.model_folder.safetensors import read_header

    tensors: dict[str, SpreadTensor] = {}
    for path in files:
        stored = read_header(path)  # which refuses what is none, and what is truncated
        with safe_open(path, framework="pt") as file, reading(path):
            places = json.loads((file.metadata() or {}).get(_SHARDING, "{}"))
            for name, entry in stored.items():
                saved = places.get(name, {}).get("saved_offsets", [0] * len(entry.shape))
                offsets = tuple(map(int, saved))
                shape = tuple(
                    offset + size for offset, size in zip(offsets, entry.shape, strict=True)
                )
                tensor = tensors.setdefault(name, SpreadTensor(entry.dtype, shape))
                tensor.shape = tuple(map(max, zip(tensor.shape, shape, strict=True)))
                tensor.chunks.append(Chunk(offsets, entry.shape, _tensor_of(path, name)))
    return tensors


def _tensor_of(path: Path, name: str) -> Callable[[], Tensor]:
    """Return a function that reads a tensor of a safetensors file."""

    def read() -> Tensor:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return read

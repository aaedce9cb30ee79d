"""The safetensors format (github.com/huggingface/safetensors): 8 bytes little-endian length, a JSON header, the bytes.

Reading gives places in a file, never tensors, so that a map can serve them; writing takes tensors a piece at a time.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.models.folder import INDEX
from blockwalk.numerics.codecs.weights import Value
from blockwalk.plan.sizes import spans
from blockwalk.system.atomic_files import naming, reading, write_json
from blockwalk.system.paths import StrPath
from blockwalk.tiers.model_folder.stored import StoredTensor

DTYPE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of dtypes, as torch's."""
_NAME = {dtype: name for name, dtype in DTYPE.items()}
SHARD_BYTES = 5_000_000_000
"""The most bytes of tensors in one file, as Hugging Face cuts them."""


def read_header(path: StrPath) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name, without reading them.

    Raises:
        ValueError: another format, a truncated file, or a dtype that we do not know.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{path} is no safetensors file, or truncated: {size} bytes, header of {length}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no safetensors file: its header is not JSON ({error})") from None
    tensors: dict[str, StoredTensor] = {}
    with reading(path):
        header.pop("__metadata__", None)
        for key, entry in header.items():
            start, stop = map(operator.index, entry["data_offsets"])
            if entry["dtype"] not in DTYPE:
                raise ValueError(f"{path}: {key} has dtype {entry['dtype']}, which we cannot read")
            dtype, shape = DTYPE[entry["dtype"]], tuple(map(operator.index, entry["shape"]))
            if min((start, *shape)) < 0 or stop - start != prod(shape) * dtype.itemsize:
                raise ValueError(
                    f"{path}: {key} has {stop - start} bytes from {start} on, but its shape {shape} in {dtype} says otherwise"
                )
            if 8 + length + stop > size:
                raise ValueError(f"{path} is truncated: {key} ends at byte {8 + length + stop}, the file has {size}")
            tensors[key] = StoredTensor(key, path.name, 8 + length + start, stop - start, dtype, shape)
    return tensors


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written: its shape and dtype, known before its values are."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write(path: StrPath, entries: Mapping[str, Entry], pieces: Iterable[Tensor]) -> None:
    """Write a safetensors file in pieces, holding one piece at a time.

    Args:
        path: the file; it is not synced.
        entries: the tensors, in the order of the file.
        pieces: their values in that order, each tensor in one piece or several; a piece is of its tensor's dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        stop = offset + entry.nbytes
        header[name] = {"dtype": _NAME[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    written = 0
    with naming(path, 8 + len(text) + offset), open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            flat = piece.detach().to("cpu").contiguous().reshape(-1)
            written += file.write(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
    assert written == offset, f"{path}: {written} bytes of {offset} were given"


def write_shards(folder: Path, entries: Mapping[str, Entry], values: Callable[[str], Iterable[Tensor]]) -> None:
    """Write a model's tensors, in order, under the names that Hugging Face gives the files; one that is larger than
    :data:`SHARD_BYTES` stands alone.

    Args:
        folder: where they go, with their index where they are several; tensors are not synced.
        entries: the tensors.
        values: answers those of one, in one piece or several; asked in order, once each.
    """
    parts: list[dict[str, Entry]] = [{}]
    room = SHARD_BYTES
    for name, entry in entries.items():
        if parts[-1] and entry.nbytes > room:
            parts.append({})
            room = SHARD_BYTES
        parts[-1][name] = entry
        room -= entry.nbytes
    files: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write(folder / file, part, chain.from_iterable(map(values, part)))
        files |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = sum(entry.nbytes for entry in entries.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def save_model(folder: StrPath, model: nn.Module, weights: Mapping[str, Value]) -> None:
    """Write a model folder: its configuration, and ``weights`` by canonical name, a few rows of each at a time.

    Args:
        folder: made where it is not there; nothing in it is synced.
        model: the transformers model, for its configurations alone.
        weights: every parameter and persistent buffer once, in the order of the files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    configured: Any = model
    for config in (configured.config, getattr(configured, "generation_config", None)):
        if config is not None:
            config.save_pretrained(folder)
    entries = {name: Entry(tuple(weight.shape), weight.dtype) for name, weight in weights.items()}
    write_shards(folder, entries, lambda name: pieces(weights[name]))


def pieces(weight: Value, elements: int = 1 << 22) -> Iterator[Tensor]:
    """A parameter's values, at most ``elements`` at a time, as whole rows; a tensor is one piece, since writing it takes no
    copy."""
    if isinstance(weight, Tensor):
        yield weight
        return
    rows, columns = weight.shape[0], prod(weight.shape[1:])
    some = max(1, elements // columns)
    for start, stop in spans(0, rows, some):
        yield weight.rows(start, stop)

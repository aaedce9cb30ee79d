"""The safetensors format (github.com/huggingface/safetensors): 8 bytes little-endian length, a JSON
header, the bytes.

Reading gives places in a file, never tensors, so that a map can serve them; writing takes tensors a
piece at a time."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from blockwalk.models.model_source import INDEX
from blockwalk.models.safetensors_file import DTYPE as DTYPE
from blockwalk.models.safetensors_file import Entry as Entry
from blockwalk.models.safetensors_file import write as write
from blockwalk.numerics.codecs.weights import Value
from blockwalk.plan.sizes import spans
from blockwalk.system.atomic_files import reading, write_json
from blockwalk.system.lfs import refuse_pointer
from blockwalk.system.paths import StrPath
from blockwalk.tiers.model_folder.stored import StoredTensor

SHARD_BYTES = 5_000_000_000
"""The most bytes of tensors in one file, as Hugging Face cuts them."""


def read_header(path: StrPath) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by name, without reading them.

    Raises:
        ValueError: another format, a git-lfs pointer, a truncated file, or a dtype that we do not
            know.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            refuse_pointer(path)
            raise ValueError(
                f"{path} is no safetensors file, or truncated: {size} bytes, header of {length}"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is no safetensors file: its header is not JSON ({error})"
            ) from None
    tensors: dict[str, StoredTensor] = {}
    with reading(path):
        header.pop("__metadata__", None)
        for key, entry in header.items():
            start, stop = map(operator.index, entry["data_offsets"])
            if entry["dtype"] not in DTYPE:
                raise ValueError(f"{path}: {key} has dtype {entry['dtype']}, which we cannot read")
            dtype = DTYPE[entry["dtype"]]
            shape = tuple(map(operator.index, entry["shape"]))
            if min((start, *shape)) < 0 or stop - start != prod(shape) * dtype.itemsize:
                raise ValueError(
                    f"{path}: {key} has {stop - start} bytes from {start} on, but its shape"
                    f" {shape} in {dtype} says otherwise"
                )
            if 8 + length + stop > size:
                raise ValueError(
                    f"{path} is truncated: {key} ends at byte {8 + length + stop}, the file has"
                    f" {size}"
                )
            tensors[key] = StoredTensor(
                key, path.name, 8 + length + start, stop - start, dtype, shape
            )
    return tensors


def write_shards(
    folder: Path, entries: Mapping[str, Entry], values: Callable[[str], Iterable[Tensor]]
) -> None:
    """Write a model's tensors, in order, under the names that Hugging Face gives the files; one
    that is larger than :data:`SHARD_BYTES` stands alone.

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
        file = (
            "model.safetensors"
            if len(parts) == 1
            else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        )
        write(folder / file, part, chain.from_iterable(map(values, part)))
        files |= dict.fromkeys(part, file)
    if len(parts) > 1:
        total = sum(entry.nbytes for entry in entries.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def save_model(
    folder: StrPath,
    model: nn.Module,
    weights: Mapping[str, Value],
    begin: Callable[[str], object] = lambda _: None,
) -> None:
    """Write a model folder: its configuration, and ``weights`` by canonical name, a few rows of
    each at a time.

    Args:
        folder: made where it is not there; nothing in it is synced.
        model: the transformers model, for its configurations alone.
        weights: every parameter and persistent buffer once, in the order of the files.
        begin: told the name of each before its values are asked for.
    """
    entries = {name: Entry(tuple(weight.shape), weight.dtype) for name, weight in weights.items()}

    def values(name: str) -> Iterator[Tensor]:
        begin(name)
        yield from pieces(weights[name])

    save_tensors(folder, model, entries, values)


def save_tensors(
    folder: StrPath,
    model: nn.Module,
    entries: Mapping[str, Entry],
    values: Callable[[str], Iterable[Tensor]],
) -> None:
    """Write a model folder: its configuration, and tensors as :func:`write_shards` takes them.

    Args:
        folder: made where it is not there; nothing in it is synced.
        model: the transformers model, for its configurations alone.
        entries: the tensors.
        values: answers those of one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    configured: Any = model
    for config in (configured.config, getattr(configured, "generation_config", None)):
        if config is not None:
            config.save_pretrained(folder)
    write_shards(folder, entries, values)


def pieces(weight: Value, elements: int = 1 << 22) -> Iterator[Tensor]:
    """Yield a parameter's values, at most ``elements`` at a time, as whole rows; a tensor is one
    piece, since writing it takes no copy."""
    if isinstance(weight, Tensor):
        yield weight
        return
    rows = weight.shape[0]
    columns = prod(weight.shape[1:])
    for start, stop in spans(0, rows, max(1, elements // columns)):
        yield weight.rows(start, stop)

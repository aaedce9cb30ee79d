"""Writing a block store: streaming, atomic, a few rows of one parameter at a time (format:
docs/block-store.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from blockwalk.models.gguf_folder import MADE
from blockwalk.models.model_source import model_source
from blockwalk.models.quantised import KEYS
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import FORMAT_VERSION, name_of
from blockwalk.numerics.codecs.weights import EncodedWeight, Value
from blockwalk.plan.model_spec import ModelSpec, encoded_nbytes
from blockwalk.plan.placement import Codec
from blockwalk.plan.sizes import spans
from blockwalk.plan.words import counted
from blockwalk.system import atomic_files
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.store import (
    BUFFERS,
    FORMAT,
    INDEX,
    VERSION,
    StoredParam,
    StoredUnit,
    StoreIndex,
    UnitHeader,
    crc32,
    side_by_side,
)
from blockwalk.tiers.disk import MappedFile
from blockwalk.tiers.protocols import TensorSource

CHUNK_ELEMENTS = 1 << 20
"""Elements of a parameter that are encoded between two releases of pages."""
TEMPLATES = "additional_chat_templates"
"""The folder in which transformers saves chat templates beside the first."""
COPIED = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Endings of files that are copied beside the weights: configuration, chat template, vocabulary.
Never weights, nor their index."""


def plan_units(
    source: TensorSource, spec: ModelSpec, codec: Codec, group_size: int
) -> tuple[StoredUnit, ...]:
    """Return the units of a store, with the place of every parameter: those of ``spec`` in order,
    then one of the other tensors that ``source`` has, the persistent buffers.

    Raises:
        ValueError: the source lacks a parameter of the model, by name.
    """
    available = dict.fromkeys(source.names())
    missing = [param.name for param in spec.params() if param.name not in available]
    if missing:
        raise ValueError(
            f"the source of {spec.name} lacks {counted(len(missing), 'parameter')}:"
            f" {', '.join(missing[:8])}"
        )
    plain = Codec.RAW if codec.encoded else codec  # codes are for the quantizable
    units = [
        (u.name, u.kind, [(p.name, codec if p.quantizable else plain) for p in u.params])
        for u in spec.units
    ]
    for param in spec.params():
        del available[param.name]
    if available:
        units.append((BUFFERS, BUFFERS, [(name, Codec.RAW) for name in available]))
    stored = []
    for number, (name, kind, members) in enumerate(units):
        params = []
        for member, written_as in members:
            shape = source.shape(member)
            dtype = name_of(source.dtype(member))
            nbytes = encoded_nbytes(shape, dtype, written_as, group_size)
            params.append(StoredParam(member, written_as, shape, dtype, 0, nbytes, 0))
        placed, end = side_by_side(params)
        stored.append(StoredUnit(name, kind, f"unit-{number:05d}.bin", end, placed))
    return tuple(stored)


def write_store(
    path: StrPath,
    source: TensorSource,
    spec: ModelSpec,
    codec: Codec,
    *,
    group_size: int = 32,
    generations: int = 1,
    runs: Mapping[int, StoredParam] = MappingProxyType({}),
    made: Mapping[str, Callable[[], Value]] = MappingProxyType({}),
    copy_from: StrPath | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a block store, streaming: the store's own pages and a few rows are all that is held,
    unless a parameter has to be fused from several tensors, which takes that parameter's size once.

    Args:
        path: the folder to make. It appears, synced, when everything is in it.
        source: the weights.
        spec: the units to cut them into.
        codec: for the quantizable parameters (a plain dtype: for all); the others stay as they are.
        group_size: 32 or 64 elements to a scale, for int4.
        generations: 1 to be read, 2 to be written in training.
        runs: the one parameter, of bytes, that stands for a unit's own, by the unit's number.
        made: functions that make parameters which are not read from ``source`` as they are, by
            name.
        copy_from: a model folder whose configuration and tokenizer files are copied.
        progress: called with (bytes written, bytes in all) now and then.

    Raises:
        ValueError: ``path`` exists, the disk is too full, the source lacks a parameter, or a value
            does not fit the codec.
    """
    atomic_files.refuse_existing(path)
    units = tuple(
        replace(unit, nbytes=runs[n].nbytes, params=(runs[n],)) if n in runs else unit
        for n, unit in enumerate(plan_units(source, spec, codec, group_size))
    )
    index = StoreIndex(spec.name, codec, FORMAT_VERSION, group_size, generations, spec.tied, units)
    atomic_files.require_space(path, index.nbytes, f"the block store of {spec.name} in {codec}")
    written_bytes = 0
    total = sum(unit.nbytes for unit in units)

    def value(name: str) -> Value:
        return made[name]() if name in made else source.weights([name])[name]

    with atomic_files.atomic_folder(path, sweeps=True) as folder:
        if copy_from is not None:
            copy_model_files(copy_from, folder)
        written_units = []
        for number, unit in enumerate(units):
            with MappedFile(folder / unit.file, length=unit.area_offset(generations)) as file:
                header = UnitHeader(number, generations, 0, 1, 0, unit.nbytes).pack()
                file.bytes_P[: len(header)].copy_(
                    torch.frombuffer(bytearray(header), dtype=torch.uint8)
                )
                params = []
                for param in unit.params:
                    area = (unit.area_offset(0) + param.offset, param.nbytes)
                    area_P = file.bytes_P[area[0] : sum(area)]
                    for rows in encode(value(param.name), param, group_size, area_P):
                        file.dont_need([area])
                        source.release([param.name])
                        if progress is not None:
                            all_rows = max(1, param.layout(group_size).rows)
                            progress(written_bytes + param.nbytes * rows // all_rows, total)
                    written_bytes += param.nbytes
                    params.append(replace(param, crc32=crc32(area_P)))
                    file.dont_need([area])
                    source.release([param.name])
            written_units.append(replace(unit, params=tuple(params)))
        head = {"format": FORMAT, "version": VERSION}
        atomic_files.write_sealed(
            folder / INDEX, {**head, **asdict(replace(index, units=tuple(written_units)))}
        )


def encode(weight: Value, param: StoredParam, group_size: int, bytes_P: Tensor) -> Iterator[int]:
    """Encode one parameter into its bytes (CPU uint8), a few rows at a time, and yield the number
    of rows done. Where the C kernel does all of the work, as many threads as torch has encode rows
    side by side: none of them waits for another at the end of a few rows."""
    layout = param.layout(group_size)
    if isinstance(weight, EncodedWeight) and weight.layout == layout:
        weight.together(bytes_P)
        yield layout.rows
        return
    if isinstance(weight, EncodedWeight) and len(weight.shape) > 2:
        experts = weight
        weight = torch.empty(weight.shape, dtype=weight.dtype)
        experts.read_into(weight)
    chunk_rows = max(1, CHUNK_ELEMENTS // max(1, layout.columns))
    rows_RD = weight.reshape(layout.rows, layout.columns) if isinstance(weight, Tensor) else weight

    def encoded(span: tuple[int, int], threads: int | None = None) -> int:
        start, stop = span
        part_RD = rows_RD[start:stop] if isinstance(rows_RD, Tensor) else rows_RD.rows(start, stop)
        codecs.encode_rows(part_RD, bytes_P, layout, start, name=param.name, threads=threads)
        return stop

    chunks = spans(0, layout.rows, chunk_rows)
    if isinstance(rows_RD, Tensor) and codecs.encodes_groups(layout, rows_RD):
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            yield from pool.map(partial(encoded, threads=1), chunks)
    else:
        yield from map(encoded, chunks)


def copy_model_files(source: StrPath, target: StrPath) -> None:
    """Copy a model folder's configuration and tokenizer files, and its licence."""
    for name, content in model_files(source):
        (Path(target) / name).parent.mkdir(exist_ok=True)
        (Path(target) / name).write_bytes(content)


def restore_model_files(source: StrPath, target: StrPath) -> None:
    """Write those files of :func:`copy_model_files` anew that differ from the model's, or are
    missing: a bit of a copy has changed, or the model's own file has."""
    for name, content in model_files(source):
        copy = Path(target) / name
        if not copy.is_file() or copy.read_bytes() != content:
            copy.parent.mkdir(exist_ok=True)
            atomic_files.write_bytes(copy, content)


def model_files(source: StrPath) -> Iterator[tuple[str, bytes]]:
    """Yield a model folder's configuration and tokenizer files, and its licence: the name below the
    folder, and the content that stands beside weights which are not quantised."""
    model = model_source(source)
    folder = model.folder
    for file in sorted(folder.iterdir()):
        licence = file.name.upper().startswith(("LICENSE", "NOTICE"))
        of_weights = file.name in (INDEX, MADE) or file.name.endswith(".index.json")
        if of_weights or not (licence or file.name.endswith(COPIED)) or not file.is_file():
            continue
        content = file.read_bytes()
        if file.name == "config.json" and model.quantisation is not None:
            values = {key: value for key, value in json.loads(content).items() if key not in KEYS}
            content = atomic_files.json_bytes(values)
        yield file.name, content
    for file in sorted((folder / TEMPLATES).glob("*.jinja")):
        yield f"{TEMPLATES}/{file.name}", file.read_bytes()

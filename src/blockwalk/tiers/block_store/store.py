"""The block store: a model folder whose weights lie unit by unit, encoded, checksummed
(docs/block-store.md).

    config.json, tokenizer files      copied from the checkpoint folder
    store.json                        format, version, codec, and where each parameter lies
    unit-00000.bin ...                one file a unit: two header pages, then one or two data areas

A store of one generation is written once and read through maps (:class:`BlockStore`). In a store of
two generations (:class:`blockwalk.tiers.block_store.writable.WritableStore`) each unit has two
areas: the next contents go into the idle one, and its header page, with a checksum of its own, then
says that this area is the newer."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from isal import isal_zlib
from torch import Tensor

from blockwalk.models.model_source import STORE_INDEX
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import FORMAT_VERSION, Layout, dtype_of
from blockwalk.numerics.codecs.weights import Value, opened
from blockwalk.plan import sizes
from blockwalk.plan.parsing import from_plain
from blockwalk.plan.placement import Codec
from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import Damaged
from blockwalk.system.paths import StrPath
from blockwalk.tiers.disk import MappedFile

FORMAT = "blockwalk-store"
VERSION = 2
INDEX = STORE_INDEX
MAGIC = b"BLKWUNIT"
HEADER_PAGE = 4096
"""Bytes of a header page; the areas of a unit file are multiples of it."""
DATA_START = 2 * HEADER_PAGE
_HEADER = struct.Struct("<8sIIIIQqQI")  # magic, version, then UnitHeader's fields; then a crc32
BUFFERS = "buffers"
"""The unit, after the model's own, that holds persistent buffers; absent where there are none."""


@dataclass(frozen=True, slots=True)
class StoredParam:
    """One parameter of a unit: how it is written, and where (offset in the unit's data, bytes)."""

    name: str
    codec: Codec
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the dtype before encoding: raw bytes are in it, and int8, int4 and fp8 decode
    to it."""
    offset: int
    nbytes: int
    crc32: int

    def layout(self, group_size: int) -> Layout:
        """Return the layout of the parameter's bytes."""
        return Layout(self.shape, self.codec, self.dtype, group_size)

    @property
    def dense(self) -> bool:
        """Whether the bytes are a plain tensor's."""
        return not self.codec.encoded

    def decoded_dtype(self) -> torch.dtype:
        """Return the dtype that the parameter has when it is used as it lies."""
        return dtype_of(self.codec.dtype_of(self.dtype))

    def open(self, bytes_P: Tensor, group_size: int) -> Value:
        """Return the parameter over its bytes (uint8 [nbytes]), see
        :func:`~blockwalk.numerics.codecs.weights.opened`."""
        return opened(self.layout(group_size), bytes_P)


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """One unit of the walk and its data file; ``nbytes`` is one area's contents."""

    name: str
    kind: str
    file: str
    nbytes: int
    params: tuple[StoredParam, ...]

    @property
    def area_nbytes(self) -> int:
        return -(-self.nbytes // HEADER_PAGE) * HEADER_PAGE

    def area_offset(self, area: int) -> int:
        """Return bytes from the start of the file to the data of ``area`` (0 or 1)."""
        return DATA_START + area * self.area_nbytes


@dataclass(frozen=True, slots=True)
class UnitHeader:
    """A unit file's header: the area that holds its contents, and the step after which they were
    written. ``crc32`` is that of the bytes that training wrote; as packed (sequence 1) it is 0, and
    the index has one of each parameter."""

    unit: int
    generations: int
    area: int
    sequence: int
    step: int
    nbytes: int
    crc32: int = 0

    def pack(self) -> bytes:
        """Return the header as it stands at the start of its page, its own checksum included."""
        head = _HEADER.pack(MAGIC, VERSION, *astuple(self))
        return head + struct.pack("<I", isal_zlib.crc32(head))


def unpack_header(data: bytes) -> UnitHeader | None:
    """Return the header in a page, or None where the page holds none that is whole (never written,
    or torn)."""
    if len(data) < _HEADER.size + 4 or data[: len(MAGIC)] != MAGIC:
        return None
    head = data[: _HEADER.size]
    if struct.unpack_from("<I", data, _HEADER.size)[0] != isal_zlib.crc32(head):
        return None
    _, version, *fields = _HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(
            f"a unit file has format version {version}; this version of blockwalk reads {VERSION}"
        )
    return UnitHeader(*fields)


def read_unit_headers(
    file: MappedFile, index: int, unit: StoredUnit, generations: int
) -> list[UnitHeader]:
    """Return the whole headers of a unit file, the newest first.

    Raises:
        ValueError: the file is truncated, is no unit file, or is another unit's.
    """
    path = file.path
    end = unit.area_offset(generations)
    if file.nbytes < end:
        raise ValueError(
            f"{path} is truncated: {file.nbytes} bytes of {end}; pack or copy the store again"
        )
    pages = [bytes(page_P.numpy()) for page_P in file.bytes_P[:DATA_START].chunk(2)]
    if not any(page.startswith(MAGIC) for page in pages):
        raise ValueError(
            f"{path} is no unit file of a block store: it does not start with {MAGIC.decode()}"
        )
    headers = [header for header in map(unpack_header, pages) if header is not None]
    if not headers:
        raise ValueError(f"{path} is damaged: neither of its headers is whole")
    headers.sort(key=lambda header: header.sequence, reverse=True)
    newest = headers[0]
    if (newest.unit, newest.nbytes, newest.generations) != (index, unit.nbytes, generations):
        raise ValueError(
            f"{path} is not unit {index} of this store ({unit.nbytes} bytes): {newest}"
        )
    return headers


def side_by_side(params: Iterable[StoredParam]) -> tuple[tuple[StoredParam, ...], int]:
    """Return the parameters of a unit, one after the other; and the bytes of all."""
    params = tuple(params)
    starts, end = sizes.side_by_side(param.nbytes for param in params)
    return tuple(
        replace(param, offset=start) for param, start in zip(params, starts, strict=True)
    ), end


class CheckedPart(NamedTuple):
    """A part of a unit file that has one checksum: a parameter as it was packed, or all that
    training wrote of a unit."""

    name: str
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    crc32: int


def part_of(unit: StoredUnit, header: UnitHeader, param: StoredParam) -> CheckedPart:
    """Return the part that holds a parameter, in the area that a header is of."""
    start = unit.area_offset(header.area)
    if header.sequence > 1:
        return CheckedPart(unit.name, start, unit.nbytes, header.crc32)
    return CheckedPart(param.name, start + param.offset, param.nbytes, param.crc32)


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """The contents of ``store.json``."""

    model: str
    codec: Codec
    codec_version: int
    group_size: int
    generations: int
    tied: tuple[tuple[str, str], ...]
    units: tuple[StoredUnit, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all unit files."""
        return sum(unit.area_offset(self.generations) for unit in self.units)


def is_store(path: StrPath) -> bool:
    """Whether a folder is a block store."""
    return (Path(path) / INDEX).is_file()


def read_index(path: StrPath) -> StoreIndex:
    """Read ``store.json``.

    Raises:
        ValueError: the folder is no block store, or one of another version, or its index is
            damaged.
    """
    file = Path(path) / INDEX
    if not file.is_file():
        raise ValueError(
            f"{path} is no block store: it has no {INDEX}; make one with `blockwalk pack`"
        )
    value = atomic_files.read_sealed(file)
    if value.pop("format", None) != FORMAT:
        raise ValueError(f"{file} is no block store's: its format is not {FORMAT!r}")
    versions = (value.pop("version", None), value.get("codec_version"))
    if versions != (VERSION, FORMAT_VERSION):
        raise ValueError(
            f"{path} has block store version {versions[0]} and codec version {versions[1]}; this"
            f" version of blockwalk reads {VERSION} and {FORMAT_VERSION}: pack the model again"
        )
    try:
        index: StoreIndex = from_plain(StoreIndex, value)
        if index.generations not in (1, 2):
            raise ValueError(f"generations is {index.generations!r}, not 1 or 2")
        for unit in index.units:
            _require_inside(unit, index.group_size)
        return index
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from None


def _require_inside(unit: StoredUnit, group_size: int) -> None:
    """Raise ValueError where an index, which may be anybody's, leads out of its folder or out of a
    unit's bytes: the kernels that decode look at no bounds."""
    if Path(unit.file).name != unit.file:
        raise ValueError(
            f"the file of {unit.name}, {unit.file!r}, is no name of a file beside the index"
        )
    for param in unit.params:
        nbytes = param.layout(group_size).nbytes
        if (
            min((param.offset, *param.shape)) < 0
            or nbytes != param.nbytes
            or param.offset + nbytes > unit.nbytes
        ):
            raise ValueError(
                f"{param.name} has {param.nbytes} bytes at {param.offset}, {nbytes} by its shape"
                f" {param.shape}"
            )


class BlockStore:
    """A block store, read-only: a WeightSource. Dense codecs are views of the map, the others
    Weights over it.

    A store of two generations is read as it stands when it is opened; do not write to it meanwhile.

    Raises:
        ValueError: no store, another version, or a unit file that is missing, truncated or not the
            one it should be.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self.index = read_index(self.path)
        self.steps: list[int] = []
        """The step after which each unit was written; 0 as it was packed."""
        self._files: list[MappedFile] = []
        self._headers: list[UnitHeader] = []
        self._where: dict[str, tuple[int, int, StoredParam]] = {}
        self._verified: set[str] = set()
        try:
            for number, unit in enumerate(self.index.units):
                self._open(number, unit)
        except BaseException:
            self.close()
            raise

    def _open(self, number: int, unit: StoredUnit) -> None:
        path = self.path / unit.file
        if not path.is_file():
            raise ValueError(f"{self.path} is incomplete: {unit.file} ({unit.name}) is missing")
        self._files.append(MappedFile(path))
        header = read_unit_headers(self._files[-1], number, unit, self.index.generations)[0]
        self.steps.append(header.step)
        self._headers.append(header)
        for param in unit.params:
            self._where[param.name] = (number, unit.area_offset(header.area) + param.offset, param)

    def names(self) -> Sequence[str]:
        return tuple(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name][2].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._where[name][2].decoded_dtype()

    def stored_as(self, name: str) -> Layout:
        return self._where[name][2].layout(self.index.group_size)

    def weights(self, names: Iterable[str]) -> dict[str, Value]:
        names = list(names)
        self.verify(names)
        return {
            name: self._where[name][2].open(self._bytes(name), self.index.group_size)
            for name in names
        }

    def _bytes(self, name: str) -> Tensor:
        number, offset, param = self._where[name]
        return self._files[number].view(offset, param.nbytes, torch.uint8, (param.nbytes,))

    def in_place(self, name: str) -> bool:
        return self._where[name] is not None

    def read_into(self, name: str, out: Tensor) -> None:
        param = self._where[name][2]
        if tuple(out.shape) != param.shape:
            raise ValueError(
                f"{name} has shape {param.shape}, the buffer given has {tuple(out.shape)}"
            )
        self.verify([name])
        layout = param.layout(self.index.group_size)
        codecs.decode_rows(
            self._bytes(name), layout, 0, layout.rows, out.view(layout.rows, layout.columns)
        )

    def read_range_into(self, name: str, start: int, out_P: Tensor) -> None:
        whole = torch.empty(self.shape(name), dtype=out_P.dtype)
        self.read_into(name, whole)
        out_P.copy_(whole.view(-1)[start : start + len(out_P)])

    def _ranges(self, names: Iterable[str]) -> dict[int, list[tuple[int, int]]]:
        ranges: dict[int, list[tuple[int, int]]] = {}
        for number, offset, param in (self._where[name] for name in names):
            ranges.setdefault(number, []).append((offset, param.nbytes))
        return ranges

    def prefetch(self, names: Iterable[str]) -> int:
        return sum(
            self._files[number].will_need(ranges) for number, ranges in self._ranges(names).items()
        )

    def release(self, names: Iterable[str]) -> None:
        for number, ranges in self._ranges(names).items():
            self._files[number].dont_need(ranges)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare the checksums of parameters, all unless given, once each; of a unit that training
        wrote, the unit's.

        Raises:
            Damaged: bytes are not those that were written; the message names the parameters or the
                unit.
        """
        damaged = []
        for name in self._where if names is None else names:
            number, _, param = self._where[name]
            unit = self.index.units[number]
            part = part_of(unit, self._headers[number], param)
            if part.name not in self._verified:
                if (
                    crc32(self._files[number].bytes_P[part.offset : part.offset + part.nbytes])
                    != part.crc32
                ):
                    damaged.append(f"{part.name} in {unit.file}")
                self._files[number].dont_need([(part.offset, part.nbytes)])
                self._verified.add(part.name)
        if damaged:
            raise Damaged(
                f"{self.path} is damaged: checksums differ for {', '.join(damaged)}; pack or copy"
                " the model again"
            )

    def close(self) -> None:
        for file in self._files:
            file.close()


def crc32(bytes_P: Tensor, before: int = 0) -> int:
    """CRC-32 of a uint8 tensor, or of it after bytes whose own is ``before``: zlib's value at ten
    times its speed, since a lane that writes blocks back must leave the cores to those that
    compute."""
    return isal_zlib.crc32(bytes_P.numpy().data, before)

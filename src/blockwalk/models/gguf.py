"""The headers of GGUF files.

A GGUF file holds a configuration, a tokenizer and a chat template as metadata, then a table of
tensors, then their bytes. A model in several parts is several such files, the first of which has
the metadata. No torch.

Source of the layout: github.com/ggml-org/ggml, ``docs/gguf.md``; of type numbers, ``ggml.h``; of
parts, llama.cpp's ``gguf-split``."""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from blockwalk.models.gguf_architectures import ARCHITECTURES
from blockwalk.plan.model_spec import encoded_nbytes
from blockwalk.plan.placement import Codec
from blockwalk.plan.words import counted
from blockwalk.system.file_states import FileState, state_of
from blockwalk.system.lfs import refuse_pointer
from blockwalk.system.paths import StrPath

TYPES = {
    0: ("F32", Codec.FP32),
    1: ("F16", Codec.FP16),
    30: ("BF16", Codec.BF16),
    2: ("Q4_0", Codec.Q4_0),
    3: ("Q4_1", Codec.INT4A),
    6: ("Q5_0", Codec.Q5_0),
    7: ("Q5_1", Codec.Q5_1),
    8: ("Q8_0", Codec.Q8_0),
    12: ("Q4_K", Codec.Q4_K),
    13: ("Q5_K", Codec.Q5_K),
    14: ("Q6_K", Codec.Q6_K),
}
"""The types of tensors that are read, by their numbers in a file: the format's name of each, and
the codec that it is here."""
_NAMES = {codec: name for name, codec in TYPES.values()}
_OTHER_TYPES = {
    10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_VERSIONS = (2, 3)
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The names of a model's parts."""
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_MOST = 4096
"""Elements of an array that a configuration may need, one for each block; more are a
vocabulary's."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its name in the file, and the place of its bytes there (offset from the start of
    the file)."""

    file: str
    """The file's name."""
    name: str
    shape: tuple[int, ...]
    codec: Codec
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """All of a file, or of a model's parts, but the values of arrays and tensors."""

    metadata: dict[str, Any]
    """Strings and numbers by key; arrays of numbers as tuples, of longer ones and of strings the
    number of their elements."""
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def main_codec(self) -> Codec:
        """The codec that most elements of matrices are in."""
        elements: Counter[Codec] = Counter()
        for tensor in self.tensors:
            if len(tensor.shape) > 1:
                elements[tensor.codec] += prod(tensor.shape)
        return max(elements, key=lambda codec: elements[codec], default=Codec.FP32)


def name_of(codec: Codec) -> str:
    """Return the format's name of a codec that files have."""
    return _NAMES[codec]


def parts_of(path: Path) -> list[Path]:
    """Return the files that a GGUF consists of, by the name of any: itself alone, or the parts that
    llama.cpp cut it in.

    Raises:
        ValueError: one of the parts is not there.
    """
    named = _PART.fullmatch(path.name)
    if named is None or not 1 <= int(named["number"]) <= int(named["count"]):
        return [path]
    names = [
        f"{named['stem']}-{number:05}-of-{named['count']}.gguf"
        for number in range(1, int(named["count"]) + 1)
    ]
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise ValueError(
            f"model: {path} is one of {len(names)} parts, and {', '.join(missing)} is not beside it"
        )
    return [path.parent / name for name in names]


def pattern_of_parts(name: str) -> str:
    """Return the pattern that the names of all parts of a model have, by the name of any; of a
    whole one its own."""
    named = _PART.fullmatch(name)
    return name if named is None else f"{named['stem']}-*-of-{named['count']}.gguf"


def read_header(path: StrPath) -> Header:
    """Return the header of a GGUF file, or of all parts of a model by the name of any.

    Raises:
        ValueError: another format or architecture, a type of tensor that is not read, a file that
            was cut off, or parts that do not belong together: what was found, and what would be
            read.
    """
    files = parts_of(Path(path))
    parts = [_read_header(os.fspath(file), state_of(file)) for file in files]
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    count = parts[0].metadata.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and count != len(tensors):
        raise ValueError(
            f"model: {files[0]} tells of {counted(count, 'tensor')} in {len(parts)} parts, which"
            f" have {len(tensors)}"
        )
    return replace(parts[0], tensors=tensors)


@lru_cache(64)
def _read_header(path: str, state: FileState) -> Header:
    _, size, *_ = state
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            refuse_pointer(path)
            raise ValueError(f"model: {path} is no GGUF file: it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            try:
                return _parse(path, cursor, size)
            except (struct.error, LookupError, ArithmeticError, TypeError, RecursionError):
                raise ValueError(
                    f"model: {path} is cut off, or altered: its header does not end within {size}"
                    " bytes; download it again"
                ) from None


class _Cursor:
    """A place in a file's bytes, which reading moves on."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.at += length
        if self.at > len(self.data):
            raise IndexError
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Return the next value: of strings, and of many numbers, how many there are."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind = self.number("I")
        count = self.number("Q")
        if kind in _SCALARS and count <= _MOST:
            return tuple(self.number(_SCALARS[kind]) for _ in range(count))
        if kind in _SCALARS:
            self.at += count * struct.calcsize(f"<{_SCALARS[kind]}")
        else:
            for _ in range(count):
                if kind == _STRING:  # skipped: a vocabulary is long
                    self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]
                else:
                    self.value(kind)
        return count


def _parse(path: str, cursor: _Cursor, size: int) -> Header:
    version = cursor.number("I")
    if version.to_bytes(4, "big") in [number.to_bytes(4, "little") for number in _VERSIONS]:
        raise ValueError(
            f"model: {path} is big-endian GGUF, for other processors; take the little-endian file"
        )
    if version not in _VERSIONS:
        raise ValueError(
            f"model: {path} is of GGUF's version {version}; read are {_VERSIONS[0]} and"
            f" {_VERSIONS[1]}"
        )
    tensors = cursor.number("Q")
    metadata = _metadata(path, cursor, keys=cursor.number("Q"))
    _require_part(path, metadata)
    if metadata.get("split.no", 0) == 0:
        _require_model(path, metadata, tensors)
    table = []
    for _ in range(tensors):
        name = cursor.text()
        dimensions = cursor.number("I")
        shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))
        table.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    begin = -(-cursor.at // alignment) * alignment
    return Header(metadata, tuple(_tensor(path, size, begin, *entry) for entry in table))


def _metadata(path: str, cursor: _Cursor, *, keys: int) -> dict[str, Any]:
    """Return the next ``keys`` keys with their values."""
    metadata = {}
    for _ in range(keys):
        key = cursor.text()
        kind = cursor.number("I")
        if kind not in (*_SCALARS, _STRING, _ARRAY):
            raise ValueError(
                f"model: {path} is altered: the value of {key} is of kind {kind}, which GGUF does"
                " not have"
            )
        metadata[key] = cursor.value(kind)
    return metadata


def _require_part(path: str, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError where a file is another part of its model than its name says."""
    number = metadata.get("split.no", 0) + 1
    count = max(metadata.get("split.count", 1), 1)
    match = _PART.fullmatch(Path(path).name)
    named = tuple(map(int, match.group("number", "count"))) if match else (1, 1)
    if (number, count) != named:
        raise ValueError(
            f"model: {path} is part {number} of {count}, and not named so: its name would end in"
            f" -{number:05}-of-{count:05}.gguf"
        )


def _require_model(path: str, metadata: Mapping[str, Any], tensors: int) -> None:
    """Raise ValueError where the first part's metadata are not those of a model that is read."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(
            f"model: {path} is no model: its general.type is {kind!r} (a LoRA adapter is one of"
            " 'adapter', the picture half of a model one of 'mmproj'); name the file of the model"
            " that it belongs to"
        )
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"model: {path} is a model of architecture {architecture!r}; read are"
            f" {', '.join(ARCHITECTURES)}"
        )
    blocks = metadata.get(f"{architecture}.block_count", 0)
    count = metadata.get("split.tensors.count", tensors)
    if not 0 < blocks <= count:
        raise ValueError(
            f"model: {path} is altered: it tells of {counted(blocks, 'block')}, and of"
            f" {counted(count, 'tensor')}"
        )


def _tensor(
    path: str, size: int, begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> TensorInfo:
    if kind not in TYPES:
        type_name = _OTHER_TYPES.get(kind, str(kind))
        readable = ", ".join(readable for readable, _ in TYPES.values())
        raise ValueError(
            f"model: {path}: {name} is of type {type_name}; read are {readable}. Take a file in one"
            " of those"
        )
    word, codec = TYPES[kind]
    group = codec.facts.group_sizes[0] if codec.encoded else 1
    if not shape or shape[-1] % group:
        raise ValueError(
            f"model: {path} is altered: {name} {shape} does not consist of {word}'s blocks of"
            f" {group}"
        )
    nbytes = encoded_nbytes(shape, "float32", codec, group)
    if begin + offset + nbytes > size:
        raise ValueError(
            f"model: {path} is cut off: {name} ends at byte {begin + offset + nbytes}, the file"
            f" has {size}; download it again"
        )
    return TensorInfo(Path(path).name, name, shape, codec, begin + offset, nbytes)

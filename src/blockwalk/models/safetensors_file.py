"""A safetensors file, written a piece at a time (github.com/huggingface/safetensors): 8 bytes
little-endian length, a JSON header, the bytes. Its mode is that of every other file: what the umask
leaves of 0666."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from blockwalk.system.atomic_files import naming
from blockwalk.system.paths import StrPath

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
        pieces: their values in that order, each tensor in one piece or several; a piece is of its
            tensor's dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        stop = offset + entry.nbytes
        header[name] = {
            "dtype": _NAME[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, stop],
        }
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

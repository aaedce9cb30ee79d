"""The tensors of a checkpoint on disk: pieces of one-dimensional tensors, which any number of ranks
wrote and any reads.

    rank-00000.safetensors   the pieces that a rank wrote
    rank-00000.json          steps done, ranks that wrote, and of each piece: its tensor, that
                             tensor's elements, the first of the piece's, its dtype and place in the
                             file, and a CRC-32 of each 4 MiB

The files do not say how they will be read: a rank that wants a range of a tensor copies what
overlaps it. Nothing of it is code, and every byte that is read is compared with its checksum first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockwalk.system import atomic_files
from blockwalk.system.atomic_files import Damaged
from blockwalk.tiers.block_store.store import crc32
from blockwalk.tiers.disk import MappedFile
from blockwalk.tiers.model_folder import safetensors
from blockwalk.tiers.model_folder.safetensors import Entry

FORMAT = 2
"""The version of a checkpoint folder's format; version 1 had torch.distributed.checkpoint's pickles
in it, and no checksums."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in safetensors.DTYPE.values()}
CHUNK = 1 << 22
"""Bytes that one checksum covers."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The ranges of a tensor of ``numel`` elements that this rank holds: flat tensors by the number
    of their first element. A range that is written and never read into may be a Weight, whose rows
    are read one after the other."""

    numel: int
    ranges: Mapping[int, Any]

    def copied(self) -> Pieces:
        """Return these elements, copied to the host."""
        ranges = {
            start: piece.detach().to("cpu", copy=True) for start, piece in self.ranges.items()
        }
        return Pieces(self.numel, ranges)


def write(
    folder: Path,
    tensors: Mapping[str, Pieces],
    *,
    steps_done: int,
    rank: int = 0,
    ranks: int = 1,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write this rank's files of a checkpoint, synced, holding one piece's rows at a time.
    ``facts`` go into its table."""
    keys = {
        f"{name}@{origin}": (name, origin)
        for name, tensor in tensors.items()
        for origin in tensor.ranges
    }
    entries = {}
    sums: dict[str, list[int]] = {key: [] for key in keys}
    for key, (name, origin) in keys.items():
        elements = tensors[name].ranges[origin]
        entries[key] = Entry((prod(elements.shape),), elements.dtype)

    def summed() -> Iterator[Tensor]:
        for key, (name, origin) in keys.items():
            summed_bytes = 0
            for part in safetensors.pieces(tensors[name].ranges[origin]):
                bytes_P = part.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
                start = 0
                while start < len(bytes_P):
                    if summed_bytes % CHUNK == 0:
                        sums[key].append(0)
                    stop = min(len(bytes_P), start + CHUNK - summed_bytes % CHUNK)
                    sums[key][-1] = crc32(bytes_P[start:stop], sums[key][-1])
                    summed_bytes = summed_bytes + stop - start
                    start = stop
                yield bytes_P

    path = _file(folder, rank, "safetensors")
    safetensors.write(path, entries, summed())
    atomic_files.fsync(path)
    stored = safetensors.read_header(path)
    table = [
        {
            "tensor": name,
            "numel": tensors[name].numel,
            "first": origin,
            "dtype": str(entries[key].dtype).removeprefix("torch."),
            "offset": stored[key].offset,
            "nbytes": stored[key].nbytes,
            "crc32": sums[key],
        }
        for key, (name, origin) in keys.items()
    ]
    head = {
        "steps_done": steps_done,
        "ranks": ranks,
        "nbytes": path.stat().st_size,
        "facts": dict(facts or {}),
    }
    atomic_files.write_sealed(_file(folder, rank, "json"), {**head, "pieces": table})


def refuse_format_1(folder: Path) -> None:
    """Raise ValueError where a folder is a checkpoint of the form that had pickles, or no
    checksums."""
    if (folder / ".metadata").exists() or (folder / "state.safetensors").exists():
        raise ValueError(
            f"{folder} is a checkpoint of format 1, and this version of blockwalk reads format"
            f" {FORMAT} alone"
        )


def _file(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"rank-{rank:05d}.{kind}"


@dataclass(frozen=True, slots=True)
class _StoredPiece:
    """One piece of a tensor in a file: ``nbytes`` bytes from ``offset`` on, the tensor's elements
    from ``start`` on."""

    file: MappedFile
    name: str
    start: int
    dtype: torch.dtype
    offset: int
    nbytes: int
    crc32: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The element of the tensor that follows the piece's last."""
        return self.start + self.nbytes // self.dtype.itemsize

    def elements(self, first: int, stop: int) -> Tensor:
        """Return a range of the tensor's elements, mapped, all inside the piece.

        Raises:
            Damaged: a checksum differs.
        """
        begin = (first - self.start) * self.dtype.itemsize
        nbytes = (stop - first) * self.dtype.itemsize
        for number in range(begin // CHUNK, -(-(begin + nbytes) // CHUNK)):
            chunk_end = min((number + 1) * CHUNK, self.nbytes)
            chunk_P = self.file.bytes_P[self.offset + number * CHUNK : self.offset + chunk_end]
            if crc32(chunk_P) != self.crc32[number]:
                raise Damaged(f"{self.file.path} is damaged: {self.name} has another checksum")
        return self.file.view(self.offset + begin, nbytes, self.dtype, (stop - first,))


class Saved:
    """The tensors of a checkpoint's folder, open until it is closed; tensors that were taken stay
    valid.

    Raises:
        Damaged: a file is missing, truncated, or its table is not as it was written or leaves
            elements out.
        ValueError: the folder holds no checkpoint, or one of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numel: dict[str, int] = {}
        """Elements of each tensor."""
        self.steps_done = 0
        self.facts: dict[str, str] = {}
        """Facts that the tensors were made by; none where an older version wrote them."""
        self._pieces: dict[str, list[_StoredPiece]] = {}
        self._files: list[MappedFile] = []
        refuse_format_1(folder)
        rank = 0
        ranks = 1
        try:
            while rank < ranks:
                table = atomic_files.read_sealed(_file(folder, rank, "json"))
                with atomic_files.reading(_file(folder, rank, "json")):
                    self.steps_done = int(table["steps_done"])
                    ranks = int(table["ranks"])
                    self.facts = dict(table.get("facts", {}))
                    self._open(_file(folder, rank, "safetensors"), table)
                rank += 1
            for name, pieces in self._pieces.items():
                count = sum(piece.stop - piece.start for piece in pieces)
                if count != self.numel[name]:
                    path = pieces[0].file.path
                    raise Damaged(
                        f"{path} is damaged: {count} elements of {name}, which has"
                        f" {self.numel[name]}"
                    )
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, table: Mapping[str, Any]) -> None:
        size = path.stat().st_size if path.is_file() else None
        if size is None or size != table["nbytes"]:
            fault = "missing" if size is None else f"damaged: {size} bytes of {table['nbytes']}"
            raise Damaged(f"{path} is {fault}")
        file = MappedFile(path)
        self._files.append(file)
        for row in table["pieces"]:
            name = row["tensor"]
            dtype = _DTYPES[row["dtype"]]
            piece = _StoredPiece(
                file,
                name,
                start=row["first"],
                dtype=dtype,
                offset=row["offset"],
                nbytes=row["nbytes"],
                crc32=tuple(row["crc32"]),
            )
            lies_in_file = 0 <= piece.offset <= piece.offset + piece.nbytes <= size
            lies_in_tensor = 0 <= piece.start <= piece.stop <= row["numel"]
            whole_elements = piece.nbytes % dtype.itemsize == 0
            all_sums = len(piece.crc32) == -(-piece.nbytes // CHUNK)
            if not (lies_in_file and lies_in_tensor and whole_elements and all_sums):
                raise Damaged(
                    f"{path} is damaged: {name} has {piece.nbytes} bytes at {piece.offset} of"
                    f" {size}"
                )
            self.numel[name] = row["numel"]
            self._pieces.setdefault(name, []).append(piece)

    def read_into(self, name: str, first: int, out_P: Tensor) -> None:
        """Copy the elements from ``first`` on of a tensor into ``out_P``, of any dtype on any
        device.

        Raises:
            Damaged: a checksum differs, or no rank wrote some of the elements.
        """
        missing = len(out_P)
        stop = first + len(out_P)
        for piece in self._pieces[name]:
            begin = max(first, piece.start)
            end = min(stop, piece.stop)
            if begin < end:
                out_P[begin - first : end - first].copy_(piece.elements(begin, end))
                piece.file.dont_need([(piece.offset, piece.nbytes)])
                missing -= end - begin
        if missing:
            raise Damaged(
                f"{self.folder} is damaged: {missing} elements of {name} from {first} to {stop} are"
                " not in it"
            )

    def whole(self, name: str) -> Tensor:
        """Return a tensor that one rank wrote alone, mapped from the file, not copied: do not write
        to it.

        Raises:
            Damaged: a checksum differs.
        """
        (piece,) = self._pieces[name]
        return piece.elements(0, self.numel[name])

    def verify(self) -> None:
        """Read every byte. Raises Damaged where a checksum differs."""
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.elements(piece.start, piece.stop)
                piece.file.dont_need([(piece.offset, piece.nbytes)])

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

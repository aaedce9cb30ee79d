"""The disk tier, read: memory maps with page advice, and a Hugging Face checkpoint folder as it is,
as a WeightSource.

A page of a file map that nobody dirtied costs no anonymous memory: the kernel drops it when it
needs the room, and :meth:`MappedFile.dont_need` drops it at once. The advice calls go through
ctypes, which lets go of the GIL: the disk lane waits for the disk while the compute lane goes on.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from blockwalk.system.atomic_files import naming
from blockwalk.system.file_maps import map_file
from blockwalk.system.paths import StrPath
from blockwalk.tiers.page_faults import name_faults

PAGE = mmap.PAGESIZE
_WILLNEED = 3
_DONTNEED = 4
_HUGEPAGE = 14
_POPULATE_READ = 22
_POPULATE_WRITE = 23
"""madvise(2): the first two are the same numbers on Linux and macOS, the others are Linux's alone
(the last two since 5.14)."""


if sys.platform != "win32":
    _LIBC = ctypes.CDLL(None, use_errno=True)
    _LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def _advise(address: int, nbytes: int, advice: int) -> bool:
    """Call madvise, letting go of the GIL; False where this kernel does not know the advice, and
    under Windows."""
    if sys.platform == "win32":
        return False
    if _LIBC.madvise(address, nbytes, advice) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        return False
    raise OSError(code, f"madvise({advice}) on {nbytes} bytes: {os.strerror(code)}")


class MappedFile:
    """A file as one tensor of bytes, mapped. No descriptor stays open. Writing to a view of a
    read-only map kills the process.

    Args:
        path: the file.
        length: bytes of a file to be written: it is created, or resized, with the disk space
            reserved (a full disk is an OSError here, not a SIGBUS later); its map is shared with
            the file, and the kernel writes dirty pages back when it likes. None is a file to be
            read.

    Raises:
        ValueError: the file is empty.
        OSError: it cannot be mapped; the error names it.
    """

    def __init__(self, path: StrPath, *, length: int | None = None) -> None:
        name_faults()
        self.path = Path(path)
        writable = length is not None
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY, 0o644)
        try:
            if length is not None:
                with naming(self.path, length):
                    os.ftruncate(fd, length)
                    if hasattr(os, "posix_fallocate") and length:
                        os.posix_fallocate(fd, 0, length)
            self.nbytes = os.fstat(fd).st_size
            if self.nbytes == 0:
                raise ValueError(f"{self.path} is empty: nothing to map")
            array_P = map_file(fd, self.nbytes, os.fspath(self.path), writable=writable)
        finally:
            os.close(fd)
        self._bytes_P: Tensor | None = torch.from_numpy(array_P)
        if (
            writable
        ):  # where the file system has large pages (ext4 since 6.16), a page fault brings 2 MB
            _advise(array_P.ctypes.data, self.nbytes, _HUGEPAGE)

    @property
    def bytes_P(self) -> Tensor:
        """The whole file: uint8, shape [nbytes]."""
        assert self._bytes_P is not None, f"{self.path} is closed"
        return self._bytes_P

    def view(self, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return ``nbytes`` bytes at ``offset`` as a tensor, without a copy (with one only where
        ``offset`` is no multiple of the element's size). The view keeps the map alive."""
        part_P = self.bytes_P[offset : offset + nbytes]
        assert part_P.numel() == nbytes == prod(shape) * dtype.itemsize, (
            self.path,
            offset,
            nbytes,
            dtype,
            shape,
        )
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if offset % dtype.itemsize:
            part_P = part_P.clone()
        return part_P.view(dtype).view(tuple(shape))

    def will_need(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Read the pages of ``ranges`` ((offset, bytes) pairs) and map them, blocking; returns the
        bytes asked for.

        The disk is asked for everything first (MADV_WILLNEED), then the pages are waited for and
        mapped (MADV_POPULATE_READ, or one touch a page on an older kernel), so that computing takes
        no page fault."""
        ranges = list(ranges)
        with _reading(self.path):
            will_need([self.bytes_P[start:stop] for start, stop in _pages(ranges, self.nbytes)])
        return sum(nbytes for _, nbytes in ranges)

    def dont_need(self, ranges: Iterable[tuple[int, int]], *, drop_cache: bool = False) -> None:
        """Unmap the pages of ``ranges`` ((offset, bytes) pairs), their ends rounded outwards to
        whole pages; the next use maps them again, with what was written to them. ``drop_cache``
        also asks the kernel to forget the clean ones altogether."""
        base = self.bytes_P.data_ptr()
        spans = _pages(ranges, self.nbytes)
        with _reading(self.path):
            for start, stop in spans:
                _advise(base + start, stop - start, _DONTNEED)
        if drop_cache:
            _drop_cache(self.path, spans)

    def close(self) -> None:
        """Let go of the file; the map itself goes with its last view."""
        self._bytes_P = None

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in an error of its pages: the disk's, or the kernel's if the file has become
    shorter than it was mapped."""
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.errno != errno.EFAULT or error.filename is not None:
            raise
        text = "the file has become shorter while it is read"
        raise OSError(errno.EFAULT, text, os.fspath(path)) from error


def will_need(parts: Sequence[Tensor]) -> None:
    """Read and map the pages of parts (uint8 [bytes]) of file maps, each from the beginning of a
    page on, blocking."""
    for part_P in parts:
        _advise(part_P.data_ptr(), part_P.numel(), _WILLNEED)
    for part_P in parts:
        if not (
            sys.platform == "linux" and _advise(part_P.data_ptr(), part_P.numel(), _POPULATE_READ)
        ):
            part_P[::PAGE].sum(dtype=torch.int64)


def will_write(part_P: Tensor) -> None:
    """Map the pages of a part (uint8 [bytes]) of a writable file map for writing, all at once: a
    fault for each costs two to four times as much as writing it. The part begins with a page."""
    if sys.platform == "linux":
        _advise(part_P.data_ptr(), part_P.numel(), _POPULATE_WRITE)


def is_in_memory(part_P: Tensor) -> bool:
    """Whether the kernel has every page of a part (uint8 [bytes]) of a file map in memory; True
    where it does not tell. The part begins with a page."""
    if sys.platform == "win32":
        return True
    states = torch.empty(-(-part_P.numel() // PAGE), dtype=torch.uint8)
    if _LIBC.mincore(part_P.data_ptr(), part_P.numel(), states.data_ptr()) != 0:
        return True
    return bool(states.bitwise_and_(1).all())


def _drop_cache(path: Path, spans: Iterable[tuple[int, int]]) -> None:
    """Ask the kernel to forget the clean pages of (start, stop) spans of a file, where it can be
    asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        for start, stop in spans:
            os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _pages(ranges: Iterable[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """(offset, bytes) pairs as sorted, disjoint (start, stop) spans of whole pages; ``limit`` is
    the file's size."""
    spans: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        if nbytes == 0:
            continue
        start = offset // PAGE * PAGE
        stop = min(-(-(offset + nbytes) // PAGE) * PAGE, limit)
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return spans

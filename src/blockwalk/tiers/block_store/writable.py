"""The disk tier, written: a block store with two generations of each unit, which a crash at any
instant leaves readable.

A unit's file has two areas. New contents go into the idle one and are synced; then the idle area's
header, with a higher sequence number, is written and synced. A crash before that leaves the old
header the newest; a torn header fails its checksum, and the other counts. Either way the contents
are one whole generation, and the header says of which step. Where contents no longer have the
checksum that was written with them, those before them count, and a ledger goes on from there.

Large units move past the page cache (``O_DIRECT``) where the file system and the buffer's address
allow: the disk copies from and to the buffer itself, so that the processor's cores stay with what
they compute, and a memory limit is not charged for pages that are read once a step."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from blockwalk.system.atomic_files import Damaged
from blockwalk.system.locks import lock
from blockwalk.system.paths import StrPath
from blockwalk.tiers.block_store.store import (
    HEADER_PAGE,
    INDEX,
    StoredUnit,
    UnitHeader,
    crc32,
    part_of,
    read_index,
    read_unit_headers,
)
from blockwalk.tiers.disk import MappedFile

Transfer = Callable[[int, list[memoryview], int], int]
"""``os.preadv`` or ``os.pwritev``."""

DIRECT_BYTES = 1 << 20
"""Bytes from which on a unit moves past the page cache: smaller ones cost more in waiting than they
save in copying."""


class WritableStore:
    """Units of a model that are read into buffers of bytes and written back, one at a time, from
    any lane.

    Reading and writing let go of the GIL. Two lanes may work on different units at once; one unit
    is one lane's at a time.

    Args:
        path: a store of two generations, as :func:`~blockwalk.tiers.block_store.writer.write_store`
            makes it for training.
        sync: wait for the disk before a write counts. Without it a killed process still leaves
            every unit whole, but a loss of power may not.

    Raises:
        ValueError: no such store, a damaged one, one packed for reading only, or one that another
            process has open.
    """

    def __init__(self, path: StrPath, *, sync: bool = True) -> None:
        self.path = Path(path)
        self.sync = sync
        self.index = read_index(self.path)
        if self.index.generations != 2:
            raise ValueError(
                f"{self.path} was packed for reading only: training writes need a writable copy"
                " of it"
            )
        self._fds: list[int] = []
        self._direct: list[int] = []
        """Descriptors past the page cache; −1 where there is none."""
        self._headers: list[UnitHeader] = []
        self._lock = _lock(self.path)
        try:
            for number, unit in enumerate(self.units):
                file = self.path / unit.file
                if not file.is_file():
                    raise ValueError(
                        f"{self.path} is incomplete: {unit.file} ({unit.name}) is missing"
                    )
                self._fds.append(os.open(file, os.O_RDWR))
                self._direct.append(_open_direct(file) if unit.nbytes >= DIRECT_BYTES else -1)
                self._headers.append(self._newest_undamaged(number, file))
        except BaseException:
            self.close()
            raise

    def _newest_undamaged(self, number: int, file: Path) -> UnitHeader:
        """Return the header of a unit's newest generation whose bytes have their checksums; a newer
        one's is cleared.

        Raises:
            Damaged: no generation has.
        """
        unit = self.units[number]
        fd = self._fds[number]
        with MappedFile(file) as mapped:
            for header in read_unit_headers(mapped, number, unit, 2):
                parts = {part_of(unit, header, param) for param in unit.params}
                if all(
                    crc32(mapped.bytes_P[p.offset : p.offset + p.nbytes]) == p.crc32 for p in parts
                ):
                    mapped.dont_need([(0, mapped.nbytes)], drop_cache=True)
                    return header
                _transfer(os.pwritev, fd, memoryview(bytes(HEADER_PAGE)), header.area * HEADER_PAGE)
                self._settle(fd)
        raise Damaged(
            f"{file} is damaged: {unit.name} has another checksum; remove {self.path} to rebuild"
            " it from the ledger"
        )

    @property
    def units(self) -> tuple[StoredUnit, ...]:
        """The model's units in execution order, then the persistent buffers if there are any."""
        return self.index.units

    def step(self, unit: int) -> int:
        """Return the step after which a unit was last written; 0 for a fresh copy."""
        return self._headers[unit].step

    def bucket(self, unit: int) -> Tensor | None:
        return None

    def read_unit(self, unit: int, out_P: Tensor) -> int:
        """Read a unit's newest contents into ``out_P`` (contiguous CPU uint8 [nbytes]); returns the
        step of them."""
        header = self._headers[unit]
        self._move(os.preadv, unit, out_P, header.area)
        return header.step

    def write_unit(self, unit: int, data_P: Tensor, step: int) -> None:
        """Write a unit's new contents (contiguous CPU uint8 [nbytes]), as they are after ``step``;
        durable on return."""
        old = self._headers[unit]
        fd = self._fds[unit]
        checksum = crc32(data_P)
        new = UnitHeader(unit, 2, 1 - old.area, old.sequence + 1, step, old.nbytes, checksum)
        self._move(os.pwritev, unit, data_P, new.area)
        self._settle(fd)
        _transfer(os.pwritev, fd, memoryview(new.pack()), new.area * HEADER_PAGE)
        self._settle(fd)
        self._headers[unit] = new

    def _move(self, call: Transfer, unit: int, bytes_P: Tensor, area: int) -> None:
        """Read or write one area: whole pages past the page cache, where that may be; the rest
        through it."""
        buffer = self._buffer(unit, bytes_P)
        offset = self.units[unit].area_offset(area)
        fd = self._direct[unit]
        pages = len(buffer) // HEADER_PAGE * HEADER_PAGE
        if fd < 0 or bytes_P.data_ptr() % HEADER_PAGE:
            pages = 0
        try:
            _transfer(call, fd, buffer[:pages], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # opened, but not for this: another alignment, or a layer that cannot
            self._direct[unit] = -1
            pages = 0
            os.close(fd)
        _transfer(call, self._fds[unit], buffer[pages:], offset + pages)

    def _buffer(self, unit: int, bytes_P: Tensor) -> memoryview:
        nbytes = self.units[unit].nbytes
        form = (bytes_P.dtype, tuple(bytes_P.shape), bytes_P.is_contiguous())
        assert form == (torch.uint8, (nbytes,), True), (
            f"unit {unit} moves as contiguous uint8 [{nbytes}], not {form}"
        )
        return bytes_P.numpy().data

    def _settle(self, fd: int) -> None:
        """Order the writes before this one before those after it."""
        if self.sync:
            getattr(os, "fdatasync", os.fsync)(fd)  # macOS has the latter alone

    def close(self) -> None:
        for fd in (*self._fds, *self._direct):
            if fd >= 0:
                os.close(fd)
        self._fds.clear()
        self._direct.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> WritableStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_direct(file: Path) -> int:
    """Return a descriptor past the page cache; −1 where the system or the file system has none."""
    try:
        return os.open(file, os.O_RDWR | os.O_DIRECT)
    except (AttributeError, OSError):
        return -1


def _transfer(call: Transfer, fd: int, buffer: memoryview, offset: int) -> None:
    """preadv or pwritev until the whole buffer has moved: the kernel moves at most 2 GiB a call."""
    while buffer:
        count = call(fd, [buffer], offset)
        if count <= 0:
            raise OSError(f"a unit file ended at byte {offset}, {len(buffer)} bytes early")
        buffer = buffer[count:]
        offset += count


def _lock(path: Path) -> int:
    """Hold a store for this process: its index, locked, until the descriptor closes."""
    fd = os.open(path / INDEX, os.O_RDONLY)
    if not lock(fd, path):
        os.close(fd)
        raise ValueError(f"{path} is open for writing already, here or in another process")
    return fd

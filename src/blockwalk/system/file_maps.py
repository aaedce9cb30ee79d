"""Maps of files without a descriptor: an array of a file's bytes that goes with its last view.

Python's :class:`mmap.mmap` holds a descriptor for as long as it lives, and a model has maps by the
thousand, while a login is allowed 1,024 open files. A map itself needs none."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np

from blockwalk.system.atomic_files import nearest

if sys.platform != "win32":
    _LIBC = ctypes.CDLL(None, use_errno=True)
    _LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_int64]
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value

_NO_MAPS = {
    False: "this file system has no file maps: copy the file to another disk",
    True: (
        "this file system has no shared file maps, which scratch needs: choose an output_dir on"
        " another disk"
    ),
}
"""The text for ENODEV, by whether the map is written to: the kernel's own is "No such device"."""


def map_file(fd: int, nbytes: int, path: str, *, writable: bool = False) -> np.ndarray:
    """Return the first ``nbytes`` bytes of an open file, uint8 [nbytes]; ``fd`` may be closed.
    Writing to a map that is not ``writable`` kills the process.

    A map that is read is private, which shares the file's pages as well as long as nobody writes to
    them: some file systems (FUSE with ``direct_io``) have no other. One that is written is shared
    with the file.

    Raises:
        OSError: the kernel refuses; the error names ``path``.
    """
    if sys.platform == "win32":
        # Python's map, which holds a handle; Windows bounds these by memory alone
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(fd, nbytes, access=access), dtype=np.uint8)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _LIBC.mmap(
        None, nbytes, protection, mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE, fd, 0
    )
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, _NO_MAPS[writable] if code == errno.ENODEV else os.strerror(code), path)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    unmap = weakref.finalize(memory, _LIBC.munmap, address, nbytes)
    unmap.atexit = False  # another thread may read a view until the very end
    return np.ctypeslib.as_array(memory)


def has_shared_maps(folder: Path) -> bool:
    """Return whether files in a folder, or in the nearest one around it that exists, can be mapped
    to be written: tried with a nameless file. True as well where no file can be made at all, which
    is another trouble."""
    try:
        with tempfile.TemporaryFile(dir=nearest(folder)) as file:
            file.truncate(mmap.PAGESIZE)
            map_file(file.fileno(), mmap.PAGESIZE, os.fspath(folder), writable=True)
    except OSError as error:
        return error.errno != errno.ENODEV
    return True

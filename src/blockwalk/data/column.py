"""Values of one type that are appended: in memory up to a bound, beyond it in a nameless file."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from blockwalk.system import cache
from blockwalk.system.atomic_files import PARTIAL, naming
from blockwalk.system.file_maps import map_file


class Column:
    """Values that are appended: the last ones in memory, those before them in a file."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._waiting = bytearray()
        self._file: IO[bytes] | None = None
        self._file_bytes = 0

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self._dtype.itemsize

    @property
    def waiting(self) -> int:
        """Bytes in memory."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self._file_bytes + len(self._waiting)

    @property
    def spilled(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def extend(self, values: np.ndarray) -> None:
        """Append values, which have the column's type."""
        assert values.dtype == self._dtype, values.dtype
        self._waiting += values.tobytes()

    def spill(self) -> None:
        """Write what is in memory to the file."""
        if not self._waiting:
            return
        folder = token_folder() or Path(tempfile.gettempdir())
        if self._file is None:
            # nameless, but where a disk must have a name; it stays open for the next values
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix=".scratch-", suffix=PARTIAL, dir=folder
            )
        with naming(folder / "tokens", self.nbytes):
            self._file.write(self._waiting)
            self._file.flush()
        self._file_bytes += len(self._waiting)
        self._waiting = bytearray()

    def array(self) -> np.ndarray:
        """Return all values, in a map of the file where there is one; nothing may be appended
        afterwards."""
        if self._file is None:
            return np.frombuffer(self._waiting, dtype=self._dtype)
        self.spill()
        with self._file:
            file_bytes = map_file(self._file.fileno(), self._file_bytes, "tokens that were written")
        return file_bytes.view(self._dtype)


def token_folder() -> Path | None:
    """Return the cache's folder of tokens, made where it is not there; None: it cannot be written
    to."""
    try:
        folder = cache.folder() / "tokens"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def require_room(what: str, nbytes: int) -> None:
    """Raise ValueError where the disk that tokens lie on has less than ``nbytes`` bytes free."""
    folder = token_folder() or Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"{what} takes about {nbytes / 1e9:.3g} GB more as tokens on the disk of {folder},"
            f" which has {free / 1e9:.3g} GB free: free some, or set BLOCKWALK_CACHE to a folder on"
            " another disk"
        )

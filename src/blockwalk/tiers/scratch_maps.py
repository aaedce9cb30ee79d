"""The memory of the disk tier for state that lasts as long as its process: shared file maps.

A dirty page of a shared file map belongs to the file: the kernel writes it out when memory is
short, and no swap is needed. Nothing here outlives the process; what must survive is written by
:mod:`blockwalk.checkpoints.run_checkpoint`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable
from pathlib import Path

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from blockwalk.system.atomic_files import PARTIAL
from blockwalk.system.paths import StrPath
from blockwalk.tiers.disk import MappedFile
from blockwalk.tiers.memory import Shapes, tensors_in, total_bytes


class ScratchMaps:
    """Shared maps of unlinked files in one folder, one for each group (a
    :class:`~blockwalk.tiers.memory.Memory`). All of them read zero at first."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[Hashable, MappedFile] = {}
        self._bases: dict[int, StorageWeakRef] = {}
        """The maps by address: another storage may lie where a map was that is closed."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in one of these maps."""
        base = self._bases.get(tensor.untyped_storage().data_ptr())
        return base is not None and not base.expired()  # type: ignore[no-untyped-call]

    def zeros(self, shapes: Shapes, group: Hashable) -> dict[str, Tensor]:
        """Make a group in a map of its own. The pages cost no memory until they are written."""
        nbytes = total_bytes(shapes)
        return tensors_in(self._group(group, nbytes), shapes) if nbytes else {}

    def buffer(self, nbytes: int) -> Tensor:
        """Return a mapped uint8 tensor [nbytes]; the map closes with its last tensor."""
        with self._new_file(nbytes) as file:
            return file.bytes_P

    def write(self, group: Hashable, data_P: Tensor) -> None:
        group_P = self.bytes(group)
        if group_P is None:
            group_P = self._group(group, data_P.numel())
        group_P.copy_(data_P)

    def read(self, group: Hashable, out_P: Tensor) -> None:
        """Copy a group's bytes to ``out_P``, and hand its pages to the kernel."""
        group_P = self.bytes(group)
        assert group_P is not None, group
        out_P.copy_(group_P)
        self.dont_need(group)

    def bytes(self, group: Hashable) -> Tensor | None:
        file = self._files.get(group)
        return None if file is None else file.bytes_P

    def will_need(self, group: Hashable) -> None:
        """Map a group's pages, blocking, so that computing with its tensors takes no page fault."""
        if group in self._files:
            file = self._files[group]
            file.will_need([(0, file.nbytes)])

    def dont_need(self, group: Hashable) -> None:
        """Unmap a group's pages: the kernel writes the dirty ones when it likes, and reading one
        maps it again."""
        if group in self._files:
            file = self._files[group]
            file.dont_need([(0, file.nbytes)])

    def forget(self, group: Hashable) -> None:
        """Close a group's map: it goes with its last tensor, and what was not yet written of it
        never is."""
        file = self._files.pop(group, None)
        if file is not None:
            self._bases.pop(file.bytes_P.untyped_storage().data_ptr(), None)
            file.close()

    def close(self) -> None:
        """Close all maps: each goes with its last tensor."""
        for group in list(self._files):
            self.forget(group)
        self._bases.clear()

    def _group(self, group: Hashable, nbytes: int) -> Tensor:
        """Return the bytes of a new map (uint8 [nbytes]), which is the group's from now on."""
        self.forget(group)
        self._files[group] = self._new_file(nbytes)
        return self._files[group].bytes_P

    def _new_file(self, nbytes: int) -> MappedFile:
        handle, path = tempfile.mkstemp(prefix=".scratch-", suffix=PARTIAL, dir=self.folder)
        os.close(handle)
        try:
            file = MappedFile(path, length=nbytes)
        finally:
            os.unlink(path)
        storage = file.bytes_P.untyped_storage()
        self._bases[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return file

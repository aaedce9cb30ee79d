"""Working state on disk: tensors in shared file maps, and the activation checkpoints of one step.

A dirty page of a shared file map belongs to the file: the kernel writes it out when memory is short, and no swap is
needed. Nothing here outlives the process; what must survive is written by :mod:`blockwalk.checkpoint`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Hashable, Mapping
from pathlib import Path

import torch

from blockwalk.state import Tier
from blockwalk.tiers.disk import MappedFile

_ALIGN = 64


class ScratchMaps:
    """Tensors in shared maps of unlinked files, in one folder. All of them read zero at first."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[Hashable, list[MappedFile]] = {}

    def zeros(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], group: Hashable
    ) -> dict[str, torch.Tensor]:
        """One map holding a tensor for each name, side by side. The pages cost no memory until they are written."""
        offsets, total = {}, 0
        for name, (shape, dtype) in shapes.items():
            offsets[name] = total
            total += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        if not total:
            return {}
        file = self._new_file(total)
        self._files.setdefault(group, []).append(file)
        return {
            name: file.view(offsets[name], math.prod(shape) * dtype.itemsize, dtype, shape)
            for name, (shape, dtype) in shapes.items()
        }

    def bytes(self, nbytes: int) -> torch.Tensor:
        """A mapped uint8 tensor [nbytes]; the map closes with its last tensor."""
        with self._new_file(nbytes) as file:
            return file.bytes_P

    def will_need(self, group: Hashable) -> None:
        """Map a group's pages, blocking, so that computing with its tensors takes no page fault."""
        for file in self._files.get(group, ()):
            file.will_need([(0, file.nbytes)])

    def dont_need(self, group: Hashable) -> None:
        """Unmap a group's pages: the kernel writes the dirty ones when it likes, and reading one maps it again."""
        for file in self._files.get(group, ()):
            file.dont_need([(0, file.nbytes)])

    def _new_file(self, nbytes: int) -> MappedFile:
        handle, path = tempfile.mkstemp(prefix="blockwalk-", suffix=".scratch", dir=self.folder)
        os.close(handle)
        try:
            return MappedFile(path, writable=True, length=nbytes)
        finally:
            os.unlink(path)


class Activations:
    """The activation checkpoints of one step, on one tier. Buffers are kept from step to step and grow when they must."""

    def __init__(self, tier: Tier, device: torch.device, scratch: ScratchMaps) -> None:
        self._tier, self._device, self._scratch = tier, device, scratch
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._held: dict[Hashable, torch.Tensor] = {}

    def save(self, key: Hashable, hidden_BSD: torch.Tensor) -> None:
        """Copy a block's input to its tier; on the device tier it is kept as it is."""
        if self._tier is Tier.DEVICE or (self._tier is Tier.HOST and self._device.type == "cpu"):
            self._held[key] = hidden_BSD
            return
        buffer = self._buffers.get(key)
        nbytes = hidden_BSD.numel() * hidden_BSD.element_size()
        if buffer is None or buffer.numel() < nbytes:
            on_disk = self._tier is Tier.DISK
            buffer = self._scratch.bytes(nbytes) if on_disk else torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._buffers[key] = buffer
        target = buffer[:nbytes].view(hidden_BSD.dtype).view(hidden_BSD.shape)
        target.copy_(hidden_BSD, non_blocking=self._tier is Tier.HOST)
        self._held[key] = target

    def load(self, key: Hashable) -> torch.Tensor:
        """The saved input on the device. On a CPU it is the map itself: valid until the key is saved again."""
        return self._held.pop(key).to(self._device, non_blocking=True)

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self._held.clear()

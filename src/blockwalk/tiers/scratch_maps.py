"""Working state on disk: tensors in shared file maps, and the activations of one step: checkpoints,
and what graphs save.

A dirty page of a shared file map belongs to the file: the kernel writes it out when memory is
short, and no swap is needed. Nothing here outlives the process; what must survive is written by
:mod:`blockwalk.checkpoints.run_checkpoint`."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from blockwalk.numerics.device import host_buffers, is_cpu, recorded
from blockwalk.plan.placement import Tier
from blockwalk.plan.sizes import ALIGN, side_by_side
from blockwalk.system.atomic_files import PARTIAL
from blockwalk.system.paths import StrPath
from blockwalk.tiers.disk import MappedFile, is_in_memory, will_need


class ScratchMaps:
    """Tensors in shared maps of unlinked files, in one folder. All of them read zero at first."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[Hashable, list[MappedFile]] = {}
        self._bases: dict[int, StorageWeakRef] = {}
        """The maps by address: another storage may lie where a map was that is closed."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in one of these maps."""
        found = self._bases.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found.expired()  # type: ignore[no-untyped-call]

    def zeros(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], group: Hashable
    ) -> dict[str, Tensor]:
        """Return one map holding a tensor for each name, side by side. The pages cost no memory
        until they are written."""
        starts, total = side_by_side(
            math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()
        )
        if not total:
            return {}
        file = self._new_file(total)
        self._add(file)
        self._files.setdefault(group, []).append(file)
        return {
            name: file.view(start, math.prod(shape) * dtype.itemsize, dtype, shape)
            for start, (name, (shape, dtype)) in zip(starts, shapes.items(), strict=True)
        }

    def bytes(self, nbytes: int) -> Tensor:
        """Return a mapped uint8 tensor [nbytes]; the map closes with its last tensor."""
        with self._new_file(nbytes) as file:
            self._add(file)
            return file.bytes_P

    def _add(self, file: MappedFile) -> None:
        storage = file.bytes_P.untyped_storage()
        self._bases[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def will_need(self, group: Hashable) -> None:
        """Map a group's pages, blocking, so that computing with its tensors takes no page fault."""
        for file in self._files.get(group, ()):
            file.will_need([(0, file.nbytes)])

    def dont_need(self, group: Hashable) -> None:
        """Unmap a group's pages: the kernel writes the dirty ones when it likes, and reading one
        maps it again."""
        for file in self._files.get(group, ()):
            file.dont_need([(0, file.nbytes)])

    def forget(self, group: Hashable) -> None:
        """Let go of a group's maps: each goes with its last tensor, and what was not yet written of
        it never is."""
        for file in self._files.pop(group, ()):
            self._bases.pop(file.bytes_P.untyped_storage().data_ptr(), None)
            file.close()

    def close(self) -> None:
        """Let go of all maps: each goes with its last tensor."""
        for group in list(self._files):
            self.forget(group)
        self._bases.clear()

    def _new_file(self, nbytes: int) -> MappedFile:
        handle, path = tempfile.mkstemp(prefix=".scratch-", suffix=PARTIAL, dir=self.folder)
        os.close(handle)
        try:
            return MappedFile(path, length=nbytes)
        finally:
            os.unlink(path)


class Activations:
    """The activation checkpoints of one step, on one tier. Buffers are kept from step to step.

    An input leaves an accelerator, and comes back, by way of one of so many device buffers
    (``places``), which take turns. The compute lane copies it there and goes on; what the allocator
    may use again is thus known when that copy is issued. The program says when a buffer may be
    filled again."""

    def __init__(self, tier: Tier, device: torch.device, scratch: ScratchMaps, places: int) -> None:
        self._tier = tier
        self._device = device
        self._scratch = scratch
        self._stays = tier is Tier.DEVICE or (tier is Tier.HOST and is_cpu(device))
        self._staged = not (self._stays or is_cpu(device))
        self._places: list[Tensor] = []
        self._turns = cycle(range(places))
        self._count = places
        self._longest = 0
        """Bytes of the largest input that is known of."""
        self._buffers: dict[Hashable, Tensor] = {}
        self._held: dict[Hashable, Tensor] = {}

    def begin(self, nbytes: int) -> None:
        """Begin a step whose largest input has so many bytes: forget what a failed one has left."""
        self._held.clear()
        self.reserve(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make buffers for inputs of so many bytes from now on, when they are used, once nothing is
        copied from or to smaller ones: a driver would let go of memory under a copy. Between steps,
        on the compute lane."""
        if nbytes <= self._longest:
            return
        if self._staged and self._buffers:
            recorded(self._device).synchronize()
        if self._staged:
            self._buffers.clear()
        self._places.clear()
        self._longest = nbytes

    def place(self) -> Tensor:
        """Return the device buffer (uint8) whose turn it is; the compute lane asks, in the
        program's order."""
        if not self._places:
            size = self._longest if self._staged else 0
            self._places = [
                torch.empty(size, dtype=torch.uint8, device=self._device)
                for _ in range(self._count)
            ]
        return self._places[next(self._turns)]

    def stage(self, hidden_BSD: Tensor) -> tuple[Tensor, torch.Event | None]:
        """Return a block's input where :meth:`save` may read it on another lane, and the event that
        it is there from on."""
        if not self._staged:
            return hidden_BSD, None
        staged = _as(hidden_BSD, self.place()).copy_(hidden_BSD)
        return staged, recorded(self._device)

    def save(self, key: Hashable, staged_BSD: Tensor, there: torch.Event | None = None) -> None:
        """Copy a block's input, as :meth:`stage` answered it, to its tier; on the device tier it is
        kept as it is."""
        if self._stays:
            self._held[key] = staged_BSD
            return
        if there is not None:
            torch.accelerator.current_stream(self._device).wait_event(there)
        buffer = self._buffers.get(key)
        nbytes = staged_BSD.nbytes
        if buffer is None or buffer.numel() < nbytes:
            size = max(nbytes, self._longest)
            on_host = self._tier is Tier.HOST
            buffer = host_buffers([size], self._device)[0] if on_host else self._scratch.bytes(size)
            self._buffers[key] = buffer
        self._held[key] = _as(staged_BSD, buffer).copy_(
            staged_BSD, non_blocking=self._tier is Tier.HOST
        )

    def load(self, key: Hashable, place: Tensor | None = None) -> Tensor:
        """Return the saved input on the device, in ``place`` where it was elsewhere. On a CPU it is
        the map itself: valid until the key is saved again."""
        held = self._held.pop(key)
        if not self._staged:
            return held
        assert place is not None
        return _as(held, place).copy_(held, non_blocking=True)


def _as(tensor: Tensor, buffer_P: Tensor) -> Tensor:
    """Return the beginning of a buffer, in a tensor's dtype and shape."""
    assert tensor.nbytes <= buffer_P.numel(), (tensor.shape, tensor.dtype, buffer_P.numel())
    return buffer_P[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


_PIECE = 8 << 20
"""Bytes of the file maps that saved tensors are written to, one after the other."""
_FRESH = 20.0
"""Seconds for which these maps are used again. Linux writes out what has been dirty for 30, though
nobody will read it from the disk: of SmolLM2's graphs 1.4 GB each time, in 5 s in which one of two
cores did nothing else (docs/tricks.md). The dirty pages of an unlinked file that is closed are
never written."""
_SMALL = 512
"""Bytes of memory below which a saved tensor stays there. It lies among a block's temporaries, in
whose place those of the next block then have no room: at 4096, where norms' statistics stayed, the
heap grew by 30 MB over SmolLM2's forward."""


class SavedTensors:
    """The tensors that the graph of one block and micro-batch saves for its backward, in file maps
    that are used again in every step.

    In memory they would be most of the bytes that a block needs, and all that a graph kept between
    forward and backward holds. Pages of a file are the kernel's to drop, and the backward pass
    reads them where they lie; copying them there costs a fraction of computing them again."""

    def __init__(self, scratch: ScratchMaps) -> None:
        self._scratch = scratch
        self._maps: list[Tensor] = []
        self._used: list[int] = []
        """The bytes of each map that were written, of any step."""
        self._place = (0, 0)
        self._since = 0.0
        self.nbytes = 0
        """The bytes written since the last :meth:`rewind`."""
        self._written: dict[object, tuple[StorageWeakRef, Tensor]] = {}

    def rewind(self) -> None:
        """Begin a new step: everything that was written may be overwritten, or goes with its
        map."""
        self._place = (0, 0)
        self.nbytes = 0
        if time.monotonic() > self._since + _FRESH:
            self._maps = []
            self._used = []
            self._since = time.monotonic()

    def will_need(self) -> None:
        """Bring back what was written since the last :meth:`rewind`, blocking."""
        number, stop = self._place
        will_need(
            [
                part_P[:used]
                for part_P, used in zip(self._maps[:number], self._used, strict=False)
                if used
            ]
        )
        if stop:
            will_need([self._maps[number][:stop]])

    def write(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in a map, with its strides where it has no gaps; a tensor
        that lies in a scratch map already is answered as it is."""
        if self._scratch.holds(tensor):
            return tensor
        order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
        dense = tensor.permute(order)
        if not dense.is_contiguous():
            order = list(range(tensor.dim()))
            dense = tensor
        copy = self._take(tensor.nbytes).view(tensor.dtype).view(dense.shape)
        copy.copy_(dense)
        # as data: what follows it in the map is not its change
        return copy.permute([order.index(d) for d in range(tensor.dim())]).data

    @contextmanager
    def saving(self, stays: Iterable[Tensor]) -> Iterator[None]:
        """Inside, tensors that autograd saves are written. Those that share memory with one of
        ``stays`` (parameters, and arguments that every block is given) are there anyway and are
        saved as they are."""
        there = {tensor.untyped_storage().data_ptr() for tensor in stays}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            small = storage.nbytes() < _SMALL  # of what stays, not of the part that is saved
            if small or storage.data_ptr() in there:
                return tensor
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # while it lives no other storage takes its number
            seen = (
                ref.cdata,
                tensor._version,
                tensor.dtype,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
            if seen not in self._written:
                self._written[seen] = ref, self.write(tensor)
            return self._written[seen][1]

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:
            self._written.clear()

    def _take(self, nbytes: int) -> Tensor:
        """Return a place (uint8 [nbytes]) behind the last one. A map that the kernel has taken
        pages of is made anew: it would read each from the disk, only to have it overwritten."""
        number, start = self._place
        while number < len(self._maps) and start + nbytes > self._maps[number].numel():
            number = number + 1
            start = 0
        if number == len(self._maps):
            self._maps.append(self._scratch.bytes(max(nbytes, _PIECE)))
            self._used.append(0)
        elif not start and not is_in_memory(self._maps[number][: self._used[number]]):
            self._maps[number] = self._scratch.bytes(self._maps[number].numel())
            self._used[number] = 0
        stop = min(start + -(-nbytes // ALIGN) * ALIGN, self._maps[number].numel())
        self._place = (number, stop)
        self._used[number] = max(self._used[number], stop)
        self.nbytes += nbytes
        return self._maps[number][start : start + nbytes]

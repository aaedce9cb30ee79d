"""The activations of one step: the inputs of blocks, on their tier; and what graphs save, in file
maps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from blockwalk.numerics.device import is_cpu, recorded
from blockwalk.plan.placement import StateKind, Tier
from blockwalk.tiers.memories import Memories
from blockwalk.tiers.reused_maps import ReusedMaps
from blockwalk.tiers.scratch_maps import ScratchMaps


class Activations:
    """The activation checkpoints of one step, on one tier. Buffers are kept from step to step.

    An input leaves an accelerator, and comes back, by way of one of so many device buffers
    (``places``), which take turns. The compute lane copies it there and goes on; what the allocator
    may use again is thus known when that copy is issued. The program says when a buffer may be
    filled again."""

    def __init__(self, tier: Tier, memories: Memories, places: int) -> None:
        self._device = memories.device
        self._memory = memories[tier]
        self._stays = tier.facts.is_device(self._device.type)
        self._staged = not (self._stays or is_cpu(self._device))
        self._pinned = tier.facts.pinned
        self._places: list[Tensor] = []
        self._turns = cycle(range(places))
        self._count = places
        self._longest = 0
        """Bytes of the largest input that is known of."""
        self._buffers: dict[Hashable, Tensor] = {}
        self._saved: dict[Hashable, Tensor] = {}

    def begin(self, nbytes: int) -> None:
        """Begin a step whose largest input has so many bytes: forget what a failed one has left."""
        self._saved.clear()
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
            for key in self._buffers:
                self._memory.forget((StateKind.ACTIVATION, key))
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

    def save(self, key: Hashable, staged_BSD: Tensor, copied: torch.Event | None = None) -> None:
        """Copy a block's input, as :meth:`stage` answered it, to its tier; on the device tier it is
        kept as it is."""
        if self._stays:
            self._saved[key] = staged_BSD
            return
        if copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied)
        buffer_P = self._buffer(key, staged_BSD.nbytes)
        self._saved[key] = _as(staged_BSD, buffer_P).copy_(staged_BSD, non_blocking=self._pinned)

    def _buffer(self, key: Hashable, nbytes: int) -> Tensor:
        """Return the buffer of a key on the tier, of at least so many bytes."""
        if key not in self._buffers or self._buffers[key].numel() < nbytes:
            shapes = {"input": ((max(nbytes, self._longest),), torch.uint8)}
            self._buffers[key] = self._memory.zeros(shapes, (StateKind.ACTIVATION, key))["input"]
        return self._buffers[key]

    def load(self, key: Hashable, place: Tensor | None = None) -> Tensor:
        """Return the saved input on the device, in ``place`` where it was elsewhere. On a CPU it is
        the map itself: valid until the key is saved again."""
        saved_BSD = self._saved.pop(key)
        if not self._staged:
            return saved_BSD
        assert place is not None
        return _as(saved_BSD, place).copy_(saved_BSD, non_blocking=True)


def _as(tensor: Tensor, buffer_P: Tensor) -> Tensor:
    """Return the beginning of a buffer, in a tensor's dtype and shape."""
    assert tensor.nbytes <= buffer_P.numel(), (tensor.shape, tensor.dtype, buffer_P.numel())
    return buffer_P[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


_SMALL = 512
"""Bytes of memory below which a saved tensor stays there. It lies among a block's temporaries, in
whose place those of the next block then have no room: at 4096, where norms' statistics stayed, the
heap grew by 30 MB over SmolLM2's forward."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of elements of a storage."""

    tensor: Tensor
    places: tuple[object, ...]
    """The place, shape and strides, in the storage, of what was copied."""
    begin: int
    end: int
    """The elements of the storage that are in the copy, side by side; none where there are gaps."""

    @classmethod
    def of_storage(cls, tensor: Tensor, copy: Tensor) -> _Copy:
        """Describe the copy of a tensor."""
        begin = int(tensor.storage_offset())
        count = tensor.numel() if _has_no_gaps(tensor) else 0
        return cls(copy, _places(tensor), begin, begin + count)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the copy of a tensor of the same storage, where it is part of this one. Two views
        of the same elements without gaps, as [B, S, D] and [B S, D], are one copy."""
        if self.places == _places(tensor):
            return self.tensor
        first = tensor.storage_offset()
        within = self.begin <= first and first + tensor.numel() <= self.end
        if not within or not _has_no_gaps(tensor):
            return None
        offset = self.tensor.storage_offset() + first - self.begin
        return self.tensor.as_strided(tensor.shape, tensor.stride(), offset)


def _places(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


class SavedTensors(ReusedMaps):
    """The tensors that the graph of one block and micro-batch saves for its backward, in file maps
    that are used again in every step.

    In memory they would be most of the bytes that a block needs, and all that a graph kept between
    forward and backward holds. Pages of a file are the kernel's to drop, and the backward pass
    reads them where they lie; copying them there costs a fraction of computing them again."""

    def __init__(self, scratch: ScratchMaps) -> None:
        super().__init__(scratch)
        self._written: dict[object, tuple[StorageWeakRef, list[_Copy]]] = {}

    def write(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in a map, with its strides where it has no gaps; a tensor
        that lies in a scratch map already is answered as it is."""
        if self._scratch.holds(tensor):
            return tensor
        place_P = self.take(tensor.nbytes).view(tensor.dtype)
        if _has_no_gaps(tensor):
            copy = place_P.as_strided(tensor.shape, tensor.stride())
        else:
            copy = place_P.view(tensor.shape)
        # as data: what follows it in the map is not its change
        return copy.copy_(tensor).data

    @contextmanager
    def saving(self, stays: Iterable[Tensor]) -> Iterator[None]:
        """Inside, tensors that autograd saves are written. Those that share memory with one of
        ``stays`` (parameters, and arguments that every block is given) are there anyway and are
        saved as they are."""
        staying = {tensor.untyped_storage().data_ptr() for tensor in stays}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in staying:
                return tensor
            if storage.nbytes() < _SMALL:  # of what stays, not of the part that is saved
                return tensor.detach()  # an operation that saved its own answer would hold itself
            identity = (storage._cdata, tensor._version, tensor.dtype)
            if identity not in self._written:
                # while it lives no other storage takes its number
                ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._written[identity] = (ref, [])
            _, copies = self._written[identity]
            for copy in copies:
                if (found := copy.of(tensor)) is not None:
                    return found
            copies.append(_Copy.of_storage(tensor, self.write(tensor)))
            return copies[-1].tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:
            self._written.clear()


def _has_no_gaps(tensor: Tensor) -> bool:
    """True where the elements of a tensor fill a piece of its storage, in some order of its
    dimensions."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()

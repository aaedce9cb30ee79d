"""Copies of a model's parameters in another dtype, one unit at a time, for a trial with gradients.

What autograd saves of a copy is made again when the backward pass reads it, so that the copies of
one unit are alone in memory. Gradients are given to a function, and never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blockwalk.numerics.codecs.weights import DenseWeight, Value


class _Leaf(torch.autograd.Function):
    """A tensor whose gradient goes to a function instead of its ``grad``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        """Return the value as a tensor that has a gradient."""
        ctx.note = note
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """Hand the gradient over, pass it on to a graph, and answer the anchor's: nothing."""
        ctx.note(gradients[0])
        passed_on = gradients[0] if ctx.needs_input_grad[0] else None
        return passed_on, torch.zeros((), device=gradients[0].device), None


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor that autograd saved: a view of a copy, by its source and its place in it."""

    source: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _references(tensor: Tensor) -> int:
    """Return how many references there are to a tensor's memory, this question's among them."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


@cache
def _references_of_one() -> int:
    """Return the references to memory that one tensor has alone."""
    return _references(torch.empty(1))


@dataclass
class _Copies:
    """Copies of parameters, in memory that goes from one to the next of its size. A heap in which
    copies come and go beside what a graph saves would grow by the holes that they leave."""

    dtype: torch.dtype
    _by_size: dict[tuple[int, torch.device], list[Tensor]] = field(default_factory=dict)

    def of(self, value: Tensor) -> Tensor:
        """Return a copy of a parameter, in memory that nothing refers to any more, or new one."""
        if not value.is_contiguous():
            return value.to(self.dtype)
        pieces_P = self._by_size.setdefault((value.numel(), value.device), [])
        for piece_P in pieces_P:
            if _references(piece_P) == _references_of_one():
                break
        else:
            piece_P = torch.empty(value.numel(), dtype=self.dtype, device=value.device)
            pieces_P.append(piece_P)
        return piece_P.detach().view(value.shape).copy_(value)


@dataclass
class TrialWeights:
    """Copies of parameters in one dtype."""

    dtype: torch.dtype
    anchor: Tensor
    """A leaf, 0-d, on which the graph of every trained copy ends."""
    _copies: _Copies = field(init=False)
    _sources: dict[int, Tensor] = field(default_factory=dict)
    """The sources of copies that are there now, by the address of a copy's memory."""

    def __post_init__(self) -> None:
        self._copies = _Copies(self.dtype)

    def copy(self, value: Tensor) -> Tensor:
        """Return a parameter as the trial computes with it: itself in the trial's dtype, else a
        copy."""
        value = value.detach()
        if not value.is_floating_point() or value.dtype == self.dtype:
            return value
        copy = self._copies.of(value)
        self._sources[copy.untyped_storage().data_ptr()] = value
        return copy

    def lazy(self, value: Tensor) -> Value:
        """Return a frozen parameter as products read it: a matrix in another dtype a range at a
        time."""
        if value.dim() == 2 and value.is_floating_point() and value.dtype != self.dtype:
            return DenseWeight(value.detach(), self.dtype)
        return self.copy(value)

    def trained(self, value: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        """Return a parameter whose gradient goes to ``note``."""
        return self.watched(self.copy(value), note)

    def watched(self, value: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        """Return a tensor of a graph, or one without, whose gradient goes to ``note`` alone."""
        watched: Tensor = _Leaf.apply(value, self.anchor, note)  # type: ignore[no-untyped-call]
        return watched

    def forget(self, values: Mapping[str, Value]) -> None:
        """Note that copies are about to go."""
        for value in values.values():
            if isinstance(value, Tensor) and not value.is_meta:
                self._sources.pop(value.untyped_storage().data_ptr(), None)

    @contextmanager
    def remade(self) -> Iterator[None]:
        """Let autograd save the place of a copy instead of the copy."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.is_meta or tensor.layout is not torch.strided:
            return tensor
        source = self._sources.get(tensor.untyped_storage().data_ptr())
        if source is None or tensor.dtype != self.dtype:
            return tensor
        return _Packed(
            source, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Packed):
            return packed  # type: ignore[no-any-return]
        copy = self._copies.of(packed.source)
        return copy.as_strided(packed.size, packed.stride, packed.offset)

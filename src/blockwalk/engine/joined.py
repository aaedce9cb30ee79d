"""The tensors of a unit's adapters side by side in one buffer, so that what is done to every
element of them is one operator: an update, a cast, a copy for a step that may be refused. A block
has a dozen of these tensors, each so small that starting an operator is most of its cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from blockwalk.plan.sizes import side_by_side
from blockwalk.tiers.memory import Shapes


class Joined:
    """The places of a unit's float32 tensors in one buffer.

    Args:
        shapes: the tensors, as a memory makes them side by side, in this order.
        names: the order in which a turn of the unit reads them.
    """

    def __init__(self, shapes: Shapes, names: Sequence[str]) -> None:
        sizes = [math.prod(shape) for shape, _ in shapes.values()]
        starts, self.nbytes = side_by_side(4 * size for size in sizes)
        self.numel = self.nbytes // 4
        """Elements of the buffer, with those between the tensors."""
        self.places = [(start // 4, name) for start, name in zip(starts, shapes, strict=True)]
        """The first element and the name of each tensor, in their order."""
        self.names = tuple(names)
        ends = [*(start // 4 for start in starts[1:]), self.numel]
        self._parts: list[Tensor] = []
        """Tensors without data, of the shapes of all parts of the buffer: tensors, and gaps."""
        part_of: dict[str, int] = {}
        for (name, (shape, _)), size, (start, _), end in zip(
            shapes.items(), sizes, self.places, ends, strict=True
        ):
            part_of[name] = len(self._parts)
            self._parts.append(torch.empty(tuple(shape), device="meta"))
            if gap := end - start - size:
                self._parts.append(torch.empty(gap, device="meta"))
        self._part_of = [part_of[name] for name in self.names]

    def buffer(self, device: torch.device) -> Tensor:
        """Return a new buffer, float32 [numel], of zeros: the gaps stay so."""
        return torch.zeros(self.numel, device=device)

    def whole(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the buffer, float32 [numel], of tensors that a memory made side by side."""
        first = tensors[0]
        whole_P = first.as_strided((self.numel,), (1,))
        for tensor, (start, _) in zip(tensors, self.places, strict=True):
            assert tensor.data_ptr() == first.data_ptr() + 4 * start, "they lie apart"
        return whole_P

    def tensors(self, whole_P: Tensor) -> list[Tensor]:
        """Return the tensors in a buffer [numel] of any dtype, in the order of :attr:`names`."""
        parts = _unflatten_dense_tensors(whole_P, self._parts)  # type: ignore[no-untyped-call]
        return [parts[number] for number in self._part_of]

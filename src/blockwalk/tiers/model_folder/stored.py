"""One tensor of a checkpoint's file: what a format's reader answers for each, so that a map can
serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockwalk.numerics.codecs.layout import Bytes, Layout, Parts, name_of
from blockwalk.numerics.codecs.readers import Reader
from blockwalk.numerics.codecs.weights import EncodedWeight, Weight, opened
from blockwalk.plan.placement import Codec


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The name of a tensor in its file, the place of its bytes there (offset from the start of the
    file), and their form."""

    key: str
    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    """The dtype of its numbers; float32 where they are codes."""
    shape: tuple[int, ...]
    codec: Codec = Codec.RAW
    order: Tensor | None = field(default=None, compare=False)
    """The place in the file of each of its rows, see
    :class:`~blockwalk.numerics.codecs.layout.Layout`."""
    plus: float = 0.0
    """A number that the file's values lack."""
    parts: tuple[StoredTensor, ...] = ()
    """The tensors of the files that it consists of, where it is more than one; its own place is the
    first one's."""
    reader: Callable[[Sequence[Tensor]], Reader] | None = field(default=None, compare=False)
    """The reader that is made of those."""

    @property
    def layout(self) -> Layout:
        sizes = self.codec.facts.group_sizes
        parts = None
        if self.reader is not None:
            parts = Parts(tuple((part.dtype, part.shape) for part in self.parts), self.reader)
        return Layout(
            self.shape,
            self.codec,
            name_of(self.dtype),
            sizes[0] if sizes else 32,
            self.order,
            parts,
        )

    @property
    def in_place(self) -> bool:
        """Whether its bytes serve as they lie: as a tensor, or as an encoded matrix or experts."""
        return not self.codec.encoded or len(self.shape) > 1

    def open(self, bytes_P: Bytes) -> Tensor | Weight:
        """Return the tensor over its bytes (uint8 [nbytes], or its parts): a view of them, a Weight
        where rows are decoded or put in order when they are read, and a fresh tensor where it is
        small and another number is added."""
        if self.order is not None and len(self.shape) == 2:
            return EncodedWeight(bytes_P, self.layout, self.dtype)
        value = opened(self.layout, bytes_P)
        if isinstance(value, Tensor):
            ordered = value if self.order is None else value[self.order]
            return ordered + self.plus if self.plus else ordered
        return value

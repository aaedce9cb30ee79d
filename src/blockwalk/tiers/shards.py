"""A rank's share of one part of a unit: slices of a flat buffer, each over its own group of ranks.

P elements of the flat buffer; where its matrices are encoded, an element is a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from blockwalk.compile.sharded_layout import FlatLayout, travels_as, written_as
from blockwalk.state import Codec, ParamSpec, Weight
from blockwalk.tiers.layout import Layout
from blockwalk.tiers.weights import EncodedWeight

Read = Callable[[ParamSpec], torch.Tensor]
"""A whole parameter as its flat buffer holds it, in any shape."""


@dataclass(slots=True)
class Shard:
    """What a rank keeps of one part of a unit between its turns."""

    layout: FlatLayout
    params: Mapping[str, ParamSpec]
    """By canonical name, in the order of the layout."""
    compute_dtype: torch.dtype
    source: torch.Tensor | None = None
    """The slice over Z1 in the compute dtype: what gathers begin with. It may be the master itself, or lie in ``node``."""
    node: torch.Tensor | None = None
    """The slice over Z3 in the compute dtype, on the device or on the host."""
    master: torch.Tensor | None = None
    """The slice over Z1 in float32, of trainables."""
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    """The optimizer's states, slices over Z1 in float32, by name."""
    gradient: torch.Tensor | None = None
    """The sum over all ranks, a slice over Z1 in float32."""
    accumulator: torch.Tensor | None = None
    """Gradients that wait for further micro-batches: a slice over Z2 in float32."""

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def dtype(self) -> torch.dtype:
        """Of the flat buffer's elements."""
        return self.compute_dtype if self.layout.codec is Codec.RAW else torch.uint8

    def encoding(self, param: ParamSpec) -> Layout:
        """How a parameter's bytes are laid out, where elements are bytes."""
        name = str(self.compute_dtype).removeprefix("torch.")
        return Layout(param.shape, written_as(param, self.layout.codec), travels_as(param, name))

    def weights(self, flat_P: torch.Tensor) -> dict[str, torch.Tensor | Weight]:
        """The parameters, by name, in a buffer that holds all of them: views, and encoded matrices that are decoded when
        they are used."""
        if self.layout.codec is Codec.RAW:
            return dict(self.views(flat_P))
        found: dict[str, torch.Tensor | Weight] = {}
        for name, start in self.layout.offsets:
            layout = self.encoding(self.params[name])
            bytes_P = flat_P[start : start + layout.nbytes]
            dense = layout.codec is Codec.RAW
            found[name] = (
                bytes_P.view(getattr(torch, layout.dtype)).view(layout.shape)
                if dense
                else EncodedWeight(bytes_P, layout, self.compute_dtype)
            )
        return found

    def views(self, flat_P: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters, by name, in a buffer of numbers that holds all of them, in any dtype; what keeps float32's bits in a
        narrower one, in float32."""
        assert self.layout.codec is Codec.RAW, "encoded parameters have no views"
        views = {}
        for name, start in self.layout.offsets:
            shape, dtype = torch.Size(self.params[name].shape), str(flat_P.dtype).removeprefix("torch.")
            own: torch.dtype = getattr(torch, travels_as(self.params[name], dtype))
            stop = start + shape.numel() * own.itemsize // flat_P.itemsize
            views[name] = flat_P[start:stop].view(own).view(shape)
        return views

    def held(self) -> dict[str, torch.Tensor]:
        """The trainables' state that outlives a step, by kind: slices over Z1."""
        return {} if self.master is None else {"master": self.master, **self.moments}


def read_slice(out_P: torch.Tensor, shard: Shard, start: int, read: Read) -> None:
    """Fill ``out_P``, the elements from ``start`` on of the flat buffer, from whole parameters; padding becomes zero."""
    stop = start + out_P.numel()
    out_P.zero_()
    ends = [first for _, first in shard.layout.offsets[1:]] + [shard.numel]
    for (name, first), end in zip(shard.layout.offsets, ends, strict=True):
        if max(first, start) < min(end, stop):
            flat_P = read(shard.params[name]).reshape(-1)
            low, high = max(first, start), min(first + len(flat_P), stop)
            if low < high:
                out_P[low - start : high - start].copy_(flat_P[low - first : high - first])

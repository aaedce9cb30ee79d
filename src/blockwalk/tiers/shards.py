"""A rank's share of one part of a unit: slices of a flat buffer, each over its own group of ranks.

P elements of the flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from blockwalk.compile.sharded_layout import FlatLayout

Read = Callable[[str], torch.Tensor]
"""A whole parameter by its canonical name, where it lies."""


@dataclass(slots=True)
class Shard:
    """What a rank keeps of one part of a unit between its turns."""

    layout: FlatLayout
    shapes: Mapping[str, tuple[int, ...]]
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

    def views(self, flat_P: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters, by name, in a buffer that holds all of them."""
        views = {}
        for name, start in self.layout.offsets:
            shape = torch.Size(self.shapes[name])
            views[name] = flat_P[start : start + shape.numel()].view(shape)
        return views

    def held(self) -> dict[str, torch.Tensor]:
        """The trainables' state that outlives a step, by kind: slices over Z1."""
        return {} if self.master is None else {"master": self.master, **self.moments}


def read_slice(out_P: torch.Tensor, shard: Shard, start: int, read: Read) -> None:
    """Fill ``out_P``, the elements from ``start`` on of the flat buffer, from whole parameters; padding becomes zero."""
    stop = start + out_P.numel()
    out_P.zero_()
    for name, first in shard.layout.offsets:
        last = first + torch.Size(shard.shapes[name]).numel()
        low, high = max(first, start), min(last, stop)
        if low < high:
            flat = read(name).reshape(-1)
            out_P[low - start : high - start].copy_(flat[low - first : high - first])

"""One call of a module on the stacked rows of several forwards, each with its own perturbed
parameters.

A linear layer reads the common weight once; any other module answers part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.numerics.codecs.weights import LowRankSum, Value
from blockwalk.numerics.lazy_linear import lazy_linear_by_part


class NotByPart(Exception):
    """A module was called with something else than all rows, or answers something else than a
    tensor."""


class ByPart:
    """The forward of a module for the time of such a call.

    Args:
        leaves: the values of its parameters, one for each part, by attribute.
        hidden_PSD: the block's input: parts of as many rows each.
        placed: a value as the module's attribute.
    """

    def __init__(
        self,
        module: nn.Module,
        leaves: Mapping[str, Sequence[Value]],
        hidden_PSD: Tensor,
        placed: Callable[[Value], Tensor],
    ) -> None:
        self.module = module
        self.leaves = leaves
        self.placed = placed
        self.called = False
        self._forward = module.forward
        self._rows = (hidden_PSD.shape[0], hidden_PSD.shape[0] * hidden_PSD.shape[1])

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if len(args) == 1 and not kwargs else None
        if self.called or not isinstance(x, Tensor) or x.shape[0] not in self._rows:
            raise NotByPart
        self.called = True
        count = len(next(iter(self.leaves.values())))
        weights = self.leaves.get("weight", ())
        transposed = type(self.module).__name__ == "Conv1D"
        linear = transposed or type(self.module).forward is nn.Linear.forward
        alike = all(isinstance(weight, LowRankSum | Tensor) for weight in weights)
        sums = [weight if isinstance(weight, LowRankSum) else None for weight in weights]
        if linear and alike and any(sums):  # a tensor among them is the weight as it is
            biases = self.leaves.get("bias", [self.module.bias] * count)
            return lazy_linear_by_part(
                x,
                sums,
                biases,  # type: ignore[arg-type]
                transposed=transposed,
            )
        outs = []
        for i, part in enumerate(x.chunk(count)):
            for leaf, values in self.leaves.items():
                self.module._parameters[leaf] = self.placed(values[i])  # type: ignore[assignment]
            outs.append(self._forward(part))
        if not all(isinstance(out, Tensor) for out in outs):
            raise NotByPart
        return torch.cat(outs)

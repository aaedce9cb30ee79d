"""A block's call and a batch's prologue, as values.

B batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from blockwalk.arguments import rebuild


@dataclass(frozen=True, eq=False)
class BlockCall:
    """What one block is called with for one batch: an explicit value, to be run any number of times in any order."""

    unit: int
    module: nn.Module
    hidden_at: int | str
    """Position or keyword of the hidden state."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    differentiable: tuple[torch.Tensor, ...]
    """Leaves among the arguments that receive a gradient; blocks that share an argument share its leaf."""
    live_cache: bool = False
    """Whether the block writes into the batch's own key-value cache (generation), not into a view of it."""

    def view(self, hidden_BSD: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for one run, in containers of their own."""
        live = self.live_cache
        args = [rebuild(value, _same, f"argument {i}", share_caches=live) for i, value in enumerate(self.args)]
        kwargs = {name: rebuild(value, _same, name, share_caches=live) for name, value in self.kwargs.items()}
        if isinstance(self.hidden_at, int):
            args[self.hidden_at] = hidden_BSD
        else:
            kwargs[self.hidden_at] = hidden_BSD
        return args, kwargs


@dataclass(frozen=True, eq=False)
class Prologue:
    """The skeleton pass of one batch: the first block's hidden state, and every block's call."""

    hidden_BSD: torch.Tensor
    calls: tuple[BlockCall, ...]
    sources: tuple[torch.Tensor, ...]
    """Tensors of the prologue's graph that blocks take as arguments, beside the hidden state."""
    leaves: tuple[torch.Tensor, ...]
    """Their stand-ins in the calls, in the same order."""
    stand_ins: Mapping[str, tuple[Any, ...]]
    """What the prologue's modules answered, on the meta device: the epilogue's pass runs on zeros of these shapes."""

    def backward(
        self, grad_hidden_BSD: torch.Tensor | None, grad_leaves: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """Backpropagate through the prologue's graph into ``.grad`` of its trainable parameters.

        ``grad_leaves`` are the gradients of ``leaves`` summed over the blocks (None: taken from ``leaf.grad``).
        """
        given = [leaf.grad for leaf in self.leaves] if grad_leaves is None else grad_leaves
        pairs = [
            (source, grad)
            for source, grad in zip((self.hidden_BSD, *self.sources), (grad_hidden_BSD, *given), strict=True)
            if grad is not None and source.requires_grad
        ]
        if pairs:
            torch.autograd.backward([source for source, _ in pairs], [grad for _, grad in pairs])


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

"""Outputs whose values no gradient reads, so that a recomputation may leave their products out.

In most decoders the last linear layer of a block is only added to the residual stream. Differentiating a sum reads neither
term: when the block is recomputed for its backward pass, that layer's product, a third of a feed-forward's, is work for
nothing. Whether a model is of that kind is found by trial, not by name: each linear layer's output is made NaN in turn,
with its graph as it was, and the gradients show who read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from blockwalk.blocks import BlockCall, CutModel


def unread_outputs(cut: CutModel, batch: Mapping[str, torch.Tensor], seed: int) -> tuple[str, ...]:
    """Paths of linear layers inside a block (``mlp.down_proj``) whose output no gradient of any block reads.

    Args:
        cut: a small instance with its parameters in place.
        batch: what it is run on, in evaluation and, where it draws random numbers, in training mode.
        seed: of the gradients that are handed to the blocks.
    """
    was_training = cut.model.training
    read: set[str] = set()
    unread: set[str] = set()
    for training in (False, True) if cut.draws_random_numbers else (False,):
        cut.model.train(training)
        prologue = cut.prologue(batch, seed)
        hidden_BSD = prologue.hidden_BSD.detach()
        for call in prologue.calls:
            expected = _gradients(cut, call, hidden_BSD, seed)
            for path, module in call.module.named_modules():
                if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and path not in read:
                    handle = module.register_forward_hook(lambda _module, _inputs, output: output + torch.nan)
                    try:
                        same = _same(_gradients(cut, call, hidden_BSD, seed), expected)
                    except (RuntimeError, ValueError, TypeError):  # looked at on the way, or no tensor (a router's tuple)
                        same = False
                    finally:
                        handle.remove()
                    (unread if same else read).add(path)
            with torch.no_grad():
                hidden_BSD = cut.forward(call, hidden_BSD, seed)
    cut.model.train(was_training)
    return tuple(sorted(unread - read))


def _gradients(cut: CutModel, call: BlockCall, hidden_BSD: torch.Tensor, seed: int) -> list[torch.Tensor | None]:
    """Of a block's input, parameters and differentiable arguments."""
    leaf_BSD = hidden_BSD.clone().requires_grad_()
    inputs = [leaf_BSD, *(p for p in call.module.parameters() if p.requires_grad), *call.differentiable]
    output_BSD = cut.forward(call, leaf_BSD, seed)
    generator = torch.Generator().manual_seed(seed)
    grad_BSD = torch.randn(output_BSD.shape, generator=generator, dtype=output_BSD.dtype)
    return list(torch.autograd.grad(output_BSD, inputs, grad_BSD, allow_unused=True))


def _same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-6, atol=1e-9)
        for a, b in zip(found, expected, strict=True)
    )

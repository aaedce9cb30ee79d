"""The linear layers of a block whose output no gradient reads, found by trying: their products are
left out when a block is recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockwalk.cutting.calls import BlockCall
from blockwalk.cutting.cut_model import CutModel


def unread_outputs(cut: CutModel, batch: Mapping[str, Tensor], seed: int) -> tuple[str, ...]:
    """Return paths of linear layers inside a block (``mlp.down_proj``) whose output no gradient of
    any block reads.

    Args:
        cut: a small instance with its parameters in place.
        batch: what it is run on, in evaluation and, where it draws random numbers, in training
            mode.
        seed: of the gradients that are handed to the blocks.
    """
    was_training = cut.model.training
    readings: dict[str, bool] = {}
    for training in (False, True) if cut.draws_random_numbers else (False,):
        cut.model.train(training)
        prologue = cut.prologue(batch, seed)
        hidden_BSD = prologue.hidden_BSD.detach()
        for call in prologue.calls:
            expected = _gradients(cut, call, hidden_BSD, seed)
            for path, module in call.module.named_modules():
                is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
                if is_linear and not readings.get(path):
                    gradients = _gradients_with_nan(cut, call, module, hidden_BSD, seed)
                    readings[path] = gradients is None or not _same(gradients, expected)
            with torch.no_grad():
                hidden_BSD = cut.forward(call, hidden_BSD, seed)
    cut.model.train(was_training)
    return tuple(sorted(path for path, is_read in readings.items() if not is_read))


def _gradients_with_nan(
    cut: CutModel, call: BlockCall, module: nn.Module, hidden_BSD: Tensor, seed: int
) -> list[Tensor | None] | None:
    """Return :func:`_gradients` where a module's output is not a number; None where the block
    looks at it on the way, or it is no tensor (a router's tuple)."""

    def spoilt(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output + torch.nan

    handle = module.register_forward_hook(spoilt)
    try:
        return _gradients(cut, call, hidden_BSD, seed)
    except (RuntimeError, ValueError, TypeError):
        return None
    finally:
        handle.remove()


def _gradients(
    cut: CutModel, call: BlockCall, hidden_BSD: Tensor, seed: int
) -> list[Tensor | None]:
    """Return gradients of a block's input, parameters and differentiable arguments, in that
    order."""
    leaf_BSD = hidden_BSD.clone().requires_grad_()
    parameters = [p for p in call.module.parameters() if p.requires_grad]
    inputs = [leaf_BSD, *parameters, *call.leaves]
    result = cut.run(call, leaf_BSD, seed)
    outputs = [tensor for tensor in result.outputs if tensor.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outputs]
    return list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))


def _same(gradients: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    pairs = zip(gradients, expected, strict=True)
    return all(
        a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-6, atol=1e-9)
        for a, b in pairs
    )

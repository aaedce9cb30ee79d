"""The oracle of the walk: a whole model's own forward and autograd, and a walk over it block by
block to be compared."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.shrink import shrink
from blockwalk.cutting.skeleton import model_class
from blockwalk.numerics.row_tiles import NarrowProducts

SEED = 11


def tiny_config(model_type: str, **settings: object):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    return shrink(CONFIG_MAPPING[model_type](**settings))


def tiny_model(config, dtype: torch.dtype = torch.float32):
    """A real model with random weights large enough that caps, norms and routers do something."""
    torch.manual_seed(SEED)
    model = model_class(config)._from_config(copy.deepcopy(config), dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape) * (
                0.7 / param.shape[-1] ** 0.5 if param.ndim > 1 else 0.1
            )
            param.copy_(noise if param.ndim > 1 else param + noise)
    return model


def tiny_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocab_size, (2, 9), generator=torch.Generator().manual_seed(SEED))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def control(model, batch, layers, *, seeded: bool):
    """Loss, logits and gradients by the model's own forward and autograd; hooks seed each unit's
    dropout.

    Where a walk multiplies in tiles of few shapes the model does so as well: one rounding of
    bfloat16 is more than a tied weight's two gradients may differ by
    (:mod:`tests.autograd.test_row_tiles` holds the tiles to float64)."""
    hooks = []
    if seeded:
        for unit, layer in enumerate(layers, 1):
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda *_, s=SEED + unit: torch.manual_seed(s) and None
                )
            )
        epilogue_seed = SEED + len(layers) + 1
        hooks.append(
            layers[-1].register_forward_hook(lambda *_: torch.manual_seed(epilogue_seed) and None)
        )
    torch.manual_seed(SEED)
    with NarrowProducts():
        out = model(**batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    names, params = zip(
        *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
    )
    grads = torch.autograd.grad(out.loss, params, allow_unused=True)
    return (
        out.loss.detach(),
        out.logits.detach(),
        {n: g for n, g in zip(names, grads, strict=True) if g is not None},
    )


def head_loss(
    cut: CutModel, normed: torch.Tensor, values: Mapping[str, torch.Tensor], labels: torch.Tensor
):
    """Logits and loss from what `HeadSpec` says of the head."""
    head = cut.head
    logits = (
        F.linear(normed, values[head.weight], values[head.bias] if head.bias else None) * head.scale
    )
    if head.soft_cap:
        logits = torch.tanh(logits / head.soft_cap) * head.soft_cap
    return logits, F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def walk(cut: CutModel, params: Mapping[str, torch.Tensor], batch):
    """Forward without a graph, then each block recomputed with one, the prologue's graph last;
    units hold their own only."""
    units = cut.spec().units
    grads: dict[str, torch.Tensor] = {}

    def bind(unit: int) -> dict[str, torch.Tensor]:
        return cut.bind(unit, {spec.name: params[spec.name] for spec in units[unit].params})

    def collect(leaves: Mapping[str, torch.Tensor]) -> None:
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                grads[name] = grads[name] + leaf.grad if name in grads else leaf.grad

    epilogue = cut.epilogue_index
    first_leaves = bind(0)
    prologue = cut.prologue(batch, SEED)
    cut.unbind(0)
    saved = [prologue.hidden_BSD.detach()]
    with torch.no_grad():
        for call in prologue.calls:
            bind(call.unit)
            saved.append(cut.forward(call, saved[-1], SEED + call.unit))
            cut.unbind(call.unit)
    hidden = saved.pop().requires_grad_()
    leaves = bind(epilogue)
    if cut.head.tied:
        leaves |= cut.bind(epilogue, {cut.head.weight: params[cut.head.weight]})
    if cut.head.custom:
        logits = cut.logits(prologue, hidden.detach(), batch, SEED + epilogue)
        loss = cut.own_loss(prologue, hidden, batch, SEED + epilogue)
    else:
        normed = cut.head_input(prologue, hidden, batch, SEED + epilogue)
        logits, loss = head_loss(cut, normed, params | leaves, batch["labels"])
    loss.backward()
    cut.unbind(epilogue)
    collect(leaves)
    for call in reversed(prologue.calls):
        grad = hidden.grad
        hidden = saved.pop().requires_grad_()
        leaves = bind(call.unit)
        cut.forward(call, hidden, SEED + call.unit).backward(grad)
        cut.unbind(call.unit)
        collect(leaves)
    if (roots := prologue.roots(hidden.grad, [leaf.grad for leaf in prologue.leaves]))[0]:
        torch.autograd.backward(*roots)
    collect(first_leaves)
    return loss.detach(), logits.detach(), grads


def assert_same(walked, controlled, tolerance: float) -> None:
    loss, logits, grads = walked
    own_loss, own_logits, own_grads = controlled
    torch.testing.assert_close(loss, own_loss, rtol=tolerance, atol=0)
    torch.testing.assert_close(
        logits, own_logits, rtol=tolerance, atol=tolerance * float(own_logits.abs().max())
    )
    assert grads.keys() == own_grads.keys()
    largest = max(float(grad.float().norm()) for grad in own_grads.values())
    for name, expected in own_grads.items():
        bound = tolerance * max(float(expected.float().norm()), 1e-3 * largest)
        assert float((grads[name].float() - expected.float()).norm()) <= bound, name

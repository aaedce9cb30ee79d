"""The comparison of a walk with the model's own forward and autograd, the control: loss, logits and
every gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockwalk.cutting.anatomy import Anatomy, canonical_name
from blockwalk.cutting.cut_model import CutModel
from blockwalk.cutting.small_instance import SEED, TOLERANCE, difference
from blockwalk.numerics.drawing import DrawingFrom


@dataclass(frozen=True)
class Run:
    """A loss, its logits [B, S, V] and the gradient of every parameter, by canonical name."""

    loss: Tensor
    logits: Tensor
    gradients: Mapping[str, Tensor]


def control_run(model: Any, cut: CutModel, batch: Mapping[str, Tensor]) -> Run:
    """Return the model's own forward and autograd; each unit seeds the random numbers as the walk
    does."""
    handles = []
    generator = torch.Generator()
    if model.training:
        for unit in range(1, cut.epilogue_index):
            module = cut.modules(unit)[0]
            handles.append(
                module.register_forward_pre_hook(
                    lambda *_, unit=unit: generator.manual_seed(SEED + unit) and None
                )
            )
        handles.append(
            module.register_forward_hook(
                lambda *_: generator.manual_seed(SEED + cut.epilogue_index) and None
            )
        )
    generator.manual_seed(SEED)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        with DrawingFrom(generator):
            out = model(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    named = zip(
        params, torch.autograd.grad(out.loss, list(params.values()), allow_unused=True), strict=True
    )
    gradients = {canonical_name(n, cut.adapters): g for n, g in named if g is not None}
    return Run(out.loss.detach(), out.logits.detach(), gradients)


def walk_run(cut: CutModel, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Run:
    """Return the run block by block, to be compared with :func:`control_run`: forward without a
    graph, then every block recomputed with one, last to first.

    ``params`` are the parameters by canonical name, out of the modules; each unit holds its own
    only while at work."""
    epilogue = cut.epilogue_index
    gradients: dict[str, Tensor] = {}
    owned = [[spec.name for spec in unit.params] for unit in cut.spec().units]
    owned[epilogue] += [cut.head.weight] if cut.head.tied else []

    def bind(unit: int) -> dict[str, Tensor]:
        return cut.bind(unit, {name: params[name] for name in owned[unit]})

    def collect(leaves: Mapping[str, Tensor]) -> None:
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad

    first_leaves = bind(0)
    prologue = cut.prologue(batch, SEED)
    cut.unbind(0)
    inputs = [prologue.hidden_BSD.detach()]
    with torch.no_grad():
        for call in prologue.calls:
            bind(call.unit)
            inputs.append(cut.forward(call, inputs[-1], SEED + call.unit))
            cut.unbind(call.unit)
    hidden = inputs.pop().requires_grad_(True)
    leaves = bind(epilogue)
    logits = cut.logits(prologue, hidden.detach(), batch, SEED + epilogue).detach()
    loss = cut.own_loss(prologue, hidden, batch, SEED + epilogue)
    torch.autograd.backward(loss)
    cut.unbind(epilogue)
    collect(leaves)
    grad = hidden.grad
    for call in reversed(prologue.calls):
        leaves = bind(call.unit)
        hidden = inputs.pop().requires_grad_(True)
        result = cut.run(call, hidden, SEED + call.unit)
        seeds = [grad, *(leaf.grad for leaf in call.handed.leaves_of(call.unit))]
        reached = [pair for pair in zip(result.outputs, seeds, strict=True) if pair[1] is not None]
        torch.autograd.backward([output for output, _ in reached], [seed for _, seed in reached])
        cut.unbind(call.unit)
        collect(leaves)
        grad = hidden.grad
    if (roots := prologue.roots(grad, [leaf.grad for leaf in prologue.leaves]))[0]:
        torch.autograd.backward(*roots)
    collect(first_leaves)
    return Run(loss.detach(), logits, gradients)


def compare(model: Any, anatomy: Anatomy, batch: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference of loss, logits and gradients.

    Raises:
        ValueError: it is above ``TOLERANCE``; with the figures.
    """
    cut = CutModel(copy.deepcopy(model), anatomy)
    control = control_run(model, CutModel(model, anatomy), batch)
    walked = walk_run(cut, cut.take_parameters(), batch)
    figures = {
        "loss": difference(walked.loss, control.loss),
        "logits": difference(walked.logits, control.logits),
    }
    largest = max((float(g.norm()) for g in control.gradients.values()), default=0.0)
    for name in control.gradients.keys() | walked.gradients.keys():
        gradients = [run.gradients[name] for run in (walked, control) if name in run.gradients]
        if len(gradients) == 1:  # the other run has none
            figures[name] = float(gradients[0].norm()) / (largest or 1.0)
            continue
        walk_gradient, control_gradient = (gradient.double() for gradient in gradients)
        # Rounding noise in a gradient that is zero in exact arithmetic (a key's bias) is no
        # difference.
        scale = max(float(control_gradient.norm()), 1e-4 * largest)
        figures[name] = float((walk_gradient - control_gradient).norm()) / scale
    excess = {name: round(value, 6) for name, value in figures.items() if not value <= TOLERANCE}
    if excess:
        worst = dict(sorted(excess.items(), key=lambda item: -item[1])[:3])
        raise ValueError(
            f"on a small instance, {'training' if model.training else 'evaluation'} mode,"
            f" {len(excess)} of {len(figures)} figures differ from the model's own, relatively by"
            f" {worst} (at most {TOLERANCE} is allowed)"
        )
    return max(figures.values())

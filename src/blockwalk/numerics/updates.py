"""Update rules: what one step does to a parameter, element by element.

A rule is a value without state. The tensors that it keeps from step to step are the caller's, on
whatever tier, in float32. So is the arithmetic: a parameter in 16 bits is lifted a chunk at a time,
and rounded once: stochastically where a key is given, so that updates below half a unit in the last
place move it in expectation instead of never. Since every element is updated by itself, any slice
of a parameter may be updated alone, at any time, by any rank: the bits are those of the whole. The
arithmetic is, operation by operation, that of ``torch.optim`` with ``foreach=False, fused=False``.

Learning rate and step come with each call. The gradient may be any estimate g: a zeroth-order rule
hands over g·z."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.noise.key import Key, NoiseKey
from blockwalk.numerics.noise.noise import stochastic_round
from blockwalk.numerics.operators import received, register, sent
from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.sizes import ByDevice, spans
from blockwalk.plan.update_rules import MATRICES, RULES, RuleFacts

UPDATE_CHUNK = 1 << 16
"""Elements updated at a time on a processor, with 256 KiB of scratch: what stays in cache."""

DEVICE_UPDATE_CHUNK = 1 << 22
"""Elements of a chunk on an accelerator, where each chunk costs a few kernel launches."""

NORM_CHUNK = 1 << 14
"""Elements under one float64 sum of squares. Below the size from which torch spreads a reduction
over threads, so that the sum is the same for any number of them."""

EXACT_PARTS = 16
"""Numbers that hold an exact sum of squares of float32 numbers: it is a multiple of 2⁻²⁹⁸ below
2³²⁰, and each number takes 53 of these 618 bits."""

_NORM_ROWS = ByDevice(cpu=8, cuda=512)
"""Chunks that are squared at a time: 1 MiB of float64, which stays in a processor's cache; 64 MiB
on an accelerator, where each time costs three launches. A chunk's sum has the same bits either
way."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The update rule that ``settings.name`` (``optimizer.name``) names, with those of the settings
    that are its own.

    Its arithmetic is the function of its name below: (settings, scratch, parameter, gradient, its
    states in the order of its row, step, lr), flat float32 of one length, the parameter and the
    states changed in place.

    Raises:
        ValueError: an unknown rule, or a number out of range.
    """

    settings: OptimizerSettings

    def __post_init__(self) -> None:
        for name in self.facts.settings:
            if name not in _RANGES:
                continue
            holds, meaning = _RANGES[name]
            if not holds(value := getattr(self.settings, name)):
                raise ValueError(f"optimizer.{name} is {value}; it must be {meaning}")

    @property
    def facts(self) -> RuleFacts:
        """The rule's row."""
        return RULES[self.settings.name]

    def apply_(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        *,
        step: int,
        lr: float,
        rounding: NoiseKey | None = None,
        scale: float = 1.0,
    ) -> None:
        """Apply one update, in place.

        Args:
            param: contiguous, float32 or 16 bits, any slice of a parameter.
            grad: the same slice of the gradient, float32; it is not changed.
            state: the same slice of each tensor that the rule's row names, contiguous.
            step: the update's number, from 1.
            lr: its learning rate.
            rounding: the draws by which a whole parameter in 16 bits is rounded stochastically;
                None rounds to nearest.
            scale: on a processor, a factor of the gradient: pages of a file map are not dirtied for
                it.
        """
        rule = self.facts.implementation or globals()[self.settings.name]
        states = [state[name] for name in self.facts.states]
        if self.settings.name == "adamw" and not is_cpu(param.device):
            s = self.settings
            numbers = (lr, *s.betas, s.eps, s.weight_decay)
            torch.ops.blockwalk.adamw_(param, *states, grad, step, numbers, sent(rounding))
            return
        whole = self.facts.needs == MATRICES
        at_once = param.numel() if whole else UPDATE_CHUNK
        scratch = torch.empty(min(at_once, param.numel()) if scale != 1.0 else 0)
        for work, pieces in _chunks(rounding, param, grad, *states, whole=whole):
            part, gradient, *kept = pieces
            if scale != 1.0:
                gradient = torch.mul(gradient, scale, out=scratch[: len(gradient)])
            if whole:
                work, part, gradient, *kept = (
                    tensor.view(param.shape) for tensor in (work, part, gradient, *kept)
                )
            rule(self.settings, work, part, gradient, *kept, step=step, lr=lr)

    def apply_together_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        *,
        step: int,
        lr: float,
        scale: float = 1.0,
    ) -> None:
        """Apply one update to several parameters, side by side in one tensor each: of an adapter's
        small matrices it is the starts of operations that cost.

        Args:
            params, grads, states: as :meth:`apply_` takes of one, all float32 on a processor.
        """
        names = self.facts.states
        kept = [[state[name] for state in states] for name in names]
        param_P, grad_P, *state_P = (
            torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            for tensors in (params, grads, *kept)
        )
        state = dict(zip(names, state_P, strict=True))
        self.apply_(param_P, grad_P, state, step=step, lr=lr, scale=scale)
        lengths = [param.numel() for param in params]
        for tensors, flat_P in zip((params, *kept), (param_P, *state_P), strict=True):
            flat = [tensor.detach().view(-1) for tensor in tensors]
            torch._foreach_copy_(flat, list(torch.split(flat_P, lengths)))


def sgd(
    settings: OptimizerSettings, work: Tensor, p: Tensor, g: Tensor, *, step: int, lr: float
) -> None:
    """θ ← θ − lr·(g + weight_decay·θ), as ``torch.optim.SGD``."""
    p.add_(_decayed(settings, work, p, g), alpha=-lr)


def sign(
    settings: OptimizerSettings, work: Tensor, p: Tensor, g: Tensor, *, step: int, lr: float
) -> None:
    """θ ← θ − lr·(sign(g) + weight_decay·θ): sign descent, for zeroth order (Bernstein et al. 2018,
    with one vote)."""
    p.add_(_decayed(settings, work, p, torch.sign(g, out=work)), alpha=-lr)


def momentum(
    settings: OptimizerSettings,
    work: Tensor,
    p: Tensor,
    g: Tensor,
    b: Tensor,
    *,
    step: int,
    lr: float,
) -> None:
    """b ← momentum·b + g + weight_decay·θ, θ ← θ − lr·b, as ``torch.optim.SGD``."""
    p.add_(b.mul_(settings.momentum).add_(_decayed(settings, work, p, g)), alpha=-lr)


def adamw(
    settings: OptimizerSettings,
    work: Tensor,
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: int,
    lr: float,
) -> None:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), as
    ``torch.optim.AdamW``."""
    beta1, beta2 = settings.betas
    if settings.weight_decay:
        p.mul_(1 - lr * settings.weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    torch.sqrt(v, out=work).div_((1 - beta2**step) ** 0.5).add_(settings.eps)
    p.addcdiv_(m, work, value=-(lr / (1 - beta1**step)))


def _decayed(settings: OptimizerSettings, work: Tensor, p: Tensor, g: Tensor) -> Tensor:
    """Return g + weight_decay·θ in ``work``; without decay g itself."""
    return torch.add(g, p, alpha=settings.weight_decay, out=work) if settings.weight_decay else g


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "weight_decay": (lambda value: value >= 0, "0 or above"),
    "momentum": (lambda value: value > 0, "above 0 (without it the rule is sgd)"),
    "betas": (lambda value: all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"),
    "eps": (lambda value: value >= 0, "0 or above"),
}
"""Conditions on the numbers that a rule reads: a test, and its words."""


def _adamw(
    kernels: Any,
    param: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    step: int,
    numbers: list[float],
    words: list[int],
) -> None:
    """Apply :func:`adamw` to a parameter: on an accelerator in one launch, each operation rounded
    by itself."""
    lr, beta1, beta2, eps, weight_decay = numbers
    if kernels:
        root = (1 - beta2**step) ** 0.5
        rate = -(lr / (1 - beta1**step))
        factors = (1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, root, eps, rate)
        kernels.updates.adamw(param, grad, m, v, factors, words)
        return
    settings = OptimizerSettings("adamw", betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for work, pieces in _chunks(received(words), param, grad, m, v):
        adamw(settings, work, *pieces, step=step, lr=lr)


register("adamw_", _adamw, "param", "m", "v")


def square_sums(tensor: Tensor) -> Tensor:
    """Return sums of squares of each :data:`NORM_CHUNK` elements (the last chunk may be shorter),
    float64 [chunks], on its device.

    A slice that begins at a multiple of NORM_CHUNK has the sums that the whole tensor has there:
    ranks compute their own and hand them to :func:`norm_of_sums`."""
    flat = tensor.detach().reshape(-1)
    full = flat.numel() // NORM_CHUNK
    sums = torch.zeros(-(-flat.numel() // NORM_CHUNK), dtype=torch.float64, device=flat.device)
    at_once = max(min(_NORM_ROWS[flat.device.type], len(sums)), 1)
    work = torch.empty(at_once, NORM_CHUNK, dtype=torch.float64, device=flat.device)
    for start, stop in spans(0, full, at_once):
        chunks = flat[start * NORM_CHUNK : stop * NORM_CHUNK].view(stop - start, NORM_CHUNK)
        rows = work[: stop - start].copy_(chunks)
        torch.sum(rows.mul_(rows), 1, out=sums[start:stop])
    if full < len(sums):
        tail = work[0, : flat.numel() - full * NORM_CHUNK].copy_(flat[full * NORM_CHUNK :])
        sums[full] = tail.mul_(tail).sum()
    return sums


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of a float32 tensor's squares, 0-d float32: infinite or NaN where an element
    is, or where it overflows."""
    flat_P = gradient.reshape(-1)
    if not is_cpu(flat_P.device):
        # not a product: torch sets memory aside for a library's products on each stream, and this
        # may be a copy's (32 MiB on an H200)
        norm: Tensor = torch.linalg.vector_norm(flat_P)
        return norm * norm
    return torch.dot(flat_P, flat_P)


def exact_parts(sums: Sequence[float]) -> list[float]:
    """Return :data:`EXACT_PARTS` numbers whose sum is exactly that of so many
    :func:`square_sums`, the largest first: what a rank tells the others of its own.

    Each is the rounded rest of those before it (an expansion as Shewchuk's, "Adaptive Precision
    Floating-Point Arithmetic", 1997), and takes 53 bits of the sum at least. Where a sum is not
    finite, the first is what they add up to."""
    parts: list[float] = []
    if all(map(math.isfinite, sums)):
        remainder = math.fsum(sums)
        while remainder:
            parts.append(remainder)
            remainder = math.fsum(chain(sums, map(operator.neg, parts)))
    else:
        parts.append(sum(sums))
    assert len(parts) <= EXACT_PARTS, f"{len(parts)} parts"
    return parts + [0.0] * (EXACT_PARTS - len(parts))


def norm_of_sums(sums: Iterable[Tensor]) -> float:
    """Return √(Σ sums). The sum is exactly rounded, so that neither the order of the chunks nor who
    computed them matters."""
    parts = list(sums)
    values: list[float] = torch.cat(parts).tolist() if parts else []
    total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    return math.sqrt(total)


def global_norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all elements of all tensors: the same for any number of threads
    and any slicing at multiples of :data:`NORM_CHUNK`. Gradients that hold an infinity or a NaN
    have that as their norm."""
    return norm_of_sums(square_sums(tensor) for tensor in tensors)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor that gradients of this norm are multiplied with, as
    ``torch.nn.utils.clip_grad_norm_``: max_norm/(norm + 1e-6), at most 1. A NaN stays one."""
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


def _chunks(
    rounding: Key | None, param: Tensor, grad: Tensor, *state: Tensor, whole: bool = False
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Yield scratch and flat slices of parameter, gradient and state, a chunk at a time, or all of
    them at once (``whole``): views, so that in-place work reaches their owners. For a parameter in
    16 bits it reaches a float32 copy, which is written back before the next chunk."""
    for tensor in (grad, *state):
        assert tensor.dtype == torch.float32, f"updates are computed in float32, not {tensor.dtype}"
        lengths = f"{tensor.numel()} elements for {param.numel()} of a parameter"
        assert tensor.numel() == param.numel(), lengths
    param_P = param.detach().view(-1)
    tensors = [grad.detach().reshape(-1), *(tensor.detach().view(-1) for tensor in state)]
    lifts = param.dtype != torch.float32
    chunk = UPDATE_CHUNK if is_cpu(param.device) else DEVICE_UPDATE_CHUNK
    if whole:
        chunk = max(param.numel(), 1)
    scratch = torch.empty(min(chunk, param.numel()), dtype=torch.float32, device=param.device)
    lifted = torch.empty_like(scratch) if lifts else scratch
    for start in range(0, param.numel(), chunk):
        param_p = param_P[start : start + chunk]
        float_p = lifted[: len(param_p)].copy_(param_p) if lifts else param_p
        parts = (tensor[start : start + chunk] for tensor in tensors)
        yield scratch[: len(param_p)], (float_p, *parts)
        if lifts and rounding is not None:
            stochastic_round(float_p, param_p, rounding, start)
        elif lifts:
            param_p.copy_(float_p)

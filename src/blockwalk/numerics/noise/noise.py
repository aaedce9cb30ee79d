"""Counter-based perturbations: z as a function of (seed, step, query, parameter name, element), the
same bits anywhere.

A :class:`NoiseKey` is hashed to the key of a Philox 4x64-10 generator, whose counter is the index
of the element in its parameter's flattened order over the draws that one counter gives. So any
slice of any parameter can be had alone, on any tier, device, slice or thread. Values are Gaussian
(16 bits a draw through an inverse-CDF table with variance 1, no tail beyond 4.325) or Rademacher
(one bit a sign): ``noise_numpy.py`` defines the words, the table and the rounding, and says what
the table does to the tails.

Everywhere ``start`` is the index of the tensor's first element in the flattened parameter. With
``pitch`` (the length of the parameter's rows) a 2-D tensor [R, W] is a window: row r begins at
``start + r·pitch``, or at ``start + rows[r]·pitch`` where ``rows`` (int64 [R], same device) names
rows. In a parameter [N, D], columns a:b are ``start=a, pitch=D``, rows a:b are ``start=a·D``, and
the rows of an embedding's tokens are ``start=0, pitch=D, rows=tokens``.

On a CPU a C kernel does the work, or numpy where there is no compiler; elsewhere an operator of
torch (:mod:`blockwalk.numerics.operators`), on CUDA Triton's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from blockwalk.numerics.device import is_cpu
from blockwalk.numerics.noise import cpu
from blockwalk.numerics.noise.key import Key, NoiseKey, NoiseKind, Window, Write, window
from blockwalk.numerics.noise.numpy_words import KIND_NUMBERS
from blockwalk.numerics.operators import received, register, sent


class Where(TypedDict, total=False):
    """The place of a tensor in its parameter beside ``start``, each as above."""

    pitch: int | None
    rows: Tensor | None


def fill_(
    out: Tensor, key: NoiseKey, start: int = 0, kind: NoiseKind = "gaussian", **where: Unpack[Where]
) -> Tensor:
    """Return ``out`` = z, for ``out`` in float32 (or rounded to nearest even in bfloat16 or
    float16). Returns ``out``."""
    return perturbed(None, out, key, start, 1.0, kind, **where)


def stochastic_round(
    source: Tensor, out: Tensor, rounding: Key, start: int = 0, **where: Unpack[Where]
) -> Tensor:
    """Return ``out`` (bfloat16 or float16) = ``source`` rounded stochastically, as
    :func:`perturbed` rounds; returns ``out``."""
    return perturbed(source, out, None, start, 0.0, None, rounding=rounding, **where)


def perturbed(
    source: Tensor | None,
    out: Tensor,
    key: NoiseKey | None,
    start: int,
    scale: float,
    kind: NoiseKind | None = "gaussian",
    *,
    rounding: Key | None = None,
    pitch: int | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return ``out`` = cast(float32(source) + scale·z): the one operation that the others name.
    Returns ``out``.

    ``scale`` is rounded to float32, then the product, then the sum. An ``out`` in bfloat16 or
    float16 is then rounded to nearest even or, with a ``rounding`` key, stochastically: the
    magnitude rounds up where its remainder, in 2^-16 of the last place and truncated to that, plus
    the element's 16-bit draw reaches 2^16.

    ``source`` (None: zeros) and ``out`` are float32, bfloat16 or float16, of one shape, and may be
    one tensor; ``rows`` names the noise's rows, the source has them gathered. Without a key, and
    with kind None, it only rounds."""
    choices = f"noise {kind!r} is not counter-based; choose gaussian or rademacher"
    assert kind in KIND_NUMBERS, choices
    assert start >= 0, f"start is {start}; elements are counted from 0"
    place = window(out if source is None else source, out, pitch, rows)
    if place.rows * place.width == 0:
        return out
    if is_cpu(out.device):
        return cpu.write(Write(source, out, key, start, scale, kind, rounding, place, rows))
    torch.ops.blockwalk.noise_(
        out, source, rows, sent(key), sent(rounding), start, pitch, scale, kind
    )
    return out


def add_run(
    source: Tensor,
    out: Tensor,
    key: NoiseKey,
    start: int,
    scale: float,
    kind: NoiseKind,
    rounding: Key | None = None,
) -> Tensor:
    """Return :func:`perturbed` of elements that follow each other, ``start`` the first: ``source``
    and ``out`` are contiguous, of one shape, float32, bfloat16 or float16. A walk's products ask
    for it once each, so nothing is checked here."""
    if is_cpu(out.device):
        place = Window(1, out.numel(), 0)
        return cpu.write(Write(source, out, key, start, scale, kind, rounding, place, None))
    words = key.signed
    torch.ops.blockwalk.noise_(out, source, None, words, sent(rounding), start, None, scale, kind)
    return out


def add_products_(
    out_RD: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], scales: Sequence[float]
) -> None:
    """``out_RD`` (float32, contiguous) += scale·a·bᵀ for each a [R, r], b [D, r] and scale in turn:
    the scale after the sum over r, made term by term, each product and sum rounded by itself: a
    product of matrices would round by the shape."""
    if is_cpu(out_RD.device) and cpu.add_products(out_RD, lefts, rights, scales):
        return
    for a_Rr, b_Dr, scale in zip(lefts, rights, scales, strict=True):
        z_RD = a_Rr[:, :1] * b_Dr[:, 0]
        for i in range(1, a_Rr.shape[1]):
            z_RD.add_(a_Rr[:, i : i + 1] * b_Dr[:, i])
        out_RD.add_(z_RD.mul_(scale))


def random_uint16(key: Key, start: int, out: Tensor) -> Tensor:
    """Draws start … of ``key``, uniform in 0 … 65535, into ``out`` (uint16 or int32, 1-D); returns
    it."""
    assert out.dtype in (torch.uint16, torch.int32), out.dtype
    assert out.stride() == (1,), "draws are a contiguous vector, uint16 or int32"
    assert start >= 0, start
    if is_cpu(out.device):
        return cpu.random_uint16(key, start, out)
    torch.ops.blockwalk.draws_(out, sent(key), start)
    return out


def _noise(
    kernels: Any,
    out: Tensor,
    source: Tensor | None,
    rows: Tensor | None,
    key: list[int],
    rounding: list[int],
    start: int,
    pitch: int | None,
    scale: float,
    kind: NoiseKind | None,
) -> None:
    place = window(out if source is None else source, out, pitch, rows)
    write = Write(source, out, received(key), start, scale, kind, received(rounding), place, rows)
    (kernels.noise if kernels else cpu).write(write)


def _draws(kernels: Any, out: Tensor, key: list[int], start: int) -> None:
    words = received(key)
    assert words is not None
    (kernels.noise if kernels else cpu).random_uint16(words, start, out)


register("noise_", _noise, "out")
register("draws_", _draws, "out")

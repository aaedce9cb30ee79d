"""Codes of eight bits with one float32 scale a row, value = scale · code; scale = max|row| / the
largest code."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.matrix_codec import Coded, MatrixCodec, Rounding
from blockwalk.numerics.noise.noise import random_uint16

Grid = Callable[[Tensor], Tensor | float]
"""The distance between neighbouring codes at each magnitude, in units of the scale."""


def scaled_rows(largest: float, grid: Grid, native: int) -> MatrixCodec:
    """Return a codec of whole rows: ``largest`` is its largest code, ``native`` its number in
    ``codecs.c``."""
    # Scale and code are both rounded, and their product must not overflow: hence the limit.
    encode = partial(_encode, largest, grid)
    return MatrixCodec(encode, _decode, limit=2.0**127, native=native, encoder=native)


def _encode(
    largest: float,
    grid: Grid,
    x_RD: Tensor,
    scales_R1: Tensor,
    codes_RD: Tensor,
    layout: Layout,
    rounding: Rounding | None,
) -> None:
    low_R1, high_R1 = torch.aminmax(x_RD, dim=1, keepdim=True)
    divisor = scales_R1.new_full(
        (), largest
    )  # CUDA multiplies by 1/c where c is a number: another last bit
    scales_R1.copy_(
        torch.maximum(high_R1, -low_R1).abs_() / divisor
    )  # a row of −0 has the scale 0, not −0
    steps_RD = x_RD / torch.where(scales_R1 == 0, math.inf, scales_R1)
    if rounding is not None:
        steps_RD = _round_stochastically(steps_RD, grid, rounding)
    elif not codes_RD.dtype.is_floating_point:
        steps_RD.round_()
    codes_RD.copy_(steps_RD.clamp_(-largest, largest))


def _round_stochastically(steps_RD: Tensor, grid: Grid, rounding: Rounding) -> Tensor:
    """Return ``steps_RD`` on the codes' grid."""
    draws = torch.empty(steps_RD.numel(), dtype=torch.int32, device=steps_RD.device)
    random_uint16(rounding.key, rounding.first_element, draws)
    magnitude_RD = steps_RD.abs()
    grid_RD = grid(magnitude_RD)
    units_RD = magnitude_RD / grid_RD
    whole_RD = units_RD.floor()
    # To the nearest 2^-16: what was decoded, a rounding off its grid, comes back as the code that
    # it was. Truncated, one in 2^16 such elements would lose a whole step, always towards zero.
    remainder_RD = units_RD.sub_(whole_RD).mul_(65536).round_().to(torch.int32)
    whole_RD += remainder_RD.add_(draws.view_as(remainder_RD)) >= 65536
    return whole_RD.mul_(grid_RD).copysign_(steps_RD)


def _decode(coded: Coded) -> Tensor:
    return coded.codes[:, coded.start : coded.stop].float().mul_(coded.scales)

"""int4: symmetric codes of four bits, groups of 32 or 64 elements with one float16 scale, value = d
· (nibble − 8).

The scale is d = −m/8, where m is the group's element of largest magnitude (the positive one of a
tie): m itself becomes the code −8, and the error is less than with max|group|/7. The first half of
a group stands in the low nibbles of its bytes, the second half in the high ones, so that a decoder
writes two runs and shuffles nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockwalk.numerics.codecs.matrix_codec import Grid, grid_codec


def _fit(x_RGK: Tensor) -> Tensor:
    low_RG, high_RG = torch.aminmax(x_RGK, dim=2)
    return torch.where(high_RG >= -low_RG, high_RG, low_RG).div(-8).to(torch.float16)


def _nearest(x_RGK: Tensor, scales_RG: Tensor) -> Tensor:
    # Codes fit the scale as it is stored. A group too small for float16 has scale 0 and decodes to
    # zeros.
    d_RG1 = scales_RG.float().unsqueeze(2)
    return (
        x_RGK.div(torch.where(d_RG1 == 0, math.inf, d_RG1))
        .round_()
        .clamp_(-8, 7)
        .add_(8)
        .to(torch.uint8)
    )


def _values(codes_RGK: Tensor, scales_RG: Tensor) -> Tensor:
    return codes_RGK.float().sub_(8).mul_(scales_RG.float().unsqueeze(2))


CODEC = grid_codec(
    Grid(_fit, _nearest, _values), limit=8 * torch.finfo(torch.float16).max, native=2
)

"""int4: symmetric codes of four bits, groups of 32 or 64 elements with one float16 scale, value = d · (nibble − 8).

The scale is d = −m/8, where m is the group's element of largest magnitude (the positive one of a tie): m itself becomes the
code −8, and the error is less than with max|group|/7. The first half of a group stands in the low nibbles of its bytes, the
second half in the high ones, so that a decoder writes two runs and shuffles nothing.
"""

from __future__ import annotations

import math

import torch

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.matrix_codec import MatrixCodec, Rounding, columns_of, grouped, groups_of


def encode(
    x_RD: torch.Tensor, scales_RG: torch.Tensor, codes: torch.Tensor, layout: Layout, rounding: Rounding | None
) -> None:
    x_RGK = grouped(x_RD, layout)
    low_RG, high_RG = torch.aminmax(x_RGK, dim=2)
    largest_RG = torch.where(high_RG >= -low_RG, high_RG, low_RG)
    scales_RG.copy_(largest_RG / -8)
    # Codes fit the scale as it is stored. A group too small for float16 has scale 0 and decodes to zeros.
    d_RG1 = scales_RG.float().unsqueeze(2)
    steps_RGK = x_RGK.div(torch.where(d_RG1 == 0, math.inf, d_RG1)).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    low_RGH, high_RGH = steps_RGK.chunk(2, dim=2)
    codes.copy_((low_RGH | high_RGH << 4).flatten(1))


def decode(scales_RG: torch.Tensor, codes: torch.Tensor, layout: Layout, first: int, last: int) -> torch.Tensor:
    groups = groups_of(layout, first, last)
    bytes_RGH = codes.view(len(codes), layout.groups, layout.group_size // 2)[:, groups]
    nibbles_RGK = torch.cat((bytes_RGH & 15, bytes_RGH >> 4), dim=2)
    values_RGK = nibbles_RGK.float().sub_(8).mul_(scales_RG[:, groups].float().unsqueeze(2))
    return columns_of(values_RGK, layout, first, last)


CODEC = MatrixCodec(encode, decode, limit=8 * torch.finfo(torch.float16).max, native=2)

"""nf4: sixteen quantiles of the normal distribution, groups of 32 or 64 elements with one float32
scale, value = scale · level.

The levels are those of Dettmers et al., "QLoRA" (2023), appendix E; the scale is the group's
largest magnitude. Two codes share a byte, the earlier element in the high nibble. Where the group
size divides a row, scales and codes are the bytes that bitsandbytes keeps as ``absmax`` and
``weight`` (without its second quantisation of the scales)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.matrix_codec import Coded, MatrixCodec, Rounding, grouped

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _borders(device: torch.device) -> Tensor:
    """Return the numbers half-way between neighbouring levels, float32 [15]."""
    levels = torch.tensor(LEVELS, device=device)
    return (levels[1:] + levels[:-1]) / 2


def encode(
    x_RD: Tensor, scales_RG: Tensor, codes: Tensor, layout: Layout, rounding: Rounding | None
) -> None:
    x_RGK = grouped(x_RD, layout)
    largest_RG1 = x_RGK.abs().amax(dim=2, keepdim=True)
    scales_RG.copy_(largest_RG1.squeeze(2))
    unit_RGK = x_RGK / torch.where(largest_RG1 == 0, math.inf, largest_RG1)
    nibbles_RGK = torch.bucketize(unit_RGK, _borders(x_RD.device)).to(torch.uint8)
    codes.copy_((nibbles_RGK[..., ::2] << 4 | nibbles_RGK[..., 1::2]).flatten(1))


def decode(coded: Coded) -> Tensor:
    bytes_RGH = coded.bytes_of_groups()
    nibbles_RGK = torch.stack((bytes_RGH >> 4, bytes_RGH & 15), dim=3).flatten(2)
    levels = torch.tensor(LEVELS, device=bytes_RGH.device)
    return coded.columns(levels[nibbles_RGK.int()].mul_(coded.scales[:, coded.groups].unsqueeze(2)))


CODEC = MatrixCodec(
    encode,
    decode,
    limit=torch.finfo(torch.float32).max,
    encoder=8,
    table=_borders(torch.device("cpu")),
)

"""int4a: asymmetric codes of four bits, groups of 32 elements, value = d · nibble + m: the bytes of
GGUF's Q4_1 blocks.

A block is d and m in float16 and 16 bytes of codes, the first half of the group in the low nibbles.
d = (max − min) / 15 and m = min, as llama.cpp's reference quantiser has them (the layout and the
formula are facts of the format, ``ggml-quants.c``)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockwalk.numerics.codecs.matrix_codec import Grid, grid_codec


def _fit(x_RGK: Tensor) -> Tensor:
    low_RG, high_RG = torch.aminmax(x_RGK, dim=2)
    return torch.stack(((high_RG - low_RG) / 15, low_RG), dim=2)


def _nearest(x_RGK: Tensor, scales_RG2: Tensor) -> Tensor:
    d_RG1, low_RG1 = scales_RG2.float().unsqueeze(2).unbind(3)
    steps_RGK = x_RGK.sub(low_RG1).div_(torch.where(d_RG1 == 0, math.inf, d_RG1))
    return steps_RGK.add_(0.5).floor_().clamp_(0, 15).to(torch.uint8)


def _values(codes_RGK: Tensor, scales_RG2: Tensor) -> Tensor:
    d_RG1, low_RG1 = scales_RG2.float().unsqueeze(2).unbind(3)
    return codes_RGK.float().mul_(d_RG1).add_(low_RG1)


CODEC = grid_codec(Grid(_fit, _nearest, _values), limit=torch.finfo(torch.float16).max, native=4)

"""q5_1: GGUF's Q5_1, blocks of 32 elements: d and m in float16, 32 fifth bits, 16 bytes of nibbles;
value = d · code + m."""

from __future__ import annotations

import torch

from blockwalk.numerics.codecs.blocks import block_codec, fifth_bits, half, halves


def values(blocks: torch.Tensor) -> torch.Tensor:
    codes = halves(blocks[..., 8:]) | fifth_bits(blocks[..., 4:8])
    return codes.float() * half(blocks, 0) + half(blocks, 2)


CODEC = block_codec(values)

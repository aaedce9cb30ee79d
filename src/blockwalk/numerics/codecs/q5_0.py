"""q5_0: GGUF's Q5_0, blocks of 32 elements: d in float16, 32 fifth bits, 16 bytes of nibbles; value
= d · (code − 16)."""

from __future__ import annotations

import torch

from blockwalk.numerics.codecs.blocks import block_codec, fifth_bits, half, halves


def values(blocks: torch.Tensor) -> torch.Tensor:
    codes = halves(blocks[..., 6:]) | fifth_bits(blocks[..., 2:6])
    return codes.float().sub_(16) * half(blocks, 0)


CODEC = block_codec(values)

"""q6_k: GGUF's Q6_K, blocks of 256 elements in sixteen parts: 128 bytes of low nibbles, 64 of high
pairs of bits, sixteen signed scales, d in float16; value = (d · scale) · (code − 32). Either half
of a block has its own 64 and 32 bytes of codes."""

from __future__ import annotations

import torch

from blockwalk.numerics.codecs.blocks import bits, block_codec, half, halves, parts


def values(blocks: torch.Tensor) -> torch.Tensor:
    nibbles = halves(parts(blocks[..., :128], 2))
    upper_bits = bits(parts(blocks[..., 128:192], 2), 2)
    codes = parts((nibbles | upper_bits << 4).flatten(-2), 16).float().sub_(32)
    scales = blocks[..., 192:208].view(torch.int8).float()
    return (codes * (half(blocks, 208) * scales).unsqueeze(-1)).flatten(-2)


CODEC = block_codec(values, native=7)

"""q4_k: GGUF's Q4_K, blocks of 256 elements in eight parts: d and dmin in float16, scales and
minima of six bits, 128 bytes of codes; value = (d · scale) · nibble − dmin · minimum."""

from __future__ import annotations

import torch

from blockwalk.numerics.codecs.blocks import block_codec, halves, parts, super_block


def values(blocks: torch.Tensor) -> torch.Tensor:
    pairs = halves(parts(blocks[..., 16:], 4))  # 32 bytes hold two parts
    return super_block(blocks, pairs.flatten(-2))


CODEC = block_codec(values, native=6)

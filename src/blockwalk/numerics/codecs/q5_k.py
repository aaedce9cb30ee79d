"""q5_k: GGUF's Q5_K, blocks of 256 elements in eight parts: as q4_k, with 32 bytes of fifth bits
before the 128 of nibbles; bit i of each is of part i."""

from __future__ import annotations

import torch

from blockwalk.numerics.codecs.blocks import bits, block_codec, halves, parts, super_block


def values(blocks: torch.Tensor) -> torch.Tensor:
    pairs = halves(parts(blocks[..., 48:], 4))
    return super_block(blocks, pairs.flatten(-2) | bits(blocks[..., 16:48], 1) << 4)


CODEC = block_codec(values)

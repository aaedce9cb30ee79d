"""q4_0: GGUF's Q4_0, blocks of 32 elements: d in float16, then 16 bytes of codes; value = d ·
(nibble − 8)."""

from __future__ import annotations

import torch

from blockwalk.numerics.codecs.blocks import block_codec, half, halves


def values(blocks: torch.Tensor) -> torch.Tensor:
    return halves(blocks[..., 2:]).float().sub_(8) * half(blocks, 0)


CODEC = block_codec(values, native=3)

"""q8_0: GGUF's Q8_0, blocks of 32 elements: d in float16, then 32 signed codes; value = d ·
code."""

from __future__ import annotations

import torch

from blockwalk.numerics.codecs.blocks import block_codec, half


def values(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 2:].view(torch.int8).float() * half(blocks, 0)


CODEC = block_codec(values, native=5)

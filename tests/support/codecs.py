"""Whole parameters in a codec, and back, by the functions that do it a range of rows at a time. Not
a test: no oracle."""

from __future__ import annotations

from typing import Any

import torch

from blockwalk.numerics.codecs.codecs import decode_rows, encode_rows
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.placement import Codec


def encode(
    tensor: torch.Tensor, codec: Codec, out: torch.Tensor, *, group_size: int = 32, **options: Any
) -> torch.Tensor:
    """The whole of ``tensor`` into ``out`` (uint8, 1-D, of the encoded size); the raw codec keeps
    its dtype."""
    layout = Layout(
        tuple(tensor.shape), codec, str(tensor.dtype).removeprefix("torch."), group_size
    )
    return encode_rows(tensor.reshape(layout.rows, layout.columns), out, layout, 0, **options)


def decode(
    buffer: torch.Tensor,
    shape: tuple[int, ...],
    codec: Codec,
    out: torch.Tensor,
    *,
    group_size: int = 32,
    dtype: str = "float32",
) -> torch.Tensor:
    """The whole parameter into ``out`` (contiguous, of its shape; any float dtype). ``dtype``: what
    raw holds."""
    layout = Layout(shape, codec, dtype, group_size)
    decode_rows(buffer, layout, 0, layout.rows, out.view(layout.rows, layout.columns))
    return out

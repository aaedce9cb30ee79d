"""Blocks of GGUF: a group's scales and codes in the bytes that llama.cpp gives them, decoded and
never written.

The layouts and formulas are facts of the format (``ggml-quants.c``, ``ggml-common.h``). Values are
float32, each operation rounded as the ``gguf`` package rounds it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockwalk.numerics.codecs.matrix_codec import Coded, MatrixCodec


def block_codec(values_of: Callable[[Tensor], Tensor], native: int | None = None) -> MatrixCodec:
    """Return a codec that is only read: ``values_of`` answers the values, float32 [R, G, elements],
    of blocks, uint8 [R, G, bytes]."""

    def decode(coded: Coded) -> Tensor:
        return coded.columns(values_of(coded.codes[:, coded.groups]))

    return MatrixCodec(None, decode, native=native)


def half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte ``start`` of each block, as float32 [R, G, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def halves(codes: Tensor) -> Tensor:
    """Return the nibbles of some bytes: all low ones, then all high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def parts(codes: Tensor, count: int) -> Tensor:
    """Return the last dimension in ``count`` equal parts."""
    return codes.reshape(*codes.shape[:-1], count, codes.shape[-1] // count)


def bits(codes: Tensor, width: int) -> Tensor:
    """Return fields of ``width`` bits: the lowest of every byte first, then the next of every byte,
    and so on."""
    fields = [codes >> shift & ((1 << width) - 1) for shift in range(0, 8, width)]
    return torch.cat(fields, dim=-1)


def fifth_bits(codes: Tensor) -> Tensor:
    """Return the 32 bits of four bytes, the lowest of the first byte first, each as the fifth bit
    of a code."""
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(-1) >> shifts & 1).flatten(-2) << 4


def six_bit_scales(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minima of six bits each out of twelve bytes, [R, G, 8, 1] in
    float32."""
    scale_bytes = codes[..., :4]
    minimum_bytes = codes[..., 4:8]
    nibbles = codes[..., 8:]
    scales = torch.cat((scale_bytes & 63, (nibbles & 15) | (scale_bytes >> 6) << 4), dim=-1)
    minima = torch.cat((minimum_bytes & 63, nibbles >> 4 | (minimum_bytes >> 6) << 4), dim=-1)
    return scales.float().unsqueeze(-1), minima.float().unsqueeze(-1)


def super_block(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return the values of Q4_K and Q5_K: codes [R, G, 256] in eight parts, each with a scale and a
    minimum of six bits."""
    d = half(blocks, 0).unsqueeze(-1)
    least = half(blocks, 2).unsqueeze(-1)
    scales, minima = six_bit_scales(blocks[..., 4:16])
    return (parts(codes, 8).float() * (d * scales) - least * minima).flatten(-2)

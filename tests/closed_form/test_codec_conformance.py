"""Oracle: the formats of the codecs, element by element, in plain Python; and the libraries whose bytes two of them are."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.nf4 import LEVELS
from blockwalk.plan.placement import Codec
from tests.support.codec_tests import CodecTests


def _group(layout: Layout, row: int, column: int) -> tuple[int, int]:
    """The group's number in the parameter, and the element's place in it."""
    groups = -(-layout.columns // layout.group_size)
    return row * groups + column // layout.group_size, column % layout.group_size


def _halves(byte_of: int, at: int, half: int) -> int:
    return byte_of >> 4 if at >= half else byte_of & 15


class TestInt8(CodecTests):
    codec, step = Codec.INT8, 0.5 / 127

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        (scale,) = struct.unpack_from("<f", buffer, 4 * row)
        (code,) = struct.unpack_from("<b", buffer, 4 * layout.rows + row * layout.columns + column)
        return float(np.float32(scale) * np.float32(code))


class TestFp8(CodecTests):
    codec, step = Codec.FP8, 0.5 / 8

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        (scale,) = struct.unpack_from("<f", buffer, 4 * row)
        bits = buffer[4 * layout.rows + row * layout.columns + column]
        exponent, mantissa = bits >> 3 & 15, bits & 7
        code = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        return float(np.float32(scale) * np.float32(-code if bits >> 7 else code))


class TestInt4(CodecTests):
    codec, step = Codec.INT4, 1 / 8  # a whole step where codes end at 7

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        group, at = _group(layout, row, column)
        half = layout.group_size // 2
        groups = layout.rows * -(-layout.columns // layout.group_size)
        (d,) = struct.unpack_from("<e", buffer, 2 * group)
        return d * (_halves(buffer[2 * groups + group * half + at % half], at, half) - 8)


class TestInt4InGroupsOf64(TestInt4):
    group_size = 64


class TestInt4a(CodecTests):
    codec, step = Codec.INT4A, 0.5 / 15

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        group, at = _group(layout, row, column)
        d, m = struct.unpack_from("<ee", buffer, 20 * group)
        return float(np.float32(d) * np.float32(_halves(buffer[20 * group + 4 + at % 16], at, 16)) + np.float32(m))

    def test_bytes_and_values_are_those_of_gguf(self) -> None:
        """Oracle: the gguf package's own reader and writer of Q4_1."""
        quants = pytest.importorskip("gguf.quants", reason="needs the gguf package")
        kind = quants.GGMLQuantizationType.Q4_1
        x_RD = self.numbers(16, 256)
        layout, buffer = self.encoded(x_RD)
        assert np.array_equal(quants.quantize(x_RD.numpy(), kind).reshape(-1), buffer.numpy())
        theirs = quants.dequantize(buffer.numpy().reshape(16, -1), kind)
        assert np.array_equal(theirs, self.decoded(layout, buffer).numpy())


class TestNf4(CodecTests):
    codec, step, group_size = Codec.NF4, 0.152, 64

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        group, at = _group(layout, row, column)
        groups = layout.rows * -(-layout.columns // layout.group_size)
        (scale,) = struct.unpack_from("<f", buffer, 4 * group)
        pair = buffer[4 * groups + group * layout.group_size // 2 + at // 2]
        return float(np.float32(scale) * np.float32(LEVELS[pair & 15 if at % 2 else pair >> 4]))

    def test_bytes_are_those_of_bitsandbytes(self) -> None:
        """Oracle: bitsandbytes' own quantiser, on a processor."""
        functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
        x_RD = self.numbers(16, 256)
        codes, state = functional.quantize_4bit(x_RD, blocksize=64, quant_type="nf4")
        layout, buffer = self.encoded(x_RD)
        assert torch.equal(layout.scales(buffer).flatten(), state.absmax)
        assert torch.equal(layout.codes(buffer).flatten(), codes.view(torch.uint8).flatten())
        theirs = functional.dequantize_4bit(codes, state)
        assert torch.equal(theirs, self.decoded(layout, buffer))

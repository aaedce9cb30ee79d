"""Oracle: the formats of the codecs, element by element, in plain Python; and the libraries whose
bytes two of them are."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from blockwalk.numerics.codecs.codecs import encode_rows
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.nf4 import LEVELS
from blockwalk.plan.placement import Codec
from tests.support.codec_tests import CodecTests, ReadCodecTests
from tests.support.gguf_files import HALVES, random_blocks
from tests.support.messages import refused


def _group(layout: Layout, row: int, column: int) -> tuple[int, int]:
    """The group's number in the parameter, and the element's place in it."""
    groups = -(-layout.columns // layout.group_size)
    return row * groups + column // layout.group_size, column % layout.group_size


def _halves(byte_of: int, at: int, half: int) -> int:
    return byte_of >> 4 if at >= half else byte_of & 15


class TestInt8(CodecTests):
    codec = Codec.INT8
    step = 0.5 / 127

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        (scale,) = struct.unpack_from("<f", buffer, 4 * row)
        (code,) = struct.unpack_from("<b", buffer, 4 * layout.rows + row * layout.columns + column)
        return float(np.float32(scale) * np.float32(code))


class TestFp8(CodecTests):
    codec = Codec.FP8
    step = 0.5 / 8

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        (scale,) = struct.unpack_from("<f", buffer, 4 * row)
        bits = buffer[4 * layout.rows + row * layout.columns + column]
        exponent = bits >> 3 & 15
        mantissa = bits & 7
        code = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        return float(np.float32(scale) * np.float32(-code if bits >> 7 else code))


class TestInt4(CodecTests):
    codec = Codec.INT4  # a whole step where codes end at 7
    step = 1 / 8

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        group, at = _group(layout, row, column)
        half = layout.group_size // 2
        groups = layout.rows * -(-layout.columns // layout.group_size)
        (d,) = struct.unpack_from("<e", buffer, 2 * group)
        return d * (_halves(buffer[2 * groups + group * half + at % half], at, half) - 8)


class TestInt4InGroupsOf64(TestInt4):
    group_size = 64


class TestInt4a(CodecTests):
    codec = Codec.INT4A
    step = 0.5 / 15

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        group, at = _group(layout, row, column)
        d, m = struct.unpack_from("<ee", buffer, 20 * group)
        return float(
            np.float32(d) * np.float32(_halves(buffer[20 * group + 4 + at % 16], at, 16))
            + np.float32(m)
        )

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
    codec = Codec.NF4
    step = 0.152
    group_size = 64

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


class Blocks(ReadCodecTests):
    """A type of GGUF, whose blocks hold random codes: a part has a scale and a summand, an element
    a code."""

    kind: str

    @property
    def group_size(self) -> int:  # type: ignore[override]
        return self.codec.facts.group_sizes[0]

    def encoded(self, x_RD: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        layout = Layout(tuple(x_RD.shape), self.codec, group_size=self.group_size)
        size = self.codec.facts.block_bytes
        blocks = random_blocks(
            self.kind, layout.rows, layout.groups * self.group_size, block=(self.group_size, size)
        )
        return layout, torch.from_numpy(blocks.copy()).flatten()

    def code(self, block: bytes, at: int) -> int:
        raise NotImplementedError

    def scale(self, block: bytes, at: int) -> tuple[np.float32, np.float32]:
        d, *m = (
            np.float32(struct.unpack_from("<e", block, place)[0]) for place in HALVES[self.kind]
        )
        return d, m[0] if m else np.float32(0)

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        group, at = _group(layout, row, column)
        block = buffer[group * self.codec.facts.block_bytes :][: self.codec.facts.block_bytes]
        scale, summand = self.scale(block, at)
        return float(np.float32(scale * np.float32(self.code(block, at))) + summand)

    def test_values_are_those_of_gguf(self) -> None:
        """Oracle: the gguf package's own reader."""
        quants = pytest.importorskip("gguf.quants", reason="needs the gguf package")
        layout, buffer = self.encoded(self.numbers(8, 512))
        theirs = quants.dequantize(
            buffer.numpy().reshape(8, -1), quants.GGMLQuantizationType[self.kind]
        )
        assert np.array_equal(theirs, self.decoded(layout, buffer).numpy())

    def test_it_is_not_written(self) -> None:
        """Oracle: the contract of ``encode_rows``."""
        layout, buffer = self.encoded(self.numbers(2, 256))
        with refused(ValueError, f"{self.codec}"):
            encode_rows(self.numbers(2, 256), buffer, layout, 0)


class TestQ8_0(Blocks):
    codec = Codec.Q8_0
    kind = "Q8_0"

    def code(self, block: bytes, at: int) -> int:
        return int.from_bytes(block[2 + at : 3 + at], signed=True)


class TestQ4_0(Blocks):
    codec = Codec.Q4_0
    kind = "Q4_0"

    def code(self, block: bytes, at: int) -> int:
        return _halves(block[2 + at % 16], at, 16) - 8


class TestQ5_0(Blocks):
    codec = Codec.Q5_0
    kind = "Q5_0"

    def code(self, block: bytes, at: int) -> int:
        fifth = int.from_bytes(block[2:6], "little") >> at & 1
        return (_halves(block[6 + at % 16], at, 16) | fifth << 4) - 16


class TestQ5_1(Blocks):
    codec = Codec.Q5_1
    kind = "Q5_1"

    def code(self, block: bytes, at: int) -> int:
        fifth = int.from_bytes(block[4:8], "little") >> at & 1
        return _halves(block[8 + at % 16], at, 16) | fifth << 4


class TestQ4_K(Blocks):
    codec = Codec.Q4_K
    kind = "Q4_K"

    def scale(self, block: bytes, at: int) -> tuple[np.float32, np.float32]:
        d, least = super().scale(block, at)
        part = at // 32
        s = block[4:16]
        scale = s[part % 4] & 63
        minimum = s[4 + part % 4] & 63
        if part >= 4:
            scale = s[8 + part % 4] & 15 | s[part % 4] >> 6 << 4
            minimum = s[8 + part % 4] >> 4 | s[4 + part % 4] >> 6 << 4
        return d * np.float32(scale), -least * np.float32(minimum)

    def code(self, block: bytes, at: int) -> int:
        return _halves(block[16 + at // 64 * 32 + at % 32], at % 64, 32)


class TestQ5_K(TestQ4_K):
    codec = Codec.Q5_K
    kind = "Q5_K"

    def code(self, block: bytes, at: int) -> int:
        return (
            _halves(block[48 + at // 64 * 32 + at % 32], at % 64, 32)
            | (block[16 + at % 32] >> at // 32 & 1) << 4
        )


class TestQ6_K(Blocks):
    codec = Codec.Q6_K
    kind = "Q6_K"

    def scale(self, block: bytes, at: int) -> tuple[np.float32, np.float32]:
        d, none = super().scale(block, at)
        return d * np.float32(
            int.from_bytes(block[192 + at // 16 : 193 + at // 16], signed=True)
        ), none

    def code(self, block: bytes, at: int) -> int:
        half = at // 128
        quarter = at % 128 // 32
        place = at % 32
        low = _halves(block[64 * half + 32 * (quarter % 2) + place], quarter, 2)
        return (low | (block[128 + 32 * half + place] >> 2 * quarter & 3) << 4) - 32

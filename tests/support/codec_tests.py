"""What holds of every codec whose elements are codes. A new codec's test inherits
:class:`CodecTests`, names itself, and writes down how one element is decoded. Not a test by itself:
it has no codec.

    class TestInt4(CodecTests):
        codec = Codec.INT4

        def value(self, layout, buffer, row, column):  # the oracle: plain Python over the bytes
            ...
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from blockwalk.numerics.codecs.codecs import decode_rows, encode_rows, gather_rows
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.model_spec import encoded_nbytes
from blockwalk.plan.placement import Codec
from tests.support.messages import refused
from tests.support.native import by


class ReadCodecTests:
    """What holds of a codec that is read, whoever wrote the bytes; one that is never written
    overrides :meth:`encoded`."""

    codec: ClassVar[Codec]
    group_size: ClassVar[int] = 32
    """Elements of a group, for codecs with groups."""

    def value(self, layout: Layout, buffer: bytes, row: int, column: int) -> float:
        """The element that the bytes stand for, written down from the format's description."""
        raise NotImplementedError

    def encoded(self, x_RD: torch.Tensor) -> tuple[Layout, torch.Tensor]:
        layout = Layout(tuple(x_RD.shape), self.codec, group_size=self.group_size)
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
        encode_rows(x_RD.view(layout.rows, layout.columns), buffer, layout, 0)
        return layout, buffer

    def decoded(self, layout: Layout, buffer: torch.Tensor) -> torch.Tensor:
        return decode_rows(buffer, layout, 0, layout.rows, torch.empty(layout.rows, layout.columns))

    @staticmethod
    def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def test_bytes_are_as_planned(self) -> None:
        """Oracle: the closed form that planning uses; scales and codes fill it."""
        for shape in ((), (5,), (3, 64), (4, 50), (2, 3, 96), (0, 64)):
            layout = Layout(shape, self.codec, group_size=self.group_size)
            buffer = torch.zeros(
                encoded_nbytes(shape, "float32", self.codec, self.group_size), dtype=torch.uint8
            )
            assert (
                layout.scales(buffer).nbytes + layout.codes(buffer).nbytes
                == layout.nbytes
                == len(buffer)
            )

    def test_each_element_is_what_its_bytes_say(self) -> None:
        """Oracle: the format written down in plain Python."""
        x_RD = self.numbers(5, 150)
        layout, buffer = self.encoded(x_RD)
        got = self.decoded(layout, buffer)
        text = bytes(buffer.tolist())
        for row in range(5):
            for column in range(150):
                expected = self.value(layout, text, row, column)
                assert got[row, column].item() == pytest.approx(expected, rel=2e-7, abs=1e-30), (
                    row,
                    column,
                )

    def test_ranges_are_cut_out_of_the_whole(self) -> None:
        """Oracle: the whole parameter, decoded at once."""
        layout, buffer = self.encoded(self.numbers(9, 150))
        decoded = self.decoded(layout, buffer)
        for rows, columns in (
            ((2, 7), (0, 150)),
            ((0, 9), (31, 100)),
            ((4, 5), (64, 65)),
            ((3, 3), (0, 150)),
        ):
            out = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
            decode_rows(buffer, layout, *rows, out, columns=columns)
            assert torch.equal(out, decoded[slice(*rows), slice(*columns)])
        index = torch.tensor([8, 0, 3, 3])
        assert torch.equal(gather_rows(buffer, layout, index, torch.empty(4, 150)), decoded[index])

    def test_rows_may_stand_in_another_order(self) -> None:
        """Oracle: the whole parameter, its rows put in order by torch."""
        layout, buffer = self.encoded(self.numbers(9, 150))
        order = torch.tensor([3, 1, 4, 0, 5, 8, 2, 6, 7])
        whole = self.decoded(layout, buffer)[order]
        turned = replace(layout, order=order)
        for native in (True, False):
            out = torch.empty(5, 60)
            assert torch.equal(
                by(native, decode_rows, buffer, turned, 2, 7, out, columns=(70, 130)),
                whole[2:7, 70:130],
            )
            index = torch.tensor([8, 0, 3, 3])
            assert torch.equal(
                by(native, gather_rows, buffer, turned, index, torch.empty(4, 150)), whole[index]
            )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_the_kernel_and_torch_agree(self, dtype: torch.dtype) -> None:
        """Oracle: torch's path, for each dtype that a weight is decoded to."""
        layout, buffer = self.encoded(self.numbers(7, 160))
        fast, slow = (
            by(native, decode_rows, buffer, layout, 1, 7, torch.empty(6, 160, dtype=dtype))
            for native in (True, False)
        )
        assert torch.equal(fast, slow)


class CodecTests(ReadCodecTests):
    """What holds of a codec that is written, too."""

    step: ClassVar[float]
    """Half a step of the codes, as a share of the largest difference from zero (or, asymmetric, of
    the range) in a group."""

    def test_error_is_within_half_a_step(self) -> None:
        """Oracle: half the distance between neighbouring codes, and the rounding of the scale."""
        x_RD = self.numbers(64, 256)
        layout, buffer = self.encoded(x_RD)
        group = layout.group_size if self.codec.facts.group_sizes else 256
        groups_RGK = x_RD.view(64, -1, group)
        reach_RG1 = groups_RGK.abs().amax(2, keepdim=True)
        if len(self.codec.facts.scales) > 1:
            reach_RG1 = groups_RGK.amax(2, keepdim=True) - groups_RGK.amin(2, keepdim=True)
        error_RGK = (self.decoded(layout, buffer).view_as(groups_RGK) - groups_RGK).abs()
        assert bool((error_RGK <= reach_RG1 * (self.step + 2e-3)).all())

    def test_rows_are_encoded_alone_as_within_the_whole(self) -> None:
        """Oracle: the encoding of the whole."""
        x_RD = self.numbers(9, 70)
        layout, whole = self.encoded(x_RD)
        parts = torch.zeros_like(whole)
        for start, stop in ((5, 9), (0, 2), (2, 5)):
            encode_rows(x_RD[start:stop], parts, layout, start)
        assert torch.equal(parts, whole)

    def test_zeros_stay_zeros(self) -> None:
        """Oracle: the values themselves."""
        layout, buffer = self.encoded(torch.zeros(3, 64))
        assert torch.equal(self.decoded(layout, buffer), torch.zeros(3, 64))

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_what_is_not_finite_is_refused(self, bad: float) -> None:
        """Oracle: the contract of ``encode_rows``."""
        x_RD = self.numbers(3, 64)
        x_RD[1, 5] = bad
        with refused(ValueError, "row 1 finite"):
            self.encoded(x_RD)

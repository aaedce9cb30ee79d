"""Oracle: the formulas of int4, int4a and nf4, written down here in torch; the C kernel's bytes are
theirs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from blockwalk.numerics import native
from blockwalk.numerics.codecs import codecs
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.plan.placement import Codec
from blockwalk.tiers.block_store import writer
from blockwalk.tiers.block_store.store import StoredParam
from tests.support.messages import refused
from tests.support.native import by

needs_native = pytest.mark.skipif(native.load("codecs") is None, reason="no C compiler")
KINDS = [(Codec.INT4, 32), (Codec.INT4, 64), (Codec.INT4A, 32), (Codec.NF4, 32), (Codec.NF4, 64)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Appendix E of QLoRA
LEVELS = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
BORDERS = (LEVELS[1:] + LEVELS[:-1]) / 2


def formula(x_RD: Tensor, codec: Codec, group: int) -> Tensor:
    """The bytes of rows, uint8 [n]."""
    groups = -(-x_RD.shape[1] // group)
    padded = torch.nn.functional.pad(x_RD.float(), (0, groups * group - x_RD.shape[1]))
    x_RGK = padded.view(len(x_RD), groups, group)
    if codec is Codec.NF4:
        scales = x_RGK.abs().amax(2, keepdim=True)
        codes = torch.bucketize(x_RGK / torch.where(scales == 0, math.inf, scales), BORDERS)
        codes = codes.to(torch.uint8)
        packed = codes[..., ::2] << 4 | codes[..., 1::2]
        return torch.cat((scales.flatten().view(torch.uint8), packed.flatten()))
    low, high = torch.aminmax(x_RGK, dim=2, keepdim=True)
    if codec is Codec.INT4:
        scales = (torch.where(high >= -low, high, low) / -8).half()
        step = torch.where(scales == 0, math.inf, scales.float())
        codes = ((x_RGK / step).round().clamp(-8, 7) + 8).to(torch.uint8)
        packed = codes[..., : group // 2] | codes[..., group // 2 :] << 4
        return torch.cat((scales.flatten().view(torch.uint8), packed.flatten()))
    step = (high - low) / 15
    steps = (x_RGK - low) / torch.where(step == 0, math.inf, step) + 0.5
    codes = steps.floor().clamp(0, 15).to(torch.uint8)
    packed = codes[..., : group // 2] | codes[..., group // 2 :] << 4
    scales = torch.cat((step, low), 2).half().contiguous().view(torch.uint8)
    return torch.cat((scales, packed), 2).flatten()


def bytes_of(x_RD: Tensor, codec: Codec, group: int, *, check: bool = True) -> Tensor:
    layout = Layout(tuple(x_RD.shape), codec, group_size=group)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    return codecs.encode_rows(x_RD, buffer, layout, 0, check=check)


def draws(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def at_borders(codec: Codec, group: int) -> Tensor:
    """Rows whose elements lie on the borders between two codes, and just beside them."""
    if codec is Codec.NF4:
        unit = BORDERS
    else:
        unit = (torch.arange(15) - 7.5) / 8 if codec is Codec.INT4 else (torch.arange(15) + 0.5)
    rows = []
    for scale in (1.0, 3.0, 0.7, 2.0**-20):
        below, above = (torch.nextafter(unit, torch.tensor(to)) for to in (-math.inf, math.inf))
        for values in (unit, below, above):
            row = torch.zeros(group)
            row[: len(values)] = values
            row[-1] = 15.0 if codec is Codec.INT4A else 1.0
            rows.append(row * scale)
    return torch.stack(rows)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("codec", "group"), KINDS)
def test_bytes_are_the_formulas(codec: Codec, group: int, dtype: torch.dtype) -> None:
    """Groups of every size of value, a row's last one whole or in part, one element included."""
    for columns in (1, 31, 64, 65, 200, 256):
        x_RD = draws(41, columns, columns)
        x_RD *= 10.0 ** (torch.arange(41) % 9 - 5).unsqueeze(1)
        x_RD[:, columns // 2 :] *= 1e-3
        x_RD = x_RD.clamp(-6e4, 6e4).to(dtype)
        assert torch.equal(bytes_of(x_RD, codec, group), formula(x_RD, codec, group)), columns


@needs_native
@pytest.mark.parametrize(("codec", "group"), KINDS)
def test_subnormal_numbers_and_large_ones_are_the_formulas(codec: Codec, group: int) -> None:
    largest = {Codec.INT4: 5e5, Codec.INT4A: 6.5e4, Codec.NF4: 3e38}[codec]
    sizes = (*(10.0**n for n in range(-45, 5)), largest)
    x_RD = torch.cat([draws(2, 2 * group, n).clamp(-1, 1) * s for n, s in enumerate(sizes)])
    assert torch.equal(bytes_of(x_RD, codec, group), formula(x_RD, codec, group))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("codec", "group"), KINDS)
def test_ties_are_rounded_as_the_formulas_do(codec: Codec, group: int, dtype: torch.dtype) -> None:
    x_RD = at_borders(codec, group).to(dtype)
    assert torch.equal(bytes_of(x_RD, codec, group), formula(x_RD, codec, group))


@needs_native
@pytest.mark.parametrize(("codec", "group"), KINDS)
def test_noughts_keep_the_sign_that_the_formulas_give_them(codec: Codec, group: int) -> None:
    rows = [torch.zeros(group), -torch.zeros(group)]
    for first in (0.0, -0.0):
        for others in (1.0, -1.0, -first):
            row = torch.full((group,), others)
            row[group // 3] = first
            row[group // 2] = -first
            rows.append(row)
    x_RD = torch.stack(rows)
    assert torch.equal(bytes_of(x_RD, codec, group), formula(x_RD, codec, group))


@needs_native
def test_infinity_unchecked_is_the_formula() -> None:
    x_RD = draws(6, 64)
    x_RD[1, 5] = math.inf
    x_RD[2, 40] = -math.inf
    expected = formula(x_RD, Codec.NF4, 32)
    assert torch.equal(bytes_of(x_RD, Codec.NF4, 32, check=False), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("codec", "group"), KINDS)
def test_what_is_not_finite_is_refused(
    codec: Codec, group: int, compiled: bool, dtype: torch.dtype
) -> None:
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        x_RD = draws(5, 70).to(dtype)
        x_RD[3, 69] = bad
        with refused(ValueError, "row 3 finite"):
            by(compiled, bytes_of, x_RD, codec, group)


@needs_native
@pytest.mark.parametrize(("codec", "group"), KINDS)
def test_threads_share_the_rows(codec: Codec, group: int) -> None:
    x_RD = draws(700, 330).to(torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(bytes_of(x_RD, codec, group), formula(x_RD, codec, group))
    finally:
        torch.set_num_threads(before)


def written(values: Tensor, codec: Codec, group: int, threads: int) -> tuple[list[int], Tensor]:
    """The rows that a store's writer tells of, and the bytes, with so many of torch's threads."""
    layout = Layout(tuple(values.shape), codec, group_size=group)
    bytes_P = torch.zeros(layout.nbytes, dtype=torch.uint8)
    param = StoredParam("w", codec, layout.shape, "bfloat16", 0, layout.nbytes, 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return list(writer.encode(values, param, group, bytes_P)), bytes_P
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("codec", "group"), KINDS)
def test_a_store_is_written_by_all_threads(
    codec: Codec, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are told in their order, whichever thread is done first."""
    monkeypatch.setattr(writer, "CHUNK_ELEMENTS", 3 * 330)
    values = draws(100, 330).to(torch.bfloat16)
    for threads in (1, 3):
        told, bytes_P = written(values, codec, group, threads)
        assert told == [*range(3, 100, 3), 100]
        assert torch.equal(bytes_P, formula(values, codec, group))


@pytest.mark.parametrize(("codec", "group"), KINDS)
def test_of_two_bad_rows_all_threads_name_the_first(
    codec: Codec, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHUNK_ELEMENTS", 3 * 330)
    values = draws(100, 330)
    values[(40, 90), 5] = math.inf
    with refused(ValueError, "w 40 finite"):
        written(values, codec, group, 3)

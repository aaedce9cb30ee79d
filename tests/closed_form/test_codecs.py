"""Oracle: closed forms. Error bounds and expected values of each codec, bytes written out by hand,
torch's own casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.numerics import native, scratch
from blockwalk.numerics.codecs.codecs import decode_rows, encode_rows, gather_rows
from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.weights import DenseWeight, EncodedWeight
from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.scratch import ScratchArena
from blockwalk.plan.model_spec import encoded_nbytes
from blockwalk.plan.placement import Codec
from tests.support.codecs import decode, encode
from tests.support.messages import refused
from tests.support.native import by

KEY = NoiseKey(seed=0, step=3, query=0, name="weight", domain="rounding")
WRITTEN = [codec for codec in Codec if codec.written]
SCALED = (Codec.FP8, Codec.INT8, Codec.INT4)
STOCHASTIC = (Codec.BF16, Codec.FP16, Codec.FP8, Codec.INT8)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def encoded(tensor: torch.Tensor, codec: Codec, **options: object) -> torch.Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    nbytes = encoded_nbytes(tuple(tensor.shape), dtype, codec, options.get("group_size", 32))  # type: ignore[arg-type]
    return encode(tensor, codec, torch.zeros(nbytes, dtype=torch.uint8), **options)  # type: ignore[arg-type]


def roundtrip(tensor: torch.Tensor, codec: Codec, **options: object) -> torch.Tensor:
    """Encoded and decoded to float32."""
    group_size = int(options.get("group_size", 32))  # type: ignore[call-overload]
    out = torch.empty(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return decode(
        encoded(tensor, codec, **options),
        tuple(tensor.shape),
        codec,
        out,
        group_size=group_size,
        dtype=dtype,
    )


def test_int4_bytes_by_hand() -> None:
    """Oracle: a group written out by hand: scales first, first half in the low nibbles, second half
    in the high."""
    steps = torch.arange(32) % 16 - 8  # codes −8 … 7 twice
    steps[16:] = steps[16:].flip(0)
    value_of_code = -0.5  # the largest magnitude is +4 = −8 · −0.5
    buffer = encoded((steps * value_of_code).view(1, 32), Codec.INT4)
    assert buffer[:2].view(torch.float16).item() == -0.5
    assert buffer[2:].tolist() == [i | (15 - i) << 4 for i in range(16)]


def test_scaled_rows_by_hand() -> None:
    """Oracle: two rows written out by hand: all scales, then all codes."""
    x_RD = torch.tensor([[127.0, -64.0], [0.0, -2.54]])
    buffer = encoded(x_RD, Codec.INT8)
    assert torch.equal(buffer[:8].view(torch.float32), torch.tensor([1.0, 2.54 / 127]))
    assert buffer[8:].view(torch.int8).tolist() == [127, -64, 0, -127]


@pytest.mark.parametrize("dtype", FLOATS)
def test_plain_codecs_are_torch_casts(dtype: torch.dtype) -> None:
    """Oracle: torch's own casts."""
    x = random(7, 33, dtype=dtype)
    for codec, target in (
        (Codec.BF16, torch.bfloat16),
        (Codec.FP16, torch.float16),
        (Codec.FP32, torch.float32),
    ):
        assert torch.equal(roundtrip(x, codec), x.to(target).float())
    assert torch.equal(roundtrip(x, Codec.RAW), x.float())


def test_raw_keeps_every_bit() -> None:
    """Oracle: the bytes themselves, whatever they mean."""
    for x in (
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.arange(6).view(2, 3),
        torch.tensor([True, False]),
    ):
        assert encoded(x, Codec.RAW).tolist() == x.contiguous().view(torch.uint8).flatten().tolist()


def test_fp8_is_torch_cast_of_the_scaled_row() -> None:
    """Oracle: torch's cast to e4m3."""
    x_RD = random(6, 40) * torch.logspace(-6, 6, 6).unsqueeze(1)
    scale_R1 = x_RD.abs().amax(1, keepdim=True) / 448
    expected = (x_RD / scale_R1).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale_R1
    assert torch.equal(roundtrip(x_RD, Codec.FP8), expected)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 150),
    st.sampled_from((32, 64)),
    st.floats(-6, 4),
    st.integers(0, 99),
)
def test_error_bounds(rows: int, columns: int, group_size: int, exponent: float, seed: int) -> None:
    """Oracle: half a step, and a whole one where int4's codes end at 7."""
    x_RD = random(rows, columns, seed=seed) * 10**exponent

    layout = Layout((rows, columns), Codec.INT4, group_size=group_size)
    d_RD = layout.scales(encoded(x_RD, Codec.INT4, group_size=group_size)).float()
    d_RD = d_RD.repeat_interleave(group_size, dim=1)[:, :columns]
    error = (roundtrip(x_RD, Codec.INT4, group_size=group_size) - x_RD).abs()
    # The scale is rounded to float16 (2^-11 relative; 2^-25 absolute below its normal numbers).
    bound = torch.where(x_RD / d_RD <= 7.5, d_RD.abs() / 2, d_RD.abs()) + 8 * (
        d_RD.abs() * 2**-11 + 2**-25
    )
    assert bool((error <= bound).all())

    top_R1 = x_RD.abs().amax(1, keepdim=True)
    assert bool(((roundtrip(x_RD, Codec.INT8) - x_RD).abs() <= top_R1 / 127 * (0.5 + 1e-4)).all())
    error = (roundtrip(x_RD, Codec.FP8) - x_RD).abs()
    assert bool(
        (error <= torch.maximum(x_RD.abs() * 2**-4, top_R1 / 448 * 2**-10) * (1 + 1e-5)).all()
    )


def test_int4_step_is_an_eighth_of_the_signed_maximum() -> None:
    """Oracle: the relative error that this scale has on normal values (0.086; max|group|/7 has
    0.097)."""
    x_RD = random(512, 512)
    relative = ((roundtrip(x_RD, Codec.INT4) - x_RD).norm() / x_RD.norm()).item()
    assert relative == pytest.approx(0.086, abs=0.001)


@pytest.mark.parametrize("codec", SCALED)
def test_zero_and_tiny_rows(codec: Codec) -> None:
    """Oracle: zeros are zeros; where a scale has too few bits left, the error is a few of its least
    steps."""
    x_RD = torch.zeros(7, 64)
    x_RD[1:] = random(1, 64) * torch.tensor([1e-45, 1e-42, 3e-38, 2e-9, 1e-7, 1e-5]).unsqueeze(1)
    back_RD = roundtrip(x_RD, codec)
    assert bool(back_RD.isfinite().all())
    assert torch.equal(back_RD[0], torch.zeros(64))
    step_R1 = (
        x_RD.abs().amax(1, keepdim=True) / {Codec.FP8: 16, Codec.INT8: 254, Codec.INT4: 8}[codec]
    )
    least = {Codec.FP8: 448 * 2**-149, Codec.INT8: 127 * 2**-149, Codec.INT4: 8 * 2**-24}[codec]
    assert bool(((back_RD - x_RD).abs() <= step_R1 * 1.001 + least).all())


@pytest.mark.parametrize(
    ("codec", "value", "said"),
    [
        (codec, bad, "finite")
        for codec in (*STOCHASTIC, Codec.INT4)
        for bad in (math.inf, -math.inf, math.nan)
    ]
    + [
        (Codec.FP16, 65520.0, "fp16 65504"),
        (Codec.BF16, -3.4e38, "bf16 3.38953e+38"),
        (Codec.INT4, 530_000.0, "int4 524032"),
        (Codec.INT8, 2e38, "int8 1.70141e+38"),
    ],
)
def test_what_a_codec_cannot_hold_is_refused(codec: Codec, value: float, said: str) -> None:
    """Oracle: the limits of the dtypes; the message names parameter and row."""
    x_RD = random(5, 40)
    x_RD[3, 7] = value
    with refused(ValueError, f"layers.0.w 3 {said}"):
        encoded(x_RD, codec, name="layers.0.w")


def test_the_largest_values_are_held() -> None:
    """Oracle: the limits of the dtypes, from the other side; int4's largest scale is float16's
    largest number."""
    for codec, top in (
        (Codec.FP16, 65504.0),
        (Codec.BF16, 2.0**127 * (2 - 2**-7)),
        (Codec.INT4, 524032.0),
    ):
        for sign in (1, -1):
            assert roundtrip(torch.full((1, 32), sign * top), codec)[0, 0].item() == sign * top
    for codec in (Codec.BF16, Codec.FP16):
        top = torch.finfo(torch.bfloat16 if codec is Codec.BF16 else torch.float16).max
        assert bool((roundtrip(torch.full((8, 64), top), codec, rounding=KEY) == top).all())
    top = 2.0**127  # above it, scale times code could overflow
    for codec in (Codec.INT8, Codec.FP8):
        assert bool(roundtrip(torch.full((2, 64), top), codec, rounding=KEY).isfinite().all())


def test_arguments_are_checked() -> None:
    """Oracle: sizes by hand."""
    x_RD = random(4, 64)
    with pytest.raises(AssertionError):
        encode(x_RD, Codec.INT8, torch.zeros(271, dtype=torch.uint8))
    with pytest.raises(AssertionError):
        encode_rows(x_RD[:2], torch.zeros(272, dtype=torch.uint8), Layout((4, 64), Codec.INT8), 3)
    with refused(ValueError, "group_size 48"):
        Layout((4, 64), Codec.INT4, group_size=48)
    with refused(ValueError, "stochastic rounding"):
        encoded(x_RD, Codec.INT4, rounding=KEY)
    with pytest.raises(AssertionError):
        EncodedWeight(torch.zeros(300, dtype=torch.uint8), Layout((4, 64), Codec.INT8))
    with pytest.raises(AssertionError):
        DenseWeight(torch.zeros(3))


@pytest.mark.parametrize("rounding", [None, KEY])
@pytest.mark.parametrize("codec", WRITTEN)
def test_rows_are_encoded_alone_as_within_the_whole(
    codec: Codec, rounding: NoiseKey | None
) -> None:
    """Oracle: the encoding of the whole; experts [E, N, D] are rows [E·N, D], and the chunks of a
    large one do not show."""
    if codec.encoded and not codec.facts.trainable and rounding is not None:
        return
    x = random(3, 5, 70)
    whole = encoded(x, codec, rounding=rounding)
    layout = Layout((3, 5, 70), codec)
    parts = torch.zeros_like(whole)
    for start, stop in ((9, 15), (0, 4), (4, 9)):
        encode_rows(x.view(15, 70)[start:stop], parts, layout, start, rounding=rounding)
    assert torch.equal(whole, parts)
    if codec not in (Codec.RAW, Codec.FP32) and rounding is not None:
        later = NoiseKey(0, 4, 0, "weight", "rounding")
        assert not torch.equal(whole, encoded(x, codec, rounding=later))


def test_a_large_parameter_is_encoded_in_pieces() -> None:
    """Oracle: the encoding of its halves, each below the size of a piece."""
    x_RD = random(300, 1024)
    for codec in STOCHASTIC:
        for fast in (True, False):
            layout = Layout((300, 1024), codec)
            whole, parts = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
            by(fast, encode_rows, x_RD, whole, layout, 0, rounding=KEY)
            for start in (0, 150):
                by(fast, encode_rows, x_RD[start : start + 150], parts, layout, start, rounding=KEY)
            assert torch.equal(whole, parts)


@pytest.mark.parametrize("codec", STOCHASTIC)
def test_stochastic_rounding_is_unbiased(codec: Codec) -> None:
    """Oracle: a value p of the way between two codes goes up with probability p: the mean is the
    value, within 5 sigma."""
    rows = 1024
    columns = 256
    top = {Codec.FP8: 448.0, Codec.INT8: 127.0}.get(codec, 256.0)
    step = {Codec.BF16: 2**-6, Codec.FP16: 2**-9, Codec.FP8: 2**-2, Codec.INT8: 1.0}[
        codec
    ]  # from 2 to 4
    for p in (0.03125, 0.5, 0.71875):
        for value, grid in ((2 + p * step, step), (-(3 + p * step), step)):
            x_RD = torch.full((rows, columns), value)
            x_RD[:, 0] = top  # the scale of each row is 1
            got_RD = roundtrip(x_RD, codec, rounding=KEY)[:, 1:]
            near = math.copysign(math.floor(abs(value) / grid) * grid, value)
            far = math.copysign(math.floor(abs(value) / grid) * grid + grid, value)
            assert bool(((got_RD == near) | (got_RD == far)).all())
            sigma = grid * math.sqrt(p * (1 - p) / got_RD.numel())
            assert abs(got_RD.double().mean().item() - value) < 5 * sigma


@pytest.mark.parametrize("codec", STOCHASTIC)
def test_stochastic_rounding_below_the_normal_numbers(codec: Codec) -> None:
    """Oracle: the mean again, for values smaller than the least code: nearest rounding would give
    zero."""
    least = {Codec.BF16: 2.0**-133, Codec.FP16: 2.0**-24, Codec.FP8: 2.0**-9, Codec.INT8: 1.0}[
        codec
    ]
    x_RD = torch.full((1024, 256), least / 4)
    x_RD[:, 0] = {Codec.FP8: 448.0, Codec.INT8: 127.0}.get(codec, 0.0)
    got_RD = roundtrip(x_RD, codec, rounding=KEY)[:, 1:] / least
    assert bool(((got_RD == 0) | (got_RD == 1)).all())
    assert abs(got_RD.mean().item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / got_RD.numel())


@pytest.mark.parametrize("codec", STOCHASTIC)
def test_codes_stay_where_they_are(codec: Codec) -> None:
    """Oracle: idempotence: what a codec holds exactly is not moved by stochastic rounding."""
    x_RD = random(16, 64)
    x_RD[:, 0] = {Codec.FP8: 448.0, Codec.INT8: 127.0}.get(
        codec, 1.0
    )  # a scale of 1: values are codes
    once_RD = roundtrip(x_RD * 10, codec) if codec is Codec.INT8 else roundtrip(x_RD, codec)
    if codec is Codec.INT8:
        once_RD = x_RD.round()
    assert torch.equal(roundtrip(once_RD, codec, rounding=KEY), once_RD)


needs_native = pytest.mark.skipif(
    native.load("codecs") is None, reason="no C compiler: torch decodes everything"
)


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCALED), st.sampled_from(FLOATS), st.integers(1, 9), st.integers(1, 300),
    st.sampled_from((32, 64)), st.data(),
)  # fmt: skip
def test_the_kernel_and_torch_agree(
    codec: Codec, dtype: torch.dtype, rows: int, columns: int, group_size: int, data: st.DataObject
) -> None:
    """Oracle: torch's arithmetic, to the bit, for any range of rows and columns and every size of
    scale."""
    first = data.draw(st.integers(0, columns))
    last = data.draw(st.integers(first, columns))
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    exponent = data.draw(st.integers(-41, 5))
    x_RD = random(rows, columns, seed=columns) * 10.0**exponent
    buffer = encoded(x_RD, codec, group_size=group_size)
    layout = Layout((rows, columns), codec, group_size=group_size)
    shape = (stop - start, last - first)
    outs = [torch.full(shape, 7.0, dtype=dtype) for _ in range(2)]
    for out, fast in zip(outs, (True, False), strict=True):
        by(fast, decode_rows, buffer, layout, start, stop, out, columns=(first, last))
    assert torch.equal(
        *(out.view(torch.int32 if dtype == torch.float32 else torch.int16) for out in outs)
    )
    index = torch.tensor(
        data.draw(st.lists(st.integers(0, rows - 1), max_size=12)), dtype=torch.int64
    )
    chosen = [torch.empty(len(index), columns, dtype=dtype) for _ in range(2)]
    for out, fast in zip(chosen, (True, False), strict=True):
        by(fast, gather_rows, buffer, layout, index, out)
    assert torch.equal(*chosen)


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from((Codec.FP8, Codec.INT8)), st.integers(1, 9), st.integers(1, 300),
    st.integers(-46, 38), st.booleans()
)  # fmt: skip
def test_the_kernel_and_torch_encode_alike(
    codec: Codec, rows: int, columns: int, exponent: int, stochastic: bool
) -> None:
    """Oracle: torch's arithmetic and its cast to e4m3, to the bit, for every size of value."""
    x_RD = random(rows, columns, seed=columns).clamp_(-1, 1).double().mul_(10.0**exponent).float()
    x_RD[:, columns // 2 :] *= 2.0 ** -(
        columns % 13
    )  # far below the row's largest: e4m3's subnormal numbers
    layout = Layout((rows, columns), codec)
    buffers = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2)]
    for buffer, fast in zip(buffers, (True, False), strict=True):
        by(fast, encode_rows, x_RD, buffer, layout, 0, rounding=KEY if stochastic else None)
    assert torch.equal(*buffers)


@needs_native
@pytest.mark.parametrize("codec", SCALED)
def test_the_kernel_and_torch_agree_on_subnormal_numbers(codec: Codec) -> None:
    """Oracle: torch's arithmetic, where scales and products leave the normal numbers."""
    for exponent in range(-44, -33):
        x_RD = random(2, 128) * 10.0**exponent
        for dtype in FLOATS:
            outs = [torch.empty(2, 128, dtype=dtype) for _ in range(2)]
            for out, fast in zip(outs, (True, False), strict=True):
                by(fast, decode_rows, encoded(x_RD, codec), Layout((2, 128), codec), 0, 2, out)
            assert torch.equal(*outs)


@needs_native
@pytest.mark.parametrize("codec", [Codec.FP8, Codec.INT8])
def test_the_kernel_and_torch_round_alike(codec: Codec) -> None:
    """Oracle: torch's arithmetic, on so many elements that every kind of tie of remainder and draw
    is among them."""
    x_RD = random(1024, 1024)
    layout = Layout((1024, 1024), codec)
    buffers = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2)]
    for buffer, fast in zip(buffers, (True, False), strict=True):
        by(fast, encode_rows, x_RD, buffer, layout, 0, rounding=KEY)
    assert torch.equal(*buffers)


@needs_native
def test_threads_share_the_rows() -> None:
    """Oracle: torch's arithmetic, for a range large enough for several threads."""
    x_RD = random(512, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for codec in SCALED:
            outs = [torch.empty(512, 512) for _ in range(2)]
            for out, fast in zip(outs, (True, False), strict=True):
                by(fast, decode_rows, encoded(x_RD, codec), Layout((512, 512), codec), 0, 512, out)
            assert torch.equal(*outs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("codec", WRITTEN)
def test_weights_are_ranges_of_the_decoded_parameter(codec: Codec, dtype: torch.dtype) -> None:
    """Oracle: the whole, decoded at once."""
    x_RD = random(24, 70)
    layout = Layout((24, 70), codec)
    whole_RD = decode(encoded(x_RD, codec), (24, 70), codec, torch.empty(24, 70, dtype=dtype))
    for weight in (
        EncodedWeight(encoded(x_RD, codec), layout, dtype),
        EncodedWeight(encoded(x_RD, codec), layout).to(dtype),
        DenseWeight(whole_RD.clone(), dtype),
        DenseWeight(whole_RD.double(), dtype),
    ):
        assert (weight.shape, weight.dtype) == ((24, 70), dtype)
        assert torch.equal(weight.rows(3, 20), whole_RD[3:20])
        assert torch.equal(weight.columns(5, 69), whole_RD[:, 5:69])
        index = torch.tensor([[3, 0], [23, 3]])
        assert torch.equal(weight.gather(index), whole_RD[index])
        assert torch.equal(weight.gather(index.int()[:, ::2]), whole_RD[index[:, ::2]])


def test_scratch_is_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: addresses. Weights decode into one place of a thread's; dense ones are views of
    themselves."""
    arena = ScratchArena()
    monkeypatch.setattr(scratch._SHARED, "arena", arena)
    weights = [
        EncodedWeight(encoded(random(8, 64, seed=s), Codec.INT4), Layout((8, 64), Codec.INT4))
        for s in (1, 2)
    ]
    first, second = (weight.to(torch.float32) for weight in weights)
    address = first.rows(0, 8).data_ptr()
    assert arena.nbytes == 8 * 64 * 4
    assert {
        second.rows(2, 4).data_ptr(),
        first.columns(0, 64).data_ptr(),
        first.rows(0, 1).data_ptr(),
    } == {address}
    tensor = random(8, 64)
    assert DenseWeight(tensor).columns(1, 3).data_ptr() == tensor[:, 1:].data_ptr()


@pytest.mark.parametrize("codec", SCALED)
def test_rows_outside_are_refused(codec: Codec) -> None:
    """Oracle: the parameter's own number of rows."""
    weight = EncodedWeight(encoded(random(8, 64), codec), Layout((8, 64), codec))
    for bad in (8, -1):
        with refused(IndexError, "8 rows"):
            weight.gather(torch.tensor([0, bad]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", WRITTEN)
def test_cuda_gives_the_same_bits(codec: Codec) -> None:
    """Oracle: the CPU's bytes and values."""
    x_RD = random(40, 300)
    for rounding in (None, KEY) if codec in STOCHASTIC else (None,):
        here = encoded(x_RD, codec, rounding=rounding)
        there = torch.zeros_like(here, device="cuda")
        assert torch.equal(encode(x_RD.cuda(), codec, there, rounding=rounding).cpu(), here)
        for dtype in FLOATS:
            ours, theirs = (
                EncodedWeight(b, Layout((40, 300), codec), dtype) for b in (here, there)
            )
            assert torch.equal(theirs.rows(3, 33).cpu(), ours.rows(3, 33))
            assert torch.equal(theirs.columns(33, 100).cpu(), ours.columns(33, 100))
            assert torch.equal(
                theirs.gather(torch.tensor([3, 1], device="cuda")).cpu(),
                ours.gather(torch.tensor([3, 1])),
            )

"""Oracles: Random123's published vectors, numpy's Philox, Φ⁻¹ of the standard library, and moments
in closed form."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockwalk.contrib.mezo_original.in_place import MezoNoise
from blockwalk.numerics import native as native_code
from blockwalk.numerics.noise import key as noise_key
from blockwalk.numerics.noise import numpy_words
from blockwalk.numerics.noise.key import NoiseKey, Window, Write
from blockwalk.numerics.noise.noise import (
    add_products_,
    fill_,
    perturbed,
    random_uint16,
    stochastic_round,
)
from tests.support.messages import refused
from tests.support.native import by

KEY = NoiseKey(seed=0, step=7, query=0, name="model.layers.0.self_attn.q_proj.weight")
ROUNDING = NoiseKey(seed=0, step=7, query=0, name=KEY.name, domain="rounding")
KINDS = ("gaussian", "rademacher")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HAS_COMPILER = native_code.load("noise") is not None
PATHS = [
    pytest.param(
        True, marks=pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler"), id="native"
    ),
    False,
]

PINNED_KEY = (0x4B688FF9EF26D91A, 0xDFE5F4A8C3624309)
PINNED_VALUES = [0.36327868700027466, -1.1261557340621948, -1.0515210628509521, 1.0220437049865723]
PINNED_SEED = 2345225987418141522

# Random123, tests/kat_vectors: philox4x64 10 rounds, a line each of counter, key and answer.
PUBLISHED = """
0000000000000000 0000000000000000 0000000000000000 0000000000000000
0000000000000000 0000000000000000
16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b
ffffffffffffffff ffffffffffffffff ffffffffffffffff ffffffffffffffff
ffffffffffffffff ffffffffffffffff
87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0
243f6a8885a308d3 13198a2e03707344 a4093822299f31d0 082efa98ec4e6c89
452821e638d01377 be5466cf34e90c6c
a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6
"""


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """The paper's definition with Python's integers."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        first = 0xD2E7470EE14C6C93 * a
        second = 0xCA5A826395121157 * c
        a = second >> 64 ^ b ^ k0
        b = second % 2**64
        c = first >> 64 ^ d ^ k1
        d = first % 2**64
        k0 = (k0 + 0x9E3779B97F4A7C15) % 2**64
        k1 = (k1 + 0xBB67AE8584CAA73B) % 2**64
    return [a, b, c, d]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def awkward(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of every magnitude that matters to 16-bit rounding: subnormal, ordinary, ties,
    overflowing."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator) * 2.0 ** torch.randint(
        -34, 18, (count,), generator=generator
    )
    x[::7] = x[::7].half().float() + 2.0**-11  # near ties of float16
    x[3::7] = (
        (x[3::7].abs() % 4).floor().add(0.5) * 2.0**-24 * (1 + 2.0**-22)
    )  # just above ties of its subnormals
    return x.to(dtype)


def draws_of(key: NoiseKey, start: int, count: int) -> np.ndarray:
    """The definition: draw e is the 16 bits at 16·(e mod 4) of word (e div 4) mod 4 of counter e
    div 16."""
    words = [
        philox((c, 0, 0, 0), key.philox_key())
        for c in range(start // 16, (start + count - 1) // 16 + 1)
    ]
    flat = [word >> 16 * lane & 0xFFFF for four in words for word in four for lane in range(4)]
    return np.array(flat[start % 16 :][:count])


def test_the_paper_s_definition_gives_the_published_vectors() -> None:
    """Oracle: Random123's known-answer vectors, for the Philox that the other tests compare
    with."""
    lines = [[int(word, 16) for word in line.split()] for line in PUBLISHED.split("\n") if line]
    for counter, key, answer in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert philox(tuple(counter), (key[0], key[1])) == answer


def test_words_are_philox_of_the_counter() -> None:
    """Oracle: the definition above, for numpy's generator, whose counter steps before it is
    used."""
    key = KEY.philox_key()
    for counter in (0, 1, 2**40):
        want = [word for c in range(counter, counter + 3) for word in philox((c, 0, 0, 0), key)]
        assert numpy_words.words(key, counter, 3).tolist() == want


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("start", [0, 3, 16, 2**34 + 5])
def test_values_by_definition(native: bool, start: int) -> None:
    """Oracle: the definition, element by element: 16-bit draws through the table, bits as signs."""
    count = 700
    draws = draws_of(KEY, start, count)
    got = by(native, random_uint16, KEY, start, torch.empty(count, dtype=torch.int32))
    assert got.tolist() == draws.tolist()
    short = by(native, random_uint16, KEY, start, torch.empty(count, dtype=torch.uint16))
    assert short.tolist() == draws.tolist()
    z = by(native, fill_, torch.empty(count), KEY, start, "gaussian")
    assert torch.equal(z, torch.from_numpy(numpy_words.gaussian_table()[draws]))
    signs = by(native, fill_, torch.empty(count), KEY, start, "rademacher")
    for e in (start, start + 1, start + 63, start + 64, start + count - 1):
        word = philox((e // 256, 0, 0, 0), KEY.philox_key())[e % 256 // 64]
        assert signs[e - start] == 1 - 2 * (word >> e % 64 & 1)


def test_table_is_the_inverse_normal() -> None:
    """Oracle: statistics.NormalDist, and exact sums over the table for what its documentation
    claims."""
    table = numpy_words.gaussian_table()
    inverse = NormalDist().inv_cdf
    quantiles = np.array([-inverse((2 * m + 1) / 2**17) for m in range(1 << 15)])
    assert np.abs(table[: 1 << 15] - quantiles).max() < 6.3e-5
    assert np.array_equal(table[1 << 15 :], -table[: 1 << 15]), (
        "antisymmetric: the mean and every odd moment are 0"
    )
    assert (np.diff(table[: 1 << 15]) < 0).all(), "m counts from the tail towards the middle"
    assert table.min() == -table.max()
    assert table.max() == np.float32(4.32497454)
    moments = {k: math.fsum(float(z) ** k for z in table) / table.size for k in (2, 4, 6)}
    assert abs(moments[2] - 1) < 2e-9
    assert abs(moments[4] / moments[2] ** 2 - 2.99926) < 1e-5
    assert abs(moments[6] - 14.973) < 1e-3
    assert abs(1 / (2 * NormalDist().cdf(-4.325)) - 65_000) < 1000, (
        "what the documentation says lies beyond"
    )


def test_cubics_go_through_the_quantiles() -> None:
    """Oracle: −Φ⁻¹ at each segment's borders and inner Chebyshev extrema, times the documented
    scale."""
    inverse = NormalDist().inv_cdf
    for row, cubic in enumerate(
        np.roll(numpy_words.cubic_coefficients().T.astype(float), 2, axis=0)
    ):
        exponent, second = divmod(row, 2)
        for t in (0, 0.125, 0.375, 0.5):
            p = 2.0**exponent * (1 + second / 2 + t) / 2**17
            z = cubic @ [1, t, t**2, t**3]
            assert abs(z + 1.0000128587 * inverse(p)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_streams_look_independent(kind: str) -> None:
    """Oracle: moments and correlations of n independent draws, within five standard deviations."""
    n = 1 << 16
    keys = [
        KEY,
        NoiseKey(1, 7, 0, KEY.name),
        NoiseKey(0, 8, 0, KEY.name),
        NoiseKey(0, 7, 1, KEY.name),
        NoiseKey(0, 7, 0, "model.layers.1.self_attn.q_proj.weight"),
        ROUNDING,
        NoiseKey(2**63, 7, 0, KEY.name),
    ]
    assert len({key.philox_key() for key in keys}) == len(keys)
    z = torch.stack([fill_(torch.empty(n), key, 0, kind) for key in keys]).double()
    assert z.mean(1).abs().max() < 5 / n**0.5
    kurtosis = {"gaussian": 2.99926, "rademacher": 1.0}[kind]
    assert ((z**2).mean(1) - 1).abs().max() <= 5 * ((kurtosis - 1) / n) ** 0.5
    correlation = z @ z.T / n - torch.eye(len(keys))
    assert (correlation - correlation.diag().diag()).abs().max() < 5 / n**0.5
    for lag in (1, 4, 16, 64, 256):
        assert (z[:, lag:] * z[:, :-lag]).mean(1).abs().max() < 5 / (n - lag) ** 0.5


def test_key_is_pinned() -> None:
    """Oracle: a value written down when the generator was: ledgers hold seeds, so a key may never
    change silently."""
    assert noise_key.GENERATOR_VERSION == 1
    assert KEY.philox_key() == PINNED_KEY
    assert fill_(torch.empty(4), KEY, 10**6).tolist() == PINNED_VALUES
    assert noise_key.derive_seed("dropout", 3, b"x") == PINNED_SEED


def test_seeds() -> None:
    """Oracle: the documented range; 0 is a seed, and parts of a derived seed do not run into one
    another."""
    assert NoiseKey(2**63, 0, 0, "w").philox_key() != NoiseKey(0, 0, 0, "w").philox_key()
    for bad in (-1, 2**64):
        with refused(ValueError, "seed"):
            NoiseKey(bad, 0, 0, "w")
    seeds = {
        noise_key.derive_seed(*p)
        for p in [("ab", "c"), ("a", "bc"), ("abc",), (1,), ("1",), (b"1",), (1, 0), ()]
    }
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("native", PATHS)
@settings(max_examples=30, deadline=None)
@given(
    start=st.integers(0, 2**40),
    count=st.integers(0, 6000),
    kind=st.sampled_from(KINDS),
    data=st.data(),
)
def test_a_slice_alone_is_the_slice_of_the_whole(
    native: bool, start: int, count: int, kind: str, data: st.DataObject
) -> None:
    """Oracle: the whole, generated at once."""
    whole = by(native, fill_, torch.empty(count), KEY, start, kind)
    a = data.draw(st.integers(0, count))
    b = data.draw(st.integers(a, count))
    assert torch.equal(by(native, fill_, torch.empty(b - a), KEY, start + a, kind), whole[a:b])


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_windows(native: bool, kind: str) -> None:
    """Oracle: the whole parameter [N, D], generated at once, then sliced: rows, columns, named
    rows."""
    height = 37
    width = 300
    begin = 5
    whole = by(native, fill_, torch.empty(height, width), KEY, begin, kind)
    rows = by(native, fill_, torch.empty(4, width), KEY, begin + 3 * width, kind)
    assert torch.equal(rows, whole[3:7])
    columns = by(native, fill_, torch.empty(height, 50), KEY, begin + 20, kind, pitch=width)
    assert torch.equal(columns, whole[:, 20:70])
    tokens = torch.tensor([5, 0, 36, 5])
    named = by(native, fill_, torch.empty(4, width), KEY, begin, kind, pitch=width, rows=tokens)
    assert torch.equal(named, whole[tokens])
    weight = torch.randn(height, width)
    into = torch.zeros(height, 2 * width)[:, 7:57]  # rows of a wider buffer
    by(native, perturbed, weight[:, 20:70], into, KEY, begin + 20, 1e-3, kind, pitch=width)
    assert torch.equal(into, weight[:, 20:70] + 1e-3 * whole[:, 20:70])
    assert torch.equal(
        bits(fill_(torch.empty(0, width), KEY, 0, kind, pitch=width)), torch.empty(0, width).int()
    )


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source_dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_perturbed_rounds_as_torch_does(
    native: bool, kind: str, source_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Oracle: torch's float32 product, sum and conversion, one after another."""
    n = 5000
    start = 11
    scale = 1e-3
    source = awkward(n, source_dtype)
    z = by(native, fill_, torch.empty(n), KEY, start, kind)
    want = (source.float() + z * scale).to(out_dtype)
    got = by(native, perturbed, source, torch.empty(n, dtype=out_dtype), KEY, start, scale, kind)
    assert torch.equal(bits(got), bits(want))
    if source_dtype == out_dtype:
        assert torch.equal(
            bits(by(native, perturbed, source, source, KEY, start, scale, kind)), bits(want)
        )


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_by_definition(native: bool, dtype: torch.dtype) -> None:
    """Oracle: neighbours and remainder in float64, rounded up where remainder + draw reaches
    2^16."""
    n = 4000
    start = 9
    x = awkward(n, torch.float32).clamp(-65000, 65000)
    draws = torch.from_numpy(draws_of(ROUNDING, start, n))
    magnitude = x.double().abs()
    smallest = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}[dtype]
    digits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    unit = torch.maximum(
        2.0 ** (torch.frexp(magnitude).exponent.double() - 1 - digits), torch.tensor(smallest)
    )
    below = torch.floor(magnitude / unit)
    up = torch.floor((magnitude / unit - below) * 2**16) + draws >= 2**16
    want = torch.copysign((below + up) * unit, x.double()).to(dtype)
    got = by(native, stochastic_round, x, torch.empty(n, dtype=dtype), ROUNDING, start)
    assert torch.equal(bits(got), bits(want))
    assert 0.3 < up.double().mean() < 0.7, "both directions were taken"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_updates_survive_where_nearest_ones_are_lost(dtype: torch.dtype) -> None:
    """Oracle: the mean of many roundings of 1 + 2^-14, which is 1 + 2^-14 to five standard
    deviations."""
    n = 1 << 14
    steps = 4
    change = 2.0**-14
    total = 0.0
    for step in range(steps):
        one = torch.ones(n, dtype=dtype)
        rounding = NoiseKey(0, step, 0, "w", "rounding")
        source = torch.full((n,), 1 + change)
        total += (stochastic_round(source, one, rounding).double() - 1).sum().item()
        assert torch.equal(perturbed(source, one, KEY, 0, 0.0), torch.ones(n, dtype=dtype))
    place = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert abs(total / (n * steps) - change) < 5 * (change * place / (n * steps)) ** 0.5


def test_special_values() -> None:
    """Oracle: IEEE 754: infinities stay, NaN stays NaN, with and without stochastic rounding."""
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, 3e38] * 5)
    for dtype in (torch.bfloat16, torch.float16):
        for rounding in (None, ROUNDING):
            for native in (True, False):
                got = by(
                    native,
                    perturbed,
                    special,
                    torch.empty(35, dtype=dtype),
                    KEY,
                    0,
                    0.0,
                    rounding=rounding,
                ).float()
                assert torch.equal(got[:2], special[:2])
                assert got[2].isnan()
                assert got[3:6].abs().max() <= 1e-44


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_threads_change_nothing() -> None:
    """Oracle: one thread."""
    n = (1 << 18) + 77
    start = 5
    source = torch.randn(n)
    table = torch.randn(1100, 300)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            flat = perturbed(
                source, torch.empty(n, dtype=torch.bfloat16), KEY, start, 1e-3, rounding=ROUNDING
            )
            window = perturbed(
                table[:, :250], torch.empty(1100, 250), KEY, start, 1e-3, "rademacher", pitch=300
            )
            index = torch.arange(1100).flip(0)
            named = perturbed(
                table, torch.empty(1100, 300), KEY, start, 1e-3, pitch=300, rows=index
            )
            results.append(
                (flat, window, named, random_uint16(KEY, 1, torch.empty(n, dtype=torch.int32)))
            )
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="the C kernel has one path on this processor"
)
def test_narrow_processors_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same kernel compiled for this processor; here it is compiled without the widest
    vectors."""
    n = 3001
    start = 13
    cases = [
        (kind, scale, source, out, rounding)
        for kind in KINDS
        for scale in (1e-3, 0.0)  # 0 leaves the ties that the source has
        for source in FLOATS
        for out in FLOATS
        for rounding in (None, ROUNDING)
    ]

    def run() -> list[torch.Tensor]:
        return [
            bits(
                perturbed(
                    awkward(n, source),
                    torch.empty(n, dtype=out),
                    KEY,
                    start,
                    scale,
                    kind,
                    rounding=rounding,
                )
            )
            for kind, scale, source, out, rounding in cases
        ]

    want = run()
    monkeypatch.setenv("CC", f"{shutil.which('cc') or 'gcc'} -mno-avx512f")
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path))
    monkeypatch.setattr(native_code, "_loaded", {})
    got = run()
    assert list(tmp_path.glob("native/noise-*.so")), "a second library was compiled"
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_are_added_term_by_term(native: bool, rank: int, threads: int) -> None:
    """Oracle: numpy's float32, one rounding for each product and sum; rows and columns alone are
    those of the whole."""
    rows = 150
    columns = 2500
    scales = (1e-3, -2e-4)
    before = torch.get_num_threads()
    x_RD, *factors = (
        torch.randn(rows, columns),
        *(torch.randn(n, rank) for n in (rows, columns, rows, columns)),
    )
    (lefts, rights), want = (factors[::2], factors[1::2]), x_RD.numpy().copy()
    for a, b, scale in zip(lefts, rights, scales, strict=True):
        z = a[:, :1].numpy() * b[:, 0].numpy()
        for k in range(1, rank):
            z = z + a[:, k : k + 1].numpy() * b[:, k].numpy()
        want = want + np.float32(scale) * z
    parts = ((slice(None), slice(None)), (slice(3, 4), slice(None)), (slice(None), slice(7, 2190)))
    try:
        torch.set_num_threads(threads)
        for some, others in parts:
            out = x_RD[some, others].contiguous().clone()
            by(
                native,
                add_products_,
                out,
                [a[some] for a in lefts],
                [b[others] for b in rights],
                scales,
            )
            assert torch.equal(out, torch.from_numpy(want)[some, others])
    finally:
        torch.set_num_threads(before)


def test_refusals() -> None:
    """Oracle: what the documentation asks of each argument."""
    with refused(AssertionError, "gaussian rademacher"):
        fill_(torch.empty(4), KEY, 0, "uniform")  # type: ignore[arg-type]
    with refused(ValueError, "float64"):
        fill_(torch.empty(4, dtype=torch.float64), KEY)
    with refused(AssertionError, "agree"):
        perturbed(torch.empty(4), torch.empty(5), KEY, 0, 1.0)
    with refused(AssertionError, "contiguous"):
        fill_(torch.empty(4, 4).t()[:, :2], KEY)
    with refused(AssertionError, "contiguous rows"):
        fill_(torch.empty(4, 4).t(), KEY, pitch=4)
    with refused(AssertionError, "pitch"):
        fill_(torch.empty(4, 4), KEY, rows=torch.arange(4))
    with refused(AssertionError, "int64"):
        fill_(torch.empty(4, 4), KEY, pitch=4, rows=torch.arange(3))
    with refused(AssertionError, "start -1"):
        fill_(torch.empty(4), KEY, -1)
    with refused(AssertionError, "uint16 int32"):
        random_uint16(KEY, 0, torch.empty(5, 1, dtype=torch.int32))
    with refused(NotImplementedError, "tensors"):
        fill_(torch.empty(4, device="meta"), KEY)


def test_mezo_noise_is_the_original_s() -> None:
    """Oracle: the original's lines: torch.manual_seed, then torch.normal for each parameter."""
    parameters = [
        torch.zeros(5, 7),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(2, 2, dtype=torch.float16),
    ]
    draws = MezoNoise(0, parameters)
    torch.manual_seed(99)
    passes = [list(draws), list(draws)]
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(99)))
    for got in passes:
        torch.manual_seed(0)
        for z, p in zip(got, parameters, strict=True):
            want = torch.normal(
                mean=0, std=1, size=p.data.size(), device=p.data.device, dtype=p.data.dtype
            )
            assert torch.equal(z, want)


def compare_triton(device: str) -> None:
    """Every Triton kernel against the CPU's bits, on ``device``; in the interpreter the device is
    the CPU."""
    from blockwalk.numerics.kernels import noise as noise_cuda

    def same(got: torch.Tensor, want: torch.Tensor) -> None:
        assert torch.equal(bits(got).cpu(), bits(want)), (
            kind,
            source_dtype,
            out_dtype,
            rounding,
            start,
        )

    for kind in KINDS:
        n = {"gaussian": 2100, "rademacher": 4150}[kind]  # two programs
        start = 2**33 + 77  # neither on a counter's border nor within 32 bits
        for source_dtype in FLOATS:
            for out_dtype in FLOATS:
                for rounding in (None, ROUNDING):
                    source = awkward(n, source_dtype)
                    on_device = source.to(device, copy=True)
                    out = torch.empty(n, dtype=out_dtype, device=device)
                    want = perturbed(
                        source, out.cpu().clone(), KEY, start, 1e-3, kind, rounding=rounding
                    )
                    write = Write(
                        on_device, out, KEY, start, 1e-3, kind, rounding, Window(1, n, 0), None
                    )
                    same(noise_cuda.write(write), want)
        start = 512
        out = noise_cuda.write(
            Write(
                None,
                torch.empty(n, device=device),
                KEY,
                start,
                1.0,
                kind,
                None,
                Window(1, n, 0),
                None,
            )
        )
        same(out, fill_(torch.empty(n), KEY, start, kind))
        start = 20
        whole = fill_(torch.empty(40, 300), KEY, 0, kind)
        columns = torch.empty(40, 60, device=device)[:, :50]
        noise_cuda.write(
            Write(None, columns, KEY, start, 1.0, kind, None, Window(40, 50, 300), None)
        )
        same(columns.contiguous(), whole[:, 20:70].contiguous())
        tokens = torch.tensor([5, 0, 39])
        out = torch.empty(3, 300, device=device)
        noise_cuda.write(
            Write(None, out, KEY, 0, 1.0, kind, None, Window(3, 300, 300), tokens.to(device))
        )
        same(out, whole[tokens])
    for dtype in (torch.bfloat16, torch.float16):
        x = awkward(n, torch.float32)
        want = stochastic_round(x, torch.empty(n, dtype=dtype), ROUNDING, 3)
        out = torch.empty(n, dtype=dtype, device=device)
        noise_cuda.write(
            Write(x.to(device), out, None, 3, 0.0, None, ROUNDING, Window(1, n, 0), None)
        )
        same(out, want)
    for dtype in (torch.int32, torch.uint16):
        want = random_uint16(KEY, 9, torch.empty(n, dtype=dtype))
        assert (
            noise_cuda.random_uint16(KEY, 9, torch.empty(n, dtype=dtype, device=device)).tolist()
            == want.tolist()
        )


def test_triton_kernels_in_the_interpreter() -> None:
    """Oracle: the CPU's bits. The interpreter must be chosen before triton is imported, hence the
    process."""
    pytest.importorskip("triton", reason="triton is not installed")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_noise as t;"
        " t.compare_triton('cpu')"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_triton_kernels_on_a_gpu() -> None:
    """Oracle: the CPU's bits."""
    compare_triton("cuda")
    weight = torch.randn(3000)
    on_gpu = weight.cuda()
    assert torch.equal(
        perturbed(on_gpu, on_gpu, KEY, 5, 1e-3).cpu(), perturbed(weight, weight, KEY, 5, 1e-3)
    )

"""The words, the values and the rounding of ``noise.py`` in numpy: their definition, and what a CPU
without a compiler runs.

**Words.** Philox 4x64-10 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC'11)
turns a 128-bit key and a counter (c, 0, 0, 0) into four 64-bit words.

**Gaussian.** A draw is 16 bits, lowest bits of the first word first: 16 draws a counter. Bit 15 is
the sign; the others, m, stand for the quantile p = (2m + 1) / 2^17 < 1/2, and z = ±Φ⁻¹(p) out of a
table of 2^16 values. The table is not made by a library's logarithm (these differ between builds)
but by 32 cubics, two for each power of two of 2m + 1, in float32 with every product and sum rounded
by itself, so that a processor may as well evaluate them in registers, where the table would miss
the cache, and get the same bits. Each cubic goes through −Φ⁻¹ at the two borders and the two inner
Chebyshev extrema of its segment; all are scaled by 1.0000128587 so that the variance is 1. The
distribution beside a normal one, by exact summation over the table:

    mean 0, variance 1 + 1.0e-9, kurtosis 2.99926 (3 for a normal), E z^6 14.973 (15)
    65,536 distinct values, |z| from 1.9e-5 to 4.32497, each within 6.3e-5 of the quantile
    no tail beyond 4.325, where a normal has one draw in 65,000

**Rademacher.** One bit a sign, 256 signs a counter: bit 0 is +1, bit 1 is −1.

**Stochastic rounding** to 16 bits rounds the magnitude up where its remainder, in units of 2^-16 of
the last place kept (truncated), plus the element's 16-bit draw reaches 2^16.

The functions take a key as its two words, ranges in elements of the flattened parameter, and answer
fresh arrays."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Draws = npt.NDArray[np.uint16]
"""Draws of 16 bits."""

KIND_NUMBERS = {None: 0, "gaussian": 1, "rademacher": 2}
"""The kernels' number of each kind of noise; None is rounding without noise."""

DRAWS = {"gaussian": 16, "rademacher": 256}
"""Draws that one counter gives."""

_CUBICS = (
    (4.32497454, -0.219844252, 0.0969625264, -0.0365045741),
    (4.23473024, -0.149672493, 0.0455637872, -0.0132948104),
    (4.1696229, -0.227300256, 0.0999395847, -0.0375902094),
    (4.07625914, -0.154948533, 0.0470086969, -0.0137015982),
    (4.00882435, -0.235546649, 0.103197306, -0.0387747809),
    (3.91200328, -0.160806954, 0.0485943258, -0.0141465282),
    (3.84197998, -0.244731173, 0.106781162, -0.040073745),
    (3.74130058, -0.167361408, 0.0503442138, -0.0146357324),
    (3.66837645, -0.255042881, 0.110747188, -0.0415060446),
    (3.56335354, -0.174758807, 0.0522875413, -0.0151767572),
    (3.487149, -0.266728044, 0.115165196, -0.0430951044),
    (3.3771894, -0.183192864, 0.0544608831, -0.0157789923),
    (3.29723573, -0.280114442, 0.120123133, -0.044870235),
    (3.18160057, -0.192924947, 0.056910567, -0.0164542459),
    (3.09730887, -0.295649141, 0.125732884, -0.0468684994),
    (2.97505903, -0.204317465, 0.0596958362, -0.0172175374),
    (2.88567209, -0.313960105, 0.132137999, -0.0491373129),
    (2.75558424, -0.217889667, 0.0628928766, -0.0180881787),
    (2.66010165, -0.335961133, 0.139523074, -0.0517379344),
    (2.52053452, -0.234415844, 0.06659922, -0.019091228),
    (2.41759014, -0.363041937, 0.14812234, -0.0547501333),
    (2.26625586, -0.255110085, 0.0709356591, -0.0202594008),
    (2.15390229, -0.397436053, 0.158215433, -0.0582782626),
    (1.98745346, -0.282003045, 0.0760334432, -0.0216356348),
    (1.86275578, -0.443004042, 0.170060232, -0.0624606498),
    (1.67596126, -0.318799168, 0.0819536224, -0.023278594),
    (1.53414023, -0.507117391, 0.183537498, -0.0675048232),
    (1.31802785, -0.373142332, 0.088279441, -0.0252988823),
    (1.15036416, -0.606060445, 0.196314156, -0.0740361437),
    (0.887157977, -0.464118868, 0.0917612389, -0.0283233244),
    (0.674498439, -0.785487294, 0.192060754, -0.0890120193),
    (0.318643451, -0.659072876, 0.0661848933, -0.0452260002),
)
"""−Φ⁻¹ on [2^e (1 + b/2), 2^e (3 + b)/2) / 2^17, row 2e + b: c0 + c1·t + c2·t² + c3·t³, t = the
position over 2^e. Two lines are an octave."""


PhiloxKey = tuple[int, int]
"""The two 64-bit words of a key, first word first."""


def words(key: PhiloxKey, counter: int, counters: int) -> npt.NDArray[np.uint64]:
    """Return the words of consecutive counters, uint64 [4·counters]."""
    # numpy adds one to the counter before it uses it, modulo 2^256.
    generator = np.random.Philox(counter=(counter - 1) % 2**256, key=key[0] | key[1] << 64)
    return generator.random_raw(4 * counters)


def draws(key: PhiloxKey, start: int, count: int) -> Draws:
    """Return the 16-bit draws start … start + count − 1."""
    assert sys.byteorder == "little", "draws are read from words in memory order"
    counter = start // 16
    counters = -(-(start + count) // 16) - counter
    return words(key, counter, counters).view(np.uint16)[start - 16 * counter :][:count]


def gaussian(key: PhiloxKey, start: int, count: int) -> Floats:
    """Return z of elements start … start + count − 1."""
    return gaussian_table().take(draws(key, start, count))


def rademacher(key: PhiloxKey, start: int, count: int) -> Floats:
    """Return signs of elements start … start + count − 1, as ±1."""
    counter = start // 256
    octets = words(key, counter, -(-(start + count) // 256) - counter).view(np.uint8)
    bits = np.unpackbits(octets, bitorder="little")[start - 256 * counter :][:count]
    return np.float32(1) - np.float32(2) * bits.astype(np.float32)


def round_bfloat16(x: Floats, draw: Draws) -> Any:
    """Return patterns (uint16) of ``x`` rounded stochastically to bfloat16."""
    bits = x.view(np.uint32)
    rounded = ((bits + draw) >> np.uint32(16)).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)


def round_float16(x: Floats, draw: Draws) -> Any:
    """Return patterns (uint16) of ``x`` rounded stochastically to float16, subnormal results
    included."""
    bits = x.view(np.uint32)
    magnitude = (bits & 0x7FFFFFFF).astype(np.int64)
    # A normal result drops 13 bits of the whole pattern, a subnormal one `shift` bits of the
    # significand.
    normal = magnitude >= 0x38800000
    shift = np.where(normal, 13, np.minimum(126 - (magnitude >> 23), 40))
    significand = np.where(normal, magnitude - 0x38000000, magnitude & 0x7FFFFF | 0x800000)
    remainder = (significand & ((1 << shift) - 1)) << 16 >> shift
    result = (significand >> shift) + ((remainder + draw) >> 16)
    result = np.where(magnitude >= 0x47800000, 0x7C00, result)
    result = np.where(magnitude > 0x7F800000, 0x7E00, result)
    return (result | (bits >> 16 & 0x8000)).astype(np.uint16)


@functools.cache
def cubic_coefficients() -> Floats:
    """Return the cubics as kernels read them, float32 [4, 32]: coefficient; low five bits of (float
    pattern of 2m + 1) >> 22."""
    return np.ascontiguousarray(np.roll(np.array(_CUBICS, dtype=np.float32), -2, axis=0).T)


@functools.cache
def gaussian_table() -> Floats:
    """Return z for each 16-bit draw, float32 [65536]."""
    pattern = (2 * np.arange(1 << 15) + 1).astype(np.float32).view(np.uint32)
    t = (pattern & 0x3FFFFF | 0x3F800000).view(np.float32) - np.float32(1)
    c0, c1, c2, c3 = cubic_coefficients()[:, pattern >> 22 & 31]
    half = ((c3 * t + c2) * t + c1) * t + c0
    return np.concatenate([half, -half])

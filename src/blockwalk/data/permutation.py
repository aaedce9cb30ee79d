"""Permutations of numbers without a list of them: a Feistel network, walked along its cycles.

A network of :data:`ROUNDS` rounds permutes the numbers of an even count of bits (Luby and Rackoff,
"How to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988). A number that comes
out beyond the count goes in again (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002, section 3): fewer than four times on average, since the bits are the fewest that do."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 6
"""Rounds of the network: four make it hard to tell from chance, and two more mix a weaker round
function as well."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Numbers = npt.NDArray[np.int64]


def permuted(numbers: Numbers, count: int, key: str) -> Numbers:
    """Return the images of numbers below ``count``, [n], under the permutation of a key.

    It rests on products and shifts of 64-bit integers alone, which are the same everywhere."""
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    images = _network(numbers.astype(np.uint64), half, round_keys)
    while len(beyond := np.flatnonzero(images >= count)):
        images[beyond] = _network(images[beyond], half, round_keys)
    return images.astype(np.int64)


def _network(
    numbers: npt.NDArray[np.uint64], half: np.uint64, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Return numbers of 2 × ``half`` bits after all rounds."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    upper = numbers >> half
    lower = numbers & mask
    for round_key in round_keys:
        mixed = (lower ^ round_key) * _MULTIPLIER
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MULTIPLIER
        exchanged = upper ^ (mixed >> np.uint64(32) & mask)
        upper = lower
        lower = exchanged
    return upper << half | lower

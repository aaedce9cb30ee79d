"""The kernels of ``noise.py`` as operators of torch, ``torch.ops.blockwalk``: what other devices than a CPU call.

CUDA has them as Triton kernels. A device whose backend queues a CPU's operators (as the tests' simulated one) has them as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import library

from blockwalk.numerics.noise import cpu
from blockwalk.numerics.noise.key import NoiseKey, NoiseKind, Write, window

LIBRARY: Any = library.Library("blockwalk", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "noise_(Tensor(a!) out, Tensor? source, Tensor? rows, int[] key, int[] rounding, int start, int? pitch, float scale,"
    " str? kind) -> ()"
)
LIBRARY.define("draws_(Tensor(a!) out, int[] key, int start) -> ()")


class Words(NamedTuple):
    """A key that is hashed already: what kernels take of a :class:`NoiseKey`."""

    k0: int
    k1: int

    def philox_key(self) -> tuple[int, int]:
        return self


def sent(key: NoiseKey | None) -> list[int]:
    """A key as an operator's argument: its words as signed integers; none for no key."""
    return [] if key is None else [(word + 2**63) % 2**64 - 2**63 for word in key.philox_key()]


def _received(words: list[int]) -> Words | None:
    return Words(*(word % 2**64 for word in words)) if words else None


def _kernels(out: torch.Tensor) -> Any:
    if not out.is_cuda:
        return cpu
    from blockwalk.numerics.noise import cuda

    return cuda


def _noise(
    out: torch.Tensor,
    source: torch.Tensor | None,
    rows: torch.Tensor | None,
    key: list[int],
    rounding: list[int],
    start: int,
    pitch: int | None,
    scale: float,
    kind: NoiseKind | None,
) -> None:
    place = window(out if source is None else source, out, pitch, rows)
    _kernels(out).write(Write(source, out, _received(key), start, scale, kind, _received(rounding), place, rows))


def _draws(out: torch.Tensor, key: list[int], start: int) -> None:
    words = _received(key)
    assert words is not None
    _kernels(out).random_uint16(words, start, out)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("noise_", _noise, _device)
    LIBRARY.impl("draws_", _draws, _device)

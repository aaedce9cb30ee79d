"""Our kernels as operators of torch, ``torch.ops.blockwalk``: what other devices than a CPU call, and what they queue.

CUDA and XPU have them as Triton's kernels (:mod:`blockwalk.numerics.kernels`). A device whose backend queues a CPU's operators
(as the tests' simulated one) has the CPU's. Keys come as their two words, signed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import library

from blockwalk.numerics.noise.key import Key

LIBRARY: Any = library.Library("blockwalk", "DEF")  # type: ignore[no-untyped-call]
WITH_KERNELS = ("CUDA", "XPU")
"""torch's names of the devices that Triton compiles for."""


class Words(NamedTuple):
    """A key that is hashed already: what kernels take of a :class:`NoiseKey`."""

    k0: int
    k1: int

    def philox_key(self) -> tuple[int, int]:
        return self


def sent(key: Key | None) -> list[int]:
    """A key as an operator's argument: its words as signed integers; none for no key."""
    return [] if key is None else [(word + 2**63) % 2**64 - 2**63 for word in key.philox_key()]


def received(words: Sequence[int]) -> Words | None:
    """The key that :func:`sent` sent."""
    return Words(*(word % 2**64 for word in words)) if words else None


def register(name: str, arguments: str, function: Callable[..., None]) -> None:
    """Make an operator that writes to its first arguments. ``function`` gets the kernels before them, or None on a CPU."""

    def on_accelerator(*given: Any) -> None:
        from blockwalk.numerics import kernels

        function(kernels.loaded(), *given)

    LIBRARY.define(f"{name}({arguments}) -> ()")
    LIBRARY.impl(name, lambda *given: function(None, *given), "CPU")
    for device in WITH_KERNELS:
        LIBRARY.impl(name, on_accelerator, device)

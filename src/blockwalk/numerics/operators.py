"""Our kernels as operators of torch, ``torch.ops.blockwalk``: what other devices than a CPU call,
and what they queue.

CUDA and XPU have them as Triton's kernels (:mod:`blockwalk.numerics.kernels`). A device whose
backend queues a CPU's operators (as the tests' simulated one) has the CPU's. Keys come as their two
words, signed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import library

from blockwalk.numerics.noise.key import Key, NoiseKind, signed

LIBRARY: Any = library.Library("blockwalk", "DEF")  # type: ignore[no-untyped-call]
WITH_KERNELS = ("CUDA", "XPU")
"""torch's names of the devices that Triton compiles for."""


class Words(NamedTuple):
    """A key that is hashed already: what kernels take of a :class:`NoiseKey`."""

    k0: int
    k1: int

    @property
    def signed(self) -> tuple[int, int]:
        return signed(self.k0), signed(self.k1)

    def philox_key(self) -> tuple[int, int]:
        return self


def sent(key: Key | None) -> list[int]:
    """Return a key as an operator's argument: its words as signed integers; none for no key."""
    return [] if key is None else [*key.signed]


def received(words: Sequence[int]) -> Words | None:
    """Return the key that :func:`sent` sent."""
    return Words(*(word % 2**64 for word in words)) if words else None


def register(name: str, function: Callable[..., None], *changed: str) -> None:
    """Make an operator of a function that gets the kernels, or None on a CPU, before the operator's
    own arguments. The operator's schema is the function's signature.

    Args:
        changed: the arguments that it writes to.
    """

    def on_cpu(*arguments: Any) -> None:
        function(None, *arguments)

    def on_accelerator(*arguments: Any) -> None:
        from blockwalk.numerics import kernels

        compiled = kernels.loaded()
        try:
            function(compiled, *arguments)
        except Exception as error:
            if sentence := kernels.missing(error):
                raise RuntimeError(sentence) from error
            raise

    typed = inspect.signature(partial(function, None), eval_str=True)
    words = {NoiseKind: str, NoiseKind | None: str | None}
    parameters = [
        parameter.replace(annotation=words.get(parameter.annotation, parameter.annotation))
        for parameter in typed.parameters.values()
    ]
    on_cpu.__signature__ = typed.replace(parameters=parameters)  # type: ignore[attr-defined]
    schema = library.infer_schema(on_cpu, mutates_args=changed)
    LIBRARY.define(name + schema.replace("SymInt", "int"))
    LIBRARY.impl(name, on_cpu, "CPU")
    for device in WITH_KERNELS:
        LIBRARY.impl(name, on_accelerator, device)

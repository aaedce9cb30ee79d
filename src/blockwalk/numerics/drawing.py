"""Random numbers of a generator that nobody else draws from.

torch's own generators belong to the process: a thread that draws between a block's forward and its
recomputation changes the masks of one of them. Here operators that name no generator draw from one
that the caller hands in, with the bits that torch's own gives under the same seed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GLOBAL_DRAWS = threading.RLock()
"""Held while torch's own generators are seeded for a unit and put back: one walker at a time."""


@contextmanager
def own_draws() -> Iterator[None]:
    """Leave torch's own generator as it was when the context ends, whatever draws within."""
    with GLOBAL_DRAWS, torch.random.fork_rng(devices=[]):
        yield


class DrawingFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The context in which this thread's operators on a processor draw from ``generator``.

    It is a mode of torch's, so that other threads keep their numbers, and torch's own generator is
    neither read nor moved."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            torch.Tag.nondeterministic_seeded not in func.tags
            or kwargs.get("generator") is not None
        ):
            return func(*args, **kwargs)
        seeded = _with_generator(func)
        if seeded is not None:
            return seeded(*args, **{**kwargs, "generator": self.generator})
        if not _drops(func, args, kwargs):
            return func(*args, **kwargs)
        return _lent(self.generator, lambda: func(*args, **kwargs), str(func))


@cache
def _with_generator(func: Any) -> Any:
    """Return the overload of an operator that takes a generator: itself, or the one whose other
    arguments are the same; None where there is none."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func.overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = [argument.name for argument in candidate._schema.arguments]
        if "generator" in arguments and [a for a in arguments if a != "generator"] == names:
            return candidate
    return None


def _drops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws in this call: attention draws only with dropout."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            default = kwargs.get("dropout_p", argument.default_value)
            return bool(args[place] if place < len(args) else default)
    return True


def _lent(generator: torch.Generator, call: Callable[[], Any], name: str) -> Any:
    """Return what an operator that takes no generator draws while torch's own stands where
    ``generator`` does.

    Raises:
        RuntimeError: another thread drew meanwhile.
    """
    default = torch.default_generator
    with GLOBAL_DRAWS:
        former = default.get_state()
        begin = generator.get_state()
        try:
            ends = []
            # a draw of another thread's moves one of two ends
            for _ in range(2):
                default.set_state(begin)
                answer = call()
                ends.append(default.get_state())
        finally:
            default.set_state(former)
    if not torch.equal(*ends):
        raise RuntimeError(
            f"another thread drew from torch's generator while {name} drew for a block, whose"
            " recomputation would draw other numbers: let that thread draw from a torch.Generator"
            " of its own, or set dropout to 0"
        )
    generator.set_state(ends[0])
    return answer

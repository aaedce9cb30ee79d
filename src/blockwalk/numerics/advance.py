"""Pending zeroth-order entries applied to whole tensors as operators: many tensors in one launch of
an accelerator's kernel.

The arithmetic is that of zeroth-order updates by a rule that is a sum of the queries' noise: of
each entry in turn θ ← θ·decay, then θ ← θ + factor·z for each query, then rounded as the tensor's
tier keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blockwalk.numerics.codecs.layout import Layout
from blockwalk.numerics.codecs.matrix_codec import Rounding, matrix_codec
from blockwalk.numerics.noise import cpu
from blockwalk.numerics.noise.key import NoiseKind, Window, Write
from blockwalk.numerics.operators import Words, register
from blockwalk.plan.placement import Codec


def _advance(
    kernels: Any,
    masters: list[Tensor],
    outs: list[Tensor],
    starts: list[int],
    words: list[int],
    factors: list[float],
    entries: int,
    queries: int,
    rounding: bool,
    kind: NoiseKind,
) -> None:
    assert not (entries and outs), "entries change the masters, or a perturbation goes into others"
    if kernels:
        kernels.updates.advance(
            masters, outs, starts, words, factors, entries, queries, rounding, kind
        )
        return
    if cpu.has_runs() and (outs or in_one_pass(queries)):
        pairs = list(zip(words[::2], words[1::2], strict=True))
        numbers_of = zip(pairs, factors, strict=True)
        runs: list[cpu.Run] = []
        for n, (master, start) in enumerate(zip(masters, starts, strict=True)):
            if outs:
                runs.append(cpu.Run(master, outs[n], start, *next(numbers_of)))
            for _ in range(entries):
                draws, decay = next(numbers_of)
                rounded = draws if rounding and master.dtype != torch.float32 else None
                runs.append(cpu.Run(master, master, start, *next(numbers_of), decay, rounded))
        cpu.write_runs(runs, kind)
        return
    numbers = zip(_pairs(words), factors, strict=True)
    for n, (master, start) in enumerate(zip(masters, starts, strict=True)):
        place = Window(1, master.numel(), 0)
        flat = master.view(-1)
        for _ in range(entries):
            x, key = _entry_(flat.float(), start, numbers, queries, kind)
            cpu.write(
                Write(x, flat, None, start, 0.0, None, key if rounding else None, place, None)
            )
        if outs:
            key, scale = next(numbers)
            cpu.write(Write(flat, outs[n].view(-1), key, start, scale, kind, None, place, None))


def _advance_rows(
    kernels: Any,
    scales: Tensor,
    codes: Tensor,
    codec: str,
    origin: int,
    words: list[int],
    factors: list[float],
    entries: int,
    queries: int,
    rounding: bool,
    kind: NoiseKind,
) -> None:
    if kernels:
        kernels.updates.advance_rows(
            scales, codes, origin, words, factors, entries, queries, rounding, kind
        )
        return
    numbers = zip(_pairs(words), factors, strict=True)
    layout = Layout(tuple(codes.shape), Codec(codec))
    encode = matrix_codec(Codec(codec)).encode
    assert encode is not None
    for _ in range(entries):
        x, key = _entry_(codes.float() * scales, origin, numbers, queries, kind)
        encode(x, scales, codes, layout, Rounding(key, origin) if rounding else None)


def in_one_pass(queries: int) -> bool:
    """Return whether an entry changes a tensor in one pass over it: that of one query does. A sum
    over several queries in 16 bits is made in float32, and rounded once."""
    return queries == 1


def _pairs(words: Sequence[int]) -> list[Words]:
    return [Words(a % 2**64, b % 2**64) for a, b in zip(words[::2], words[1::2], strict=True)]


def _entry_(
    x: Tensor, start: int, numbers: Iterator[tuple[Words, float]], queries: int, kind: NoiseKind
) -> tuple[Tensor, Words]:
    """Return ``x`` (float32, in place) after the next entry of ``numbers``, and the key of its
    rounding."""
    rounding, decay = next(numbers)
    x.mul_(decay)
    for _ in range(queries):
        key, factor = next(numbers)
        cpu.write(
            Write(
                x.view(-1),
                x.view(-1),
                key,
                start,
                factor,
                kind,
                None,
                Window(1, x.numel(), 0),
                None,
            )
        )
    return x, rounding


register("advance_", _advance, "masters", "outs")
register("advance_rows_", _advance_rows, "scales", "codes")

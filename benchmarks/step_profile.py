"""One training step of a walker, block by block: seconds, the part of them that decodes weights,
and the peak of memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from blockwalk.numerics.codecs.weights import EncodedWeight
from blockwalk.report.html import Series, chart, standalone
from blockwalk.system.process_memory import process_bytes

KINDS = "FORWARD", "BACKWARD"
Span = tuple[float, float]


@dataclass(frozen=True)
class Part:
    """One op of the compute lane."""

    kind: str
    unit: int
    seconds: float
    decoding: float
    """Seconds of them in which 4-bit weights were decoded."""
    peak_MB: float
    """Of the whole process: what the kernel cannot drop, sampled every millisecond and at the
    end."""


def step_profile(walker: Any, batch: Any) -> list[Part]:
    """The ops of one step that compute, in their order."""
    walker.timeline = []
    with _decoding() as decoded, _sampled() as samples:
        walker.step(batch)
    timeline = walker.timeline
    walker.timeline = None
    parts = []
    for op, began, ended in (each for _, ops in timeline for each in ops):
        if op.kind not in ("PROLOGUE", "FORWARD", "LOSS", "BACKWARD"):
            continue
        within = [bytes_ for at, bytes_ in samples if began <= at <= ended]
        spent = sum(
            min(last, ended) - max(first, began)
            for first, last in decoded
            if first < ended and last > began
        )
        parts.append(
            Part(str(op.kind), op.unit, ended - began, spent, max(within, default=0) / 1e6)
        )
    return parts


def in_words(parts: Sequence[Part]) -> Iterator[str]:
    """MeBP's table 2, the share of decoding, and the range of its figure 2, for forwards and for
    backwards."""
    for kind in KINDS:
        own = [part for part in parts if part.kind == kind]
        seconds = [1e3 * part.seconds for part in own]
        peaks = [part.peak_MB for part in own]
        decoding = sum(part.decoding for part in own) / sum(part.seconds for part in own)
        yield (
            f"{kind.lower()} of a block: {median(seconds):.0f} ms ({min(seconds):.0f} to"
            f" {max(seconds):.0f}), decoding"
            f" {100 * decoding:.0f}%, peak {min(peaks):.0f} to {max(peaks):.0f} MB"
        )


def picture(title: str, value: str, parts: Sequence[Part]) -> str:
    """Its figure 2: one value of each block, forward and backward, as an SVG."""
    lines = [
        Series(
            kind.lower(),
            tuple(
                sorted((float(p.unit), float(getattr(p, value))) for p in parts if p.kind == kind)
            ),
        )
        for kind in KINDS
    ]
    return standalone(chart(title, lines)).replace(">step 1<", ">block 1<")


@contextmanager
def _decoding() -> Iterator[list[Span]]:
    """The calls of the decoder on this thread, when each began and ended; calls that one of them
    makes are part of it."""
    spans: list[Span] = []
    inside = threading.local()
    originals = {name: getattr(EncodedWeight, name) for name in ("rows", "columns", "gather")}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if getattr(inside, "call", False):
                return function(*args)
            inside.call = True
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                spans.append((began, time.perf_counter()))
                inside.call = False

        return call

    for name, function in originals.items():
        setattr(EncodedWeight, name, timed(function))
    try:
        yield spans
    finally:
        for name, function in originals.items():
            setattr(EncodedWeight, name, function)


@contextmanager
def _sampled() -> Iterator[list[tuple[float, int]]]:
    """Moments and this process's memory at them."""
    samples: list[tuple[float, int]] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.001):
            samples.append((time.perf_counter(), process_bytes()))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()

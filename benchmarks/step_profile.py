"""One training step of a walker, block by block: seconds, the part of them that decodes weights,
and the peak of memory.

    python benchmarks/step_profile.py [--roofline] [--model Qwen2.5-0.5B | FOLDER] [--shape 1x256]

With ``--roofline`` the step is taken apart into products, attention, element-wise passes, decoding,
starts, Python and waiting, each beside what this processor can do at those shapes
(:mod:`benchmarks.roofline`). A folder holds a real model, read in int4a; a name is one of true
dimensions with random weights, in int4."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Bound, finish, parser, random_batch, random_store
from benchmarks.roofline import UNEXPLAINED, roofline
from benchmarks.roofline import in_words as roofline_in_words

from blockwalk.numerics.codecs.weights import EncodedWeight
from blockwalk.report.html import Series, chart, standalone
from blockwalk.system.process_memory import process_bytes

KINDS = "FORWARD", "BACKWARD"
WARM = 2
"""Steps before the one that is profiled."""
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


SHAPES = ("1x256", "4x512", "1x2048")


def opened(model: str) -> Any:
    """A walker with LoRA of rank 16, as `vs_peft.py` trains it."""
    from blockwalk import Walker, method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.placement import Codec

    is_folder = Path(model).is_dir()
    codec = Codec.INT4A if is_folder else Codec.INT4
    folder = Path(model) if is_folder else random_store(model, codec)
    plan = method("mebp", frozen=f"disk × {codec}")
    return Walker(folder, plan, lora=LoraSettings(rank=16), device="cpu")


def main() -> None:
    """Print the profile of each shape."""
    options = parser(__doc__)
    options.add_argument("--model", default="Qwen2.5-0.5B")
    options.add_argument("--shape", action="append", help=f"BxS; all of {', '.join(SHAPES)}")
    options.add_argument("--roofline", action="store_true")
    arguments = options.parse_args()
    figures: dict[str, Any] = {}
    bounds = []
    with opened(arguments.model) as walker:
        for shape in arguments.shape or SHAPES:
            batch, sequence = map(int, shape.split("x"))
            rows = random_batch(walker.spec.vocab_size, batch, sequence)
            for _ in range(WARM):
                walker.step(rows)
            print(f"\n{arguments.model}, {shape}\n")
            if not arguments.roofline:
                print("\n".join(in_words(step_profile(walker, rows))))
                continue
            found = roofline(walker, rows)
            print("\n".join(roofline_in_words(found)))
            figures[shape] = asdict(found)
            name = f"{shape}: share of the step that is not explained"
            bounds.append(Bound(name, found.unexplained, UNEXPLAINED))
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

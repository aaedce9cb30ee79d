"""Accuracy against forward passes and seconds: exact gradients beside zeroth order, on the project's own small model.

All parameters of ``examples/tiny-llama`` are trained in float32 on its sentiment task, every method on the same batches,
three seeds. A forward pass is counted on one batch: two for each pair of two-point SPSA, N + 1 for FZOO, 2q + 1 for HiZOO;
exact gradients count four (the forward, its recomputation, and a backward of twice a forward). The gap is between the
model as it came and the best that exact gradients reach.

    python benchmarks/zo_converge.py [--forwards 4000] [--seeds 0 1 2] [--plot FILE.svg] [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.common import Bound, finish, parser

from blockwalk import Plan, Walker, method
from blockwalk.config import DataSettings
from blockwalk.data.batching import Batches
from blockwalk.data.encode import Choices, encode_choices, load_tokenizer
from blockwalk.data.formats import read_records
from blockwalk.evaluation import HeldOut, template_of

ROOT = Path(__file__).resolve().parents[1]
DATA = DataSettings(
    train=str(ROOT / "examples/data/sentiment_train.jsonl"), eval=str(ROOT / "examples/data/sentiment_heldout.jsonl"),
    template="{text} It was {label}.", label_words=("terrible", "great"), max_length=128,
)  # fmt: skip
EXACT = "exact (mebp)"
SHARE = 0.5
"""Of the gap that exact gradients close, zeroth order must close at least this."""


@dataclass(frozen=True)
class Case:
    """One method, the forward passes of its steps, and the learning rate that suits it."""

    method: str
    forwards: int
    learning_rate: float
    settings: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """Of ``--forwards`` that it runs: exact gradients need fewer."""

    def plan(self, seed: int) -> Plan:
        """The plan, with everything in float32 and on the device: neither method is to begin from rounded weights."""
        optimizer = {"learning_rate": self.learning_rate, **self.settings.get("optimizer", {})}
        zo = {"zo": self.settings["zo"]} if "zo" in self.settings else {}
        places = {"frozen": "device", "trainable": "device × fp32"}
        return method(self.method, optimizer=optimizer, compute_dtype="float32", seed=seed, **places, **zo)


CASES: dict[str, Case] = {
    EXACT: Case("mebp", 4, 1e-4, {"optimizer": {"name": "adamw"}}, share=0.25),
    "two-point": Case("mezo", 2, 1e-5, {"zo": {"epsilon": 1e-3}}),
    "q = 4": Case("mezo", 8, 4e-5, {"zo": {"epsilon": 1e-3, "queries": 4}}),
    "FZOO": Case("mezo", 9, 1e-4, {"zo": {"kind": "fzoo", "queries": 8, "epsilon": 1e-3, "noise": "rademacher"}}),
    "HiZOO": Case("mezo", 3, 1e-5, {"zo": {"kind": "hizoo", "epsilon": 1e-3, "hessian_alpha": 1e-8}}),
}


@dataclass(frozen=True)
class Curve:
    """Held-out accuracy of one run, against forward passes on one batch and against seconds of its steps."""

    forwards: list[int]
    seconds: list[float]
    accuracy: list[float]


def train(case: Case, seed: int, rows: Choices, held_out: HeldOut, arguments: argparse.Namespace) -> Curve:
    """One run, measured ``--points`` times at equal distances and before its first step."""
    batches = Batches(rows.answered(), arguments.batch, seed=seed, padding_multiple=8)
    curve = Curve([0], [0.0], [])
    budget = max(case.forwards, int(arguments.forwards * case.share))
    steps = budget // case.forwards
    marks = {max(1, round(steps * (i + 1) / arguments.points)) for i in range(arguments.points)}
    with Walker(ROOT / "examples/tiny-llama", case.plan(seed), device=arguments.device) as walker:
        curve.accuracy.append(_accuracy(held_out, walker))
        seconds = 0.0
        for step in range(1, steps + 1):
            seconds += walker.step(next(batches)).seconds
            if step in marks:
                curve.forwards.append(step * case.forwards)
                curve.seconds.append(seconds)
                curve.accuracy.append(_accuracy(held_out, walker))
    return curve


def _accuracy(held_out: HeldOut, walker: Walker) -> float:
    accuracy = held_out.evaluate(walker).accuracy
    assert accuracy is not None
    return accuracy


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    """Mean accuracy over the seeds against forward passes (logarithmic), as SVG: no library draws it."""
    width, height, left, top, across, down = 720, 420, 60, 20, 520, 340
    colours = ("#1b1b1b", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
    highest = max(curve.forwards[-1] for runs in curves.values() for curve in runs)
    lowest = min(curve.forwards[1] for runs in curves.values() for curve in runs)
    least = min(min(curve.accuracy) for runs in curves.values() for curve in runs)

    def x(forwards: int) -> float:
        from math import log

        return left + across * log(max(forwards, lowest) / lowest) / max(log(highest / lowest), 1e-9)

    def y(accuracy: float) -> float:
        return top + down * (1 - (accuracy - least) / max(1 - least, 1e-9))

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
             ' font-size="12"><rect width="100%" height="100%" fill="white"/>']  # fmt: skip
    for i in range(6):
        at = least + (1 - least) * i / 5
        parts.append(f'<line x1="{left}" x2="{left + across}" y1="{y(at):.1f}" y2="{y(at):.1f}" stroke="#ddd"/>'
                     f'<text x="{left - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{100 * at:.0f}%</text>')  # fmt: skip
    for power in range(1, 8):
        if lowest <= 10**power <= highest:
            parts.append(
                f'<text x="{x(10**power):.1f}" y="{top + down + 18}" text-anchor="middle">{10**power:,}</text>'
            )
    for number, (name, runs) in enumerate(curves.items()):
        colour = colours[number % len(colours)]
        means = [statistics.fmean(values) for values in zip(*(curve.accuracy for curve in runs), strict=True)]
        points = " ".join(f"{x(f):.1f},{y(a):.1f}" for f, a in zip(runs[0].forwards, means, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
                     f'<text x="{left + across + 12}" y="{top + 16 + 18 * number}" fill="{colour}">{name}</text>')  # fmt: skip
    parts.append(
        f'<text x="{left + across / 2}" y="{height - 16}" text-anchor="middle">forward passes on one batch</text></svg>'
    )
    path.write_text("\n".join(parts) + "\n")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--forwards", type=int, default=20_000, help="forward passes of each zeroth-order run")
    options.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--points", type=int, default=20)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--held-out", type=int, default=0, help="held-out records that are looked at; 0: all")
    options.add_argument("--device", default="cpu")
    options.add_argument("--plot", type=Path, help="write the curves here as SVG")
    arguments = options.parse_args()
    if not (ROOT / "examples/tiny-llama").exists():
        raise SystemExit("examples/tiny-llama is not there; make it with: python examples/build_tiny.py")
    tokenizer = load_tokenizer(ROOT / "examples/tiny-llama")
    template = template_of(DATA)
    assert template is not None
    rows = encode_choices(read_records(DATA.train), tokenizer, template, max_length=DATA.max_length)
    records = list(read_records(DATA.eval))[: arguments.held_out or None]
    held_out = HeldOut(encode_choices(records, tokenizer, template, max_length=DATA.max_length), 64, 8)

    curves: dict[str, list[Curve]] = {}
    print(
        f"{'method':<13} {'forwards':>9} {'seconds':>8} {'accuracy at the end, by seed':<30} {'best mean':>9} {'of gap':>10}"
    )
    bounds: list[Bound] = []
    closed: dict[str, float] = {}
    for name in arguments.case:
        began = time.perf_counter()
        curves[name] = [train(CASES[name], seed, rows, held_out, arguments) for seed in arguments.seeds]
        runs = curves[name]
        best = max(statistics.fmean(values) for values in zip(*(curve.accuracy for curve in runs), strict=True))
        closed[name] = best - runs[0].accuracy[0]
        share = closed[name] / closed[EXACT] if closed.get(EXACT) else float("nan")
        ends = "  ".join(f"{100 * curve.accuracy[-1]:.1f}%" for curve in runs)
        print(f"{name:<13} {runs[0].forwards[-1]:>9} {statistics.fmean(c.seconds[-1] for c in runs):>8.1f} {ends:<30}"
              f" {100 * best:>8.1f}% {share:>10.2f}   ({time.perf_counter() - began:.0f} s)", flush=True)  # fmt: skip
        if name != EXACT and EXACT in curves:
            bounds.append(Bound(f"{name}: share of the gap that exact gradients close", share, SHARE, at_most=False))
    if arguments.plot:
        plot(curves, arguments.plot)
    finish(arguments, {name: [vars(curve) for curve in runs] for name, runs in curves.items()}, bounds)


if __name__ == "__main__":
    torch.set_num_threads(max(1, min(4, torch.get_num_threads())))
    main()

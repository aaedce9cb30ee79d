"""Two figures of the papers, by programs and the simulator: FCDP's figure 10, the load of the link
between nodes over a step, and ZO2's figure 3, memory by model size and method. SVG by hand.

    python benchmarks/paper_pictures.py"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fcdp import Case
from benchmarks.published import CONTEXT_MB
from benchmarks.zeroth_order_runs import OPT, compiled, opt, zo2_plans

from blockwalk.plan.methods import method
from blockwalk.plan.plan import Plan
from blockwalk.program.program import Lane, Pool, Shape
from blockwalk.simulate.simulator import Simulation

RESULTS = Path(__file__).with_name("results")
COLOURS = ("#d55e00", "#cc79a7", "#0072b2", "#009e73")
WIDTH = 640
HEIGHT = 340
LEFT = 60
TOP = 24
ACROSS = 440
DOWN = 250

# ---- FCDP's figure 10: the link between nodes ----------------------------------------------------

SYSTEMS = {"zero3": "ZeRO-3", "fcdp_sched": "FCDP"}
LINK = "ipoib"
BILLIONS = 10
BINS = 60

BETWEEN_NODES = (Lane.INTER, Lane.INTER_SUMS)


def load(simulation: Simulation, end: float, bins: int = BINS) -> list[float]:
    """Return bytes a second that a node sends to others, in equal parts of the time to ``end``."""
    width = end / bins
    moved = [0.0] * bins
    for span in simulation.spans:
        if span.op.lane not in BETWEEN_NODES or not span.op.nbytes:
            continue
        rate = span.op.nbytes / span.seconds
        for number in range(bins):
            began = max(span.began, number * width)
            ended = min(span.ended, (number + 1) * width)
            moved[number] += rate * max(ended - began, 0.0)
    return [nbytes / width for nbytes in moved]


def link_figure() -> str:
    """Return figure 10: the load of a node's link in a step of full fine-tuning."""
    steps = {words: Case(system, BILLIONS).simulation(LINK) for system, words in SYSTEMS.items()}
    end = max(span.ended for step in steps.values() for span in step.spans)
    curves = {words: [rate / 1e9 for rate in load(step, end)] for words, step in steps.items()}
    for words, step in steps.items():
        sent = sum(span.op.nbytes for span in step.spans if span.op.lane in BETWEEN_NODES)
        print(f"{words}: {sent / 1e9:.1f} GB between nodes in {step.seconds:.1f} s")
    highest = max(max(curve) for curve in curves.values()) * 1.1
    points = {
        words: [((number + 0.5) / BINS, rate / highest) for number, rate in enumerate(curve)]
        for words, curve in curves.items()
    }
    across = [(second / end, f"{second}") for second in range(0, int(end) + 1, nice(end))]
    upwards = [(quarter / 4, f"{highest * quarter / 4:.1f}") for quarter in range(5)]
    title = "GB/s that a node sends to the other, GPT-10B on 2 × 8 A40, IP on InfiniBand"
    return picture(points, across, upwards, title, "seconds of a step (simulated)")


def nice(end: float) -> int:
    """Return a step of the axis that has at most eight ticks."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100) if end / step <= 8)


# ---- ZO2's figure 3: memory by size --------------------------------------------------------------

DTYPE = "float16"
"""The checkpoint's dtype. First-order methods compute in bfloat16, beside gradients and moments of
four bytes."""


def plans() -> dict[str, Plan]:
    """Return the methods of the figure: first-order ones hold the whole model, and keep every
    activation."""
    zeroth = zo2_plans(DTYPE)
    first = {
        name: method("plain", recompute="none", optimizer={"name": rule})
        for name, rule in (("AdamW", "adamw"), ("SGD", "sgd"))
    }
    return first | {"MeZO": zeroth["mezo"], "ZO2": zeroth["zo2"]}


def memory() -> dict[str, list[float]]:
    """Return GB of a device by method, a figure for each size of OPT: a program's peak, and a
    context."""
    shape = Shape(1, 2048)
    figures = {}
    for name, plan in plans().items():
        figures[name] = [
            (compiled(opt(size, DTYPE), plan, shape).peaks()[Pool.DEVICE] / 1e6 + CONTEXT_MB) / 1e3
            for size in OPT
        ]
    return figures


def memory_figure() -> str:
    """Return figure 3: memory of four methods by size, on a logarithmic axis."""
    figures = memory()
    for name, gigabytes in figures.items():
        sizes = zip(OPT, gigabytes, strict=True)
        print(name, ", ".join(f"{size} {value:.1f}" for size, value in sizes), "GB")
    low = 0.0
    high = log10(max(max(values) for values in figures.values())) + 0.1
    last = len(OPT) - 1
    points = {
        name: [
            (number / last, (log10(value) - low) / (high - low))
            for number, value in enumerate(values)
        ]
        for name, values in figures.items()
    }
    across = [(number / last, size) for number, size in enumerate(OPT)]
    upwards = [((log10(value) - low) / (high - low), f"{value:,}") for value in (1, 10, 80, 1000)]
    title = "GB of device memory, OPT in float16, 1 × 2048 tokens; an A100 has 80"
    return picture(points, across, upwards, title, "parameters (simulated)")


# ---- drawing -------------------------------------------------------------------------------------

Points = Sequence[tuple[float, float]]
Ticks = Sequence[tuple[float, str]]


def picture(
    curves: Mapping[str, Points], across: Ticks, upwards: Ticks, title: str, label: str
) -> str:
    """Return an SVG of curves whose points are shares of the picture's width and height."""

    def x(share: float) -> float:
        return LEFT + ACROSS * share

    def y(share: float) -> float:
        return TOP + DOWN * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="{TOP - 8}">{title}</text>',
    ]
    for share, text in upwards:
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + ACROSS}" y1="{y(share):.1f}" y2="{y(share):.1f}"'
            ' stroke="#ddd"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{text}</text>')
    for share, text in across:
        parts.append(
            f'<text x="{x(share):.1f}" y="{TOP + DOWN + 18}" text-anchor="middle">{text}</text>'
        )
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number]
        line = " ".join(f"{x(across_):.1f},{y(up):.1f}" for across_, up in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{LEFT + ACROSS + 14}" y="{TOP + 16 + 18 * number}" fill="{colour}">'
            f"{name}</text>"
        )
    parts.append(
        f'<text x="{LEFT + ACROSS / 2}" y="{HEIGHT - 16}" text-anchor="middle">{label}</text></svg>'
    )
    return "\n".join(parts) + "\n"


PICTURES = {"fcdp_figure10.svg": link_figure, "zo2_figure3.svg": memory_figure}


def main() -> None:
    """Write both pictures beside the results."""
    for name, draw in PICTURES.items():
        (RESULTS / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The curves of ``zo_converge.py`` as a picture: held-out accuracy against forward passes, and
against seconds. SVG by hand: no library draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Protocol

COLOURS = ("#1b1b1b", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
LEFT = 60
TOP = 40
ACROSS = 340
DOWN = 280
APART = 60
WIDTH = LEFT + 2 * ACROSS + APART + 120
HEIGHT = TOP + DOWN + 60


class Curve(Protocol):
    """One run: what it had spent each time that accuracy was measured."""

    forwards: Sequence[int]
    seconds: Sequence[float]
    accuracy: Sequence[float]


def draw(curves: Mapping[str, Sequence[Curve]]) -> str:
    """An SVG of each method's mean over its runs, which were measured after the same forward
    passes."""
    least = min(min(curve.accuracy) for runs in curves.values() for curve in runs)

    def y(accuracy: float) -> float:
        return TOP + DOWN * (1 - (accuracy - least) / max(1 - least, 1e-9))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT - 8}" y="{TOP - 16}">held-out accuracy, mean over seeds</text>',
    ]
    for fifth in range(6):
        share = least + (1 - least) * fifth / 5
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">'
            f"{100 * share:.0f}%</text>"
        )
    panels: list[tuple[str, Callable[[Curve], Sequence[float]]]] = [
        ("forward passes on one batch", lambda curve: curve.forwards),
        ("seconds", lambda curve: curve.seconds),
    ]
    for number, (label, spent) in enumerate(panels):
        means = {
            name: list(
                zip(_means(map(spent, runs)), _means(curve.accuracy for curve in runs), strict=True)
            )
            for name, runs in curves.items()
        }
        parts += _panel(means, LEFT + number * (ACROSS + APART), y, least, label)
    right = LEFT + 2 * ACROSS + APART + 14
    for number, name in enumerate(curves):
        parts.append(
            f'<text x="{right}" y="{TOP + 16 + 18 * number}" fill="{COLOURS[number]}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    means: Mapping[str, Sequence[tuple[float, float]]],
    left: float,
    y: Callable[[float], float],
    least: float,
    label: str,
) -> Iterator[str]:
    """Lines, the axis below, and one curve for each method."""
    highest = max(points[-1][0] for points in means.values())
    step = next(
        s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if highest / s <= 6
    )
    for fifth in range(6):
        height = y(least + (1 - least) * fifth / 5)
        yield (
            f'<line x1="{left}" x2="{left + ACROSS}" y1="{height:.1f}" y2="{height:.1f}"'
            ' stroke="#ddd"/>'
        )
    for tick in range(0, int(highest) + 1, step):
        x = left + ACROSS * tick / highest
        yield f'<text x="{x:.1f}" y="{TOP + DOWN + 18}" text-anchor="middle">{tick:,}</text>'
    yield f'<text x="{left + ACROSS / 2}" y="{TOP + DOWN + 44}" text-anchor="middle">{label}</text>'
    for number, points in enumerate(means.values()):
        line = " ".join(
            f"{left + ACROSS * x / highest:.1f},{y(accuracy):.1f}" for x, accuracy in points
        )
        yield f'<polyline points="{line}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"/>'


def _means(runs: Iterator[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*runs, strict=True)]

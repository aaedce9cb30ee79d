"""The sweep of ``sharded.py`` as a picture: throughput kept at each rate between nodes. SVG by
hand: no library draws it."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from typing import Any

from benchmarks.sharded_runs import bits

COLOURS = {"fcdp": "#0072b2", "hzp": "#009e73", "fsdp2": "#d55e00", "fsdp2-a2a": "#cc79a7"}
WIDTH = 640
HEIGHT = 340
LEFT = 60
TOP = 20
ACROSS = 440
DOWN = 260


def draw(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """An SVG of ``rows[system][rate]["kept"]``; rates are such as ``10mbit``, the unshaped one at
    the right end."""
    rates = sorted({rate for by_rate in rows.values() for rate in by_rate}, key=bits)
    finite = [bits(rate) for rate in rates if rate != "unshaped"]
    low = log10(finite[0])
    high = log10(finite[-1]) + 0.5

    def x(rate: str) -> float:
        return LEFT + ACROSS * ((high if rate == "unshaped" else log10(bits(rate))) - low) / (
            high - low
        )

    def y(kept: float) -> float:
        return TOP + DOWN * (1 - min(kept, 1.1) / 1.1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for fifth in range(6):
        share = fifth / 5
        height = y(share)
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + ACROSS}" y1="{height:.1f}" y2="{height:.1f}"'
            ' stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{share:.1f}</text>'
        )
    for rate in rates:
        parts.append(
            f'<text x="{x(rate):.1f}" y="{TOP + DOWN + 18}" text-anchor="middle">{rate}</text>'
        )
    for number, (system, by_rate) in enumerate(rows.items()):
        colour = COLOURS.get(system, "#57606a")
        points = " ".join(
            f"{x(rate):.1f},{y(by_rate[rate]['kept']):.1f}" for rate in rates if rate in by_rate
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{LEFT + ACROSS + 14}" y="{TOP + 16 + 18 * number}" fill="{colour}">'
            f"{system}</text>"
        )
    label = "rate between nodes; share of the unshaped throughput that a LoRA step keeps"
    parts.append(
        f'<text x="{LEFT + ACROSS / 2}" y="{HEIGHT - 14}" text-anchor="middle">{label}</text></svg>'
    )
    return "\n".join(parts) + "\n"

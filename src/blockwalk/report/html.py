"""A run as one self-contained page: curves as inline SVG, a step's timeline, the configuration. No scripts, no network.

Reads what a run leaves in its folder: ``config.yaml``, ``metrics.jsonl``, ``evaluations.jsonl`` and, where there is one,
``trace.json``. Nothing here imports torch.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockwalk.program import human_bytes

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 64, 24
"""Of a chart, in its own units: it scales with the page."""

MOST_POINTS = 2000
"""A curve has at most so many points: longer runs are thinned, their first and last step kept."""

_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:720px;padding:1rem;color:#1f2328;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:1.6rem 0 .3rem}svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;font-size:.9rem}td{padding:.1rem .8rem .1rem 0;vertical-align:top}
pre{overflow-x:auto;background:#f6f8fa;padding:.8rem;font-size:.8rem}text{font:11px system-ui,sans-serif;fill:#57606a}
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]


def report(folder: str | Path) -> str:
    """The page of a run's folder.

    Raises:
        ValueError: the folder holds no metrics.
    """
    run = Path(folder)
    steps = _lines(run / "metrics.jsonl")
    if not steps:
        raise ValueError(f"{run} holds no metrics.jsonl with a step in it; give a run's output_dir")
    evaluations = _lines(run / "evaluations.jsonl")
    config = (run / "config.yaml").read_text(encoding="utf-8") if (run / "config.yaml").is_file() else ""
    parts = [
        f"<h1>{html.escape(run.name)}</h1>",
        _table(_summary(steps, evaluations)),
        chart("Loss", [_curve("training", steps, "loss"), _curve("held out", evaluations, "loss")]),
        chart("Learning rate", [_curve("learning rate", steps, "learning_rate")]),
        chart("Tokens a second", [_curve("tokens a second", steps, "tokens_per_second")]),
        chart("Memory of the process, MB", [_curve("peak of each step", steps, "peak_bytes", 1e-6)]),
        chart("Bytes moved a step, MB", list(_moved(steps))),
    ]
    if (run / "trace.json").is_file():
        parts.append(timeline("A step's timeline", json.loads((run / "trace.json").read_text(encoding="utf-8"))))
    parts.append(f"<h2>Configuration</h2><pre>{html.escape(config)}</pre>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    title = f"<title>{html.escape(run.name)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}{title}</head><body>{''.join(parts)}</body></html>\n"


def chart(title: str, curves: Sequence[Curve]) -> str:
    """A line chart as SVG; empty where no curve has a point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    low, high = min(ys), max(ys)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high, first, last = low - pad, high + pad, min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> str:
        across = LEFT + (x - first) / (last - first) * (WIDTH - LEFT - 8)
        return f"{across:.1f},{8 + (high - y) / (high - low) * (HEIGHT - BOTTOM - 8):.1f}"

    drawn = []
    for tick in range(5):
        y = low + (high - low) * tick / 4
        at = place(first, y).split(",")[1]
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{at}" y2="{at}" stroke="#d0d7de"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{at}" text-anchor="end" dominant-baseline="middle">{y:.4g}</text>')
    drawn.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">step {first:.0f}</text>')
    drawn.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{last:.0f}</text>')
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(place(x, y) for x, y in curve.points)
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(curves) > 1:
            name = html.escape(curve.name)
            drawn.append(f'<text x="{WIDTH - 12}" y="{20 + 14 * number}" text-anchor="end" style="fill:{colour}">{name}</text>')
    label = html.escape(title)
    return f'<h2>{label}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def timeline(title: str, trace: dict[str, Any]) -> str:
    """The complete events of a Chrome trace, a row for each process and lane."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "thread_name"}
    rows = sorted({(str(event["pid"]), event["tid"]) for event in events})
    if not events:
        return ""
    end = max(event["ts"] + event["dur"] for event in events)
    height, drawn = 22 * len(rows) + BOTTOM, []
    for number, (process, lane) in enumerate(rows):
        label = html.escape(str(names.get((process, lane), lane)))
        drawn.append(f'<text x="4" y="{22 * number + 15}">{label}</text>')
        for event in (e for e in events if (str(e["pid"]), e["tid"]) == (process, lane)):
            x, width = 90 + event["ts"] / end * (WIDTH - 98), max(event["dur"] / end * (WIDTH - 98), 0.5)
            colour = _COLOURS[sum(map(ord, event.get("cat", ""))) % len(_COLOURS)]
            drawn.append(
                f'<rect x="{x:.1f}" y="{22 * number + 3}" width="{width:.1f}" height="16" fill="{colour}">'
                f"<title>{html.escape(event['name'])}: {event['dur'] / 1000:.2f} ms</title></rect>"
            )
    drawn.append(f'<text x="{WIDTH - 8}" y="{height - 6}" text-anchor="end">{end / 1000:.1f} ms</text>')
    label = html.escape(title)
    return f'<h2>{label}</h2><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def _curve(name: str, lines: Sequence[dict[str, Any]], key: str, scale: float = 1.0) -> Curve:
    points = [(float(line["step"]), float(line[key]) * scale) for line in lines if math.isfinite(line.get(key) or math.nan)]
    every = -(-len(points) // MOST_POINTS) or 1
    thin = points[::every]
    if points and thin[-1] != points[-1]:
        thin.append(points[-1])
    return Curve(name, tuple(thin))


def _moved(steps: Sequence[dict[str, Any]]) -> Iterator[Curve]:
    for lane in sorted({lane for step in steps for lane in step.get("bytes_moved", {})}):
        with_lane = [{"step": s["step"], "moved": s["bytes_moved"][lane]} for s in steps if lane in s.get("bytes_moved", {})]
        yield _curve(lane, with_lane, "moved", 1e-6)


def _summary(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    yield "steps", f"{steps[-1]['step']}"
    yield "training loss", f"{steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f}"
    if evaluations:
        yield "held-out loss", f"{evaluations[0]['loss']:.4f} → {evaluations[-1]['loss']:.4f}"
    yield "tokens a second", f"{sum(s['tokens'] for s in steps) / max(sum(s['seconds'] for s in steps), 1e-9):.4g}"
    yield "peak memory", human_bytes(max(step["peak_bytes"] for step in steps))


def _table(rows: Iterator[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; none where there is no file."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

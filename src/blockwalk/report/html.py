"""A run as one self-contained page: series as inline SVG, a step's timeline, the configuration. No
scripts, no network.

The page is made of the files that a run leaves in its folder: ``config.yaml``, ``metrics.jsonl``,
``evaluations.jsonl`` and, where they are there, ``forecast.json`` and ``trace.json``. Nothing here
imports torch."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from blockwalk.checkpoints.run_checkpoint import CHANGED
from blockwalk.plan.parsing import Loader
from blockwalk.program.program import human_bytes
from blockwalk.report.axis import Kind, axis
from blockwalk.system.atomic_files import read_json, reading, whole_lines
from blockwalk.system.links import within

WIDTH = 640
HEIGHT = 240
LEFT = 84
BOTTOM = 24
TOP = 24
"""Sizes of a chart, in its own units: it scales with the page."""

LANES = 180
"""The place in a timeline where the lanes begin, after their names."""

MOST_POINTS = 2000
"""The most points of a series: longer runs are thinned, their first and last step kept."""

FEW = 30
FORESEEN = "foreseen"
"""Series of so few points have dots; the name of the series that is a forecast."""

_COLOURS = (
    "#1f6feb",
    "#d1242f",
    "#1a7f37",
    "#9a6700",
    "#8250df",
    "#57606a",
    "#0a7ea4",
    "#bf3989",
    "#7d8590",
)

_STYLE = """
:root{color-scheme:light dark;
--ink:#1f2328;--paper:#fff;--dim:#57606a;--grid:#d0d7de;--box:#f6f8fa}
@media(prefers-color-scheme:dark){:root{
--ink:#e6edf3;--paper:#0d1117;--dim:#9198a1;--grid:#30363d;--box:#161b22}
polyline,circle,rect,.name{filter:brightness(1.5)}}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:720px;padding:1rem;
color:var(--ink);background:var(--paper)}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:1.6rem 0 .3rem}
svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;font-size:.9rem}
td{padding:.1rem .8rem .1rem 0;vertical-align:top}
pre{overflow-x:auto;background:var(--box);padding:.8rem;font-size:.8rem}
.what{color:var(--dim);margin:0 0 .6rem}
text{font:11px system-ui,sans-serif;fill:var(--dim,#57606a)}.grid{stroke:var(--grid,#d0d7de)}
@media(max-width:500px){text{font-size:16px}}
"""

Lines = Sequence[dict[str, Any]]
"""The lines of a log that a run wrote."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: (step, value) pairs."""

    name: str
    points: tuple[tuple[float, float], ...]


def report(folder: str | Path) -> str:
    """Return the page of a run's folder.

    Raises:
        ValueError: the folder holds no metrics, or files that no run writes.
    """
    with reading(folder):
        return _page(Path(folder))


def _page(run: Path) -> str:
    steps, evaluations = _logs(run)
    if not steps:
        raise ValueError(f"{run} holds no metrics.jsonl with a step in it; give a run's output_dir")
    settings = within(run, run / "config.yaml")
    config = settings.read_text(encoding="utf-8") if settings.is_file() else ""
    forecast = _object(within(run, run / "forecast.json"))
    memory = _series("peak of each step", steps, "peak_bytes", 1e-6)
    foreseen = _level(steps, forecast.get("process_bytes"), 1e-6)
    average = _level(steps, forecast.get("average_seconds"), 1.0)
    parts = [
        f"<h1>{html.escape(run.name)}</h1>",
        f'<p class="what">{html.escape(" · ".join(_header(config, run / "metrics.jsonl")))}</p>',
        _table(_summary(steps, evaluations, forecast)),
        chart("Loss", _losses(steps, evaluations), "ratio"),
        chart(
            "Accuracy on held-out records, %",
            _held_out("accuracy", evaluations, "accuracy", 100),
            "range",
        ),
        chart("Norm of the gradient", [_series("norm", steps, "grad_norm")], "ratio"),
        chart("Learning rate", [_series("learning rate", steps, "learning_rate")]),
        chart("Tokens a second", [_series("tokens a second", steps, "tokens_per_second")]),
        chart("Seconds a step", [_series("measured", steps, "seconds"), *average]),
        chart(
            "Private memory of the process, which the kernel cannot drop, MB", [memory, *foreseen]
        ),
        _states(forecast.get("states", [])),
        _section("Tensors by tier at a step's peak, as foreseen", forecast.get("peaks", {})),
        chart("Bytes moved a step, MB", list(_moved(steps))),
        _section(
            "Bytes moved in a step at the longest sequences, as foreseen",
            forecast.get("bytes_moved", {}),
        ),
    ]
    if trace := _object(within(run, run / "trace.json")):
        parts.append(timeline("A step's timeline", trace))
    if changed := whole_lines(within(run, run / CHANGED)):
        rows = ((f"step {line['step']}", "; ".join(line["changes"])) for line in changed)
        parts.append(f"<h2>Changed where the run was resumed</h2>{_table(rows)}")
    parts.append(f"<h2>Configuration</h2><pre>{html.escape(config)}</pre>")
    if versions := forecast.get("versions"):
        parts.append(f"<h2>Versions</h2>{_table(iter(versions.items()))}")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    )
    title = f"<title>{html.escape(run.name)}</title><style>{_STYLE}</style>"
    return (
        "<!doctype html><html"
        f" lang=en><head>{head}{title}</head><body>{''.join(parts)}</body></html>\n"
    )


def curves(folder: str | Path) -> str:
    """Return the losses of a run's folder as an SVG file of its own."""
    run = Path(folder)
    return standalone(chart("Loss", _losses(*_logs(run)), "ratio"))


def _logs(run: Path) -> tuple[Lines, Lines]:
    """Return the lines of a run's steps and of its evaluations."""
    steps, evaluations = (
        whole_lines(within(run, run / name)) for name in ("metrics.jsonl", "evaluations.jsonl")
    )
    return steps, evaluations


def standalone(drawn: str) -> str:
    """Return a :func:`chart` as a file of its own."""
    picture = drawn[drawn.index("<svg") :].replace(
        "<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1
    )
    style = "text{font:11px sans-serif;fill:#57606a}.grid{stroke:#d0d7de}"
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return picture.replace(">", f"><style>{style}</style>{paper}", 1) + "\n"


def figures(folder: str | Path) -> Iterator[tuple[str, str]]:
    """Yield names and values of a run's summary, from its folder."""
    run = Path(folder)
    yield from _summary(*_logs(run), _object(within(run, run / "forecast.json")))


def chart(title: str, lines: Sequence[Series], kind: Kind = "zero") -> str:
    """Return a line chart as SVG, with a dot for each value where they are few; empty where no line
    has a point. A title says so where the vertical axis is logarithmic."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    vertical = axis([y for line in lines for _, y in line.points], kind)
    first_step = min(xs)
    last_step = max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> str:
        across = LEFT + (x - first_step) / (last_step - first_step) * (WIDTH - LEFT - 8)
        return f"{across:.1f},{TOP + vertical.below_top(y) * (HEIGHT - BOTTOM - TOP):.1f}"

    drawn = []
    for y in vertical.marks():
        height = place(first_step, y).split(",")[1]
        drawn += [
            f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{height}" y2="{height}" class="grid"/>',
            f'<text x="{LEFT - 6}" y="{height}" text-anchor="end" dominant-baseline="middle">'
            f"{y:,g}</text>",
        ]
    drawn.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">step {first_step:.0f}</text>')
    drawn.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{last_step:.0f}</text>')
    for number, line in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(place(x, y) for x, y in line.points)
        drawn.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        if len(line.points) <= FEW and line.name != FORESEEN:
            drawn += [_dot(place(x, y), x, y, colour) for x, y in line.points]
        if len(lines) > 1:
            name = html.escape(line.name)
            start = LEFT + min(150, (WIDTH - LEFT) // len(lines)) * number
            drawn.append(
                f'<text x="{start}" y="14" class="name" style="fill:{colour}">{name}</text>'
            )
    return _picture(f"{title} (logarithmic)" if vertical.logarithmic else title, HEIGHT, drawn)


def _dot(place: str, step: float, value: float, colour: str) -> str:
    """Return a value's dot, which shows the step and the value under a pointer."""
    x, y = place.split(",")
    name = f"<title>step {step:.0f}: {value:,.6g}</title>"
    return f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{name}</circle>'


def _picture(title: str, height: int, drawn: Sequence[str]) -> str:
    """Return shapes as an SVG below their title."""
    label = html.escape(title)
    view = f'viewBox="0 0 {WIDTH} {height}"'
    svg = f'<svg {view} role="img" aria-label="{label}">{"".join(drawn)}</svg>'
    return f"<h2>{label}</h2>{svg}"


def timeline(title: str, trace: dict[str, Any]) -> str:
    """Return the complete events of a Chrome trace, a row for each process and lane."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e.get("name") == "thread_name"
    }
    rows = sorted({(str(event["pid"]), event["tid"]) for event in events})
    if not events:
        return ""
    kinds = list(dict.fromkeys(str(event.get("cat", "")) for event in events))
    end = max(event["ts"] + event["dur"] for event in events)
    height = 22 * len(rows) + BOTTOM
    drawn = []
    for number, (process, lane) in enumerate(rows):
        label = html.escape(f"{process}: {names.get((process, lane), lane)}")
        drawn.append(f'<text x="4" y="{22 * number + 15}">{label}</text>')
        for event in (e for e in events if (str(e["pid"]), e["tid"]) == (process, lane)):
            x = LANES + event["ts"] / end * (WIDTH - LANES - 8)
            width = max(event["dur"] / end * (WIDTH - LANES - 8), 0.5)
            colour = _COLOURS[kinds.index(str(event.get("cat", ""))) % len(_COLOURS)]
            drawn.append(
                f'<rect x="{x:.1f}" y="{22 * number + 3}" width="{width:.1f}" height="16"'
                f' fill="{colour}">'
                f"<title>{html.escape(event['name'])}: {event['dur'] / 1000:.2f} ms</title></rect>"
            )
    drawn.append(
        f'<text x="{WIDTH - 8}" y="{height - 6}" text-anchor="end">{end / 1000:.1f} ms</text>'
    )
    entries = []
    for number, kind in enumerate(kinds):
        words = html.escape(kind.lower().replace("_", " "))
        colour = _COLOURS[number % len(_COLOURS)]
        entries.append(f'<span class="name" style="color:{colour}">{words}</span>')
    return f"{_picture(title, height, drawn)}<p>{' '.join(entries)}</p>"


def _level(steps: Lines, value: float | None, scale: float) -> list[Series]:
    """Return the foreseen value as a level line; empty where none is foreseen."""
    if not value:
        return []
    ends = (steps[0], steps[-1])
    return [Series(FORESEEN, tuple((float(step["step"]), value * scale) for step in ends))]


def _section(title: str, sizes: dict[str, int]) -> str:
    """Return bytes by name, under a heading; empty where there are none."""
    rows = ((name, human_bytes(nbytes)) for name, nbytes in sizes.items())
    return f"<h2>{html.escape(title)}</h2>{_table(rows)}" if sizes else ""


def _states(rows: Sequence[Sequence[Any]]) -> str:
    """Return the kinds of state, each with its tier, codec and bytes, under a heading; empty where
    there are none."""
    cells = (
        (kind, f"{placement}, {human_bytes(nbytes)}{f' ({note})' if note else ''}")
        for kind, placement, nbytes, note in rows
    )
    return f"<h2>Kinds of state, and where each lies</h2>{_table(cells)}" if rows else ""


def _object(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty where there is no file."""
    with reading(path):
        return dict(read_json(path).items()) if path.is_file() else {}


def _series(name: str, lines: Lines, key: str, scale: float = 1.0) -> Series:
    finite = [line for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    points = [(float(line["step"]), float(line[key]) * scale) for line in finite]
    every = -(-len(points) // MOST_POINTS) or 1
    thin = points[::every]
    if points and thin[-1] != points[-1]:
        thin.append(points[-1])
    return Series(name, tuple(thin))


def _losses(steps: Lines, evaluations: Lines) -> list[Series]:
    return [_series("training", steps, "loss"), *_held_out("held out", evaluations, "loss")]


def _held_out(name: str, evaluations: Lines, key: str, scale: float = 1.0) -> list[Series]:
    """Return a series for each set of held-out records, the last one's under the plain name:
    figures of two sets make no curve."""
    sets = list(dict.fromkeys(line.get("records") for line in evaluations))
    series = []
    for number, records in enumerate(sets, 1):
        lines = [line for line in evaluations if line.get("records") == records]
        series.append(
            _series(name if number == len(sets) else f"{name}, records {number}", lines, key, scale)
        )
    return series


def _header(config: str, metrics: Path) -> Iterator[str]:
    """Yield the run in a line: model, method, data, and the day of its last step."""
    settings = yaml.load(config, Loader=Loader) or {}
    for name in ("model", "method"):
        if settings.get(name):
            yield str(settings[name])
    data = settings.get("data") or {}
    if train := data.get("train") or data.get("task"):
        yield str(train)
    yield time.strftime("%d %B %Y %H:%M", time.localtime(metrics.stat().st_mtime))


def _moved(steps: Lines) -> Iterator[Series]:
    for lane in sorted({lane for step in steps for lane in step.get("bytes_moved", {})}):
        having = [step for step in steps if lane in step.get("bytes_moved", {})]
        with_lane = [{"step": step["step"], "moved": step["bytes_moved"][lane]} for step in having]
        # one figure for all steps stands in the table
        if len({line["moved"] for line in with_lane}) > 1:
            yield _series(lane, with_lane, "moved", 1e-6)


def loss_ends(losses: Sequence[float]) -> tuple[float, float]:
    """Mean losses of the first and of the last tenth of the steps: those of single batches differ
    by their texts."""
    tenth = -(-len(losses) // 10)
    return fmean(losses[:tenth]), fmean(losses[-tenth:])


def _summary(
    steps: Lines, evaluations: Lines, forecast: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    yield "steps", f"{steps[-1]['step']}"
    first_loss, last_loss = loss_ends([step["loss"] for step in steps])
    yield (
        "training loss, means of the first and the last tenth",
        f"{first_loss:.4f} → {last_loss:.4f}",
    )
    if evaluations:
        evaluations = [
            line for line in evaluations if line.get("records") == evaluations[-1].get("records")
        ]
        yield "held-out loss", f"{evaluations[0]['loss']:.4f} → {evaluations[-1]['loss']:.4f}"
        if right := [
            100 * line["accuracy"] for line in evaluations if line.get("accuracy") is not None
        ]:
            yield "held-out accuracy", f"{right[0]:.1f}% → {right[-1]:.1f}%"
    # one that only the ledger has was not timed: a kill came before its line
    timed = [step for step in steps if "seconds" in step]
    if not timed:
        return
    seconds = [step["seconds"] for step in timed]
    tokens = sum(step["tokens"] for step in timed)
    yield "tokens a second", f"{tokens / max(sum(seconds), 1e-9):.4g}"
    foreseen = ""
    if nbytes := forecast.get("process_bytes"):
        foreseen = f", {human_bytes(nbytes)} foreseen"
    yield "peak private memory", human_bytes(max(step["peak_bytes"] for step in timed)) + foreseen
    if average := forecast.get("average_seconds"):
        yield "seconds a step", f"{fmean(seconds):.3g} on average, {average:.3g} foreseen"


def _table(rows: Iterator[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{cells}</table>"

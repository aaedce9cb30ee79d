"""README's measured figures and its picture, made from what the other benchmarks kept in
``results/``.

    python benchmarks/front_page.py          # writes docs/front.svg, prints each figure's source
    python benchmarks/front_page.py --check  # exit 1 where README differs from the results

Every measured figure of README is a row of :data:`FIGURES`: its words, and the result that they are
read from."""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "front.svg"

SMOLLM2 = "vs_peft_smollm2_epyc"
CODECS = "default_codec_folded"
TABLE = "mebp_table1_epyc"
TOKENS_AN_EXAMPLE = 256
EXAMPLES = 1000
SECONDS_AN_HOUR = 3600


@cache
def result(name: str) -> Any:
    """The figures that a benchmark kept under a name."""
    kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return kept.get("figures", kept)


def model_row(name: str) -> Any:
    """The row of a model in MeBP's table."""
    return next(row for row in result(TABLE) if row["model"] == name)


@dataclass(frozen=True)
class Figure:
    """One measured figure: how README writes it, what it is, and its value."""

    words: str
    meaning: str
    value: Callable[[], float]
    written: Callable[[float], str]

    def expected(self) -> str:
        """The words that the kept result calls for."""
        return self.written(self.value())


def gigabytes(megabytes: float) -> str:
    """Write megabytes of 1e6 bytes as gigabytes."""
    value = megabytes / 1000
    return f"{value:.2f} GB" if value < 1 else f"{value:.1f} GB"


def seconds(value: float) -> str:
    """Write seconds."""
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def rate(value: float) -> str:
    """Write tokens a second with two digits that count."""
    return f"{value:.2g} tokens/s"


def hours(value: float) -> str:
    """Write seconds as hours."""
    return f"{value / SECONDS_AN_HOUR:.1f} hours"


def nats(value: float) -> str:
    """Write a difference of losses with one digit that counts."""
    return f"{value:.1g} nats"


def behind_raw(codec: str) -> float:
    """The held-out loss after training over a codec's weights, less that over the model's own."""
    return float(result(CODECS)[codec]["after"] - result(CODECS)["raw"]["after"])


def seconds_3b() -> float:
    """Seconds of a step of the 3B model on one sequence."""
    return float(model_row("Qwen2.5-3B")["seconds"])


def rate_3b() -> float:
    """Tokens a second of the 3B model."""
    return TOKENS_AN_EXAMPLE / seconds_3b()


def side(name: str, kind: str) -> float:
    """A figure of one side of the comparison with PEFT: ``seconds`` of a step, or ``peak_MB``."""
    figures = result(SMOLLM2)
    return float(figures[kind][figures["fastest"] if name == "fastest" else name])


def percent(share: float) -> str:
    """Write a share in percent."""
    return f"{100 * share:.0f}%"


def megabytes(value: float) -> str:
    """Write bytes as megabytes of 1e6 bytes."""
    return f"{value / 1e6:.0f} MB"


def answer(side: str) -> float:
    """The probability of the label that stood first, ``before`` training or ``after``."""
    return float(result("before_after")[side]["probability"])


def accuracy(evaluation: int) -> float:
    """The share of held-out sentences that were labelled rightly."""
    return float(result("before_after")["evaluations"][evaluation]["accuracy"])


FIGURES = (
    Figure("59%", "the label before training", lambda: answer("before"), percent),
    Figure("95%", "the label after training", lambda: answer("after"), percent),
    Figure("30%", "accuracy before training", lambda: accuracy(0), percent),
    Figure("84%", "accuracy after training", lambda: accuracy(-1), percent),
    Figure("437 MB", "memory of that run", lambda: result("before_after")["peak_bytes"], megabytes),
    Figure(
        "0.46 GB", "memory of LoRA on 3B", lambda: model_row("Qwen2.5-3B")["peak_MB"], gigabytes
    ),
    Figure("13 tokens/s", "speed of LoRA on 3B", rate_3b, rate),
    Figure("5.7 hours", "1,000 examples by 3B", lambda: EXAMPLES * seconds_3b(), hours),
    Figure(
        "2.5 GB",
        "limit of LoRA on 70B",
        lambda: result("memory_limit_70b")[0]["limit"] / 1e6,
        gigabytes,
    ),
    Figure(
        "349 s",
        "a step of LoRA on 70B",
        lambda: result("memory_limit_70b")[0]["seconds"][0],
        seconds,
    ),
    Figure("0.46 GB", "memory of our side", lambda: side("ours", "peak_MB"), gigabytes),
    Figure("2.5 s", "a step of our side", lambda: side("ours", "seconds"), seconds),
    Figure("3.5 GB", "memory of PEFT's fastest", lambda: side("fastest", "peak_MB"), gigabytes),
    Figure("3.8 s", "a step of PEFT's fastest", lambda: side("fastest", "seconds"), seconds),
    Figure("2.1 GB", "PEFT, checkpointed", lambda: side("bf16 checkpointed", "peak_MB"), gigabytes),
    Figure("5.5 s", "PEFT, checkpointed", lambda: side("bf16 checkpointed", "seconds"), seconds),
    Figure("0.09 nats", "loss by int4a after training", lambda: behind_raw("int4a"), nats),
    Figure("0.005 nats", "loss by int8 after training", lambda: behind_raw("int8"), nats),
)
"""Every measured figure of README, in its order."""


# --- the picture
# --------------------------------------------------------------------------------------------------

WIDTH = 760
BAR_HEIGHT = 22
BARS_LEFT = 180
CURVE_HEIGHT = 190
OURS_COLOUR = "#cf222e"
PEER_COLOUR = "#8c959f"
WINDOW = 40
"""Steps whose losses a point of the curve is the mean of."""


def text(x: float, y: float, words: str, extra: str = "") -> str:
    """A line of text at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{html.escape(words)}</text>'


def bars(top: float) -> list[str]:
    """A bar of memory for each way to take the same LoRA step, its seconds beside it."""
    figures = result(SMOLLM2)
    labels = {"ours": "Blockwalk"} | {
        peer: f"PEFT, {peer}" for peer in figures["peak_MB"] if peer != "ours"
    }
    widest = max(figures["peak_MB"].values())
    drawn = []
    for number, (name, label) in enumerate(labels.items()):
        y = top + number * BAR_HEIGHT
        width = (WIDTH - BARS_LEFT - 140) * figures["peak_MB"][name] / widest
        colour = OURS_COLOUR if name == "ours" else PEER_COLOUR
        drawn.append(text(BARS_LEFT - 8, y + 14, label, 'text-anchor="end"'))
        drawn.append(
            f'<rect x="{BARS_LEFT}" y="{y + 2:.1f}" width="{width:.1f}" height="16"'
            f' fill="{colour}"/>'
        )
        words = f"{gigabytes(figures['peak_MB'][name])}, {seconds(figures['seconds'][name])} a step"
        drawn.append(text(BARS_LEFT + width + 6, y + 14, words))
    return drawn


def running_mean(losses: list[float]) -> list[float]:
    """The mean of the last WINDOW losses at each step from WINDOW on. Single losses of one sequence
    differ by more than a run learns."""
    return [sum(losses[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(losses) + 1)]


def curves(top: float) -> list[str]:
    """The running means of both sides' training losses, one curve on the other."""
    raw = result("curves-smollm2")["curves"]
    losses = {name: running_mean(curve) for name, curve in raw.items()}
    highest = max(max(curve) for curve in losses.values())
    lowest = min(min(curve) for curve in losses.values())
    drawn = []
    for number, (name, curve) in enumerate(losses.items()):
        across = (WIDTH - 60) / (len(curve) - 1)
        down = CURVE_HEIGHT / (highest - lowest)
        points = " ".join(
            f"{40 + step * across:.1f},{top + (highest - loss) * down:.1f}"
            for step, loss in enumerate(curve)
        )
        stroke = (
            f'stroke="{OURS_COLOUR}" stroke-width="1.3"'
            if number
            else f'stroke="{PEER_COLOUR}" stroke-width="5" stroke-opacity=".5"'
        )
        drawn.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        drawn.append(
            text(
                300 + 230 * number,
                top - 8,
                name,
                f'style="fill:{OURS_COLOUR if number else PEER_COLOUR}"',
            )
        )
    drawn.append(text(34, top + 8, f"{highest:.1f}", 'text-anchor="end"'))
    drawn.append(text(34, top + CURVE_HEIGHT, f"{lowest:.1f}", 'text-anchor="end"'))
    drawn.append(text(40, top + CURVE_HEIGHT + 16, f"step {WINDOW}"))
    last = str(len(next(iter(raw.values()))))
    drawn.append(text(WIDTH - 20, top + CURVE_HEIGHT + 16, last, 'text-anchor="end"'))
    return drawn


def picture() -> str:
    """Memory beside transformers + PEFT, and the two loss curves under it, as an SVG image."""
    count = len(result(SMOLLM2)["peak_MB"])
    curve_top = 44 + count * BAR_HEIGHT + 40
    height = curve_top + CURVE_HEIGHT + 30
    shapes = [
        text(
            12,
            24,
            "Memory and time of a LoRA step: SmolLM2-135M on GSM8K, 4 × up to 512 tokens, two"
            " cores",
            'class="title"',
        ),
        *bars(34),
        text(12, curve_top - 8, f"Training loss, mean of {WINDOW} steps", 'class="title"'),
        *curves(curve_top),
    ]
    style = "<style>text{font:12px sans-serif;fill:#24292f}.title{font-weight:bold}</style>"
    label = (
        "Memory of a LoRA step beside transformers + PEFT, and both training losses as they fall,"
        " one curve on the other"
    )
    frame = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{label}">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return f"{frame}{style}{ground}{''.join(shapes)}</svg>\n"


def wrong() -> list[str]:
    """The figures whose words are not those of the kept result."""
    return [
        f"{figure.meaning}: README says {figure.words}, the result {figure.expected()}"
        for figure in FIGURES
        if figure.words != figure.expected()
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument(
        "--check", action="store_true", help="exit 1 where README and results differ"
    )
    arguments = options.parse_args()
    for figure in FIGURES:
        print(f"{figure.words:>14}  {figure.meaning}")
    faults = wrong()
    print("\n".join(faults))
    if arguments.check:
        sys.exit(bool(faults))
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""One answer before training and after it: SmolLM2-135M and seven intents of voice assistants
(Snips, CC0), a LoRA on a processor.

    python benchmarks/before_after.py MODEL TRAIN HELDOUT   # writes results/before_after.json

MODEL is SmolLM2-135M-Instruct; TRAIN and HELDOUT are JSON lines with ``text`` and ``label`` (a
number from 0 to 6). The script prints the sentence's label and its probability before and after,
and the accuracy on 50 held-out sentences before the first step and after the last."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from blockwalk.cli import main

RESULTS = Path(__file__).parent / "results" / "before_after.json"
WORDS = "playlist,restaurant,weather,music,rating,work,cinema"
"""The word of each intent, in the order of the labels."""
SENTENCE = "Is it going to be chilly in Corsica tonight?"
"""A sentence that is in neither file."""
SETTINGS = {
    "data.template": "{text} It is about {label}",
    "data.label_words": WORDS,
    "data.label_scores": "sum",
    "method": "mebp",
    "lora.rank": "8",
    "batch_size": "8",
    "eval_batch_size": "50",
    "max_steps": "40",
    "data.eval_limit": "50",
    "optimizer.learning_rate": "5e-4",
    "optimizer.schedule": "linear",
    "seed": "0",
}
"""The run, as flags."""


def flags(settings: dict[str, str]) -> list[str]:
    """Write settings as flags."""
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def printed(*words: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main.main(list(words))
    if code:
        raise SystemExit(f"blockwalk {' '.join(words)} ended with {code}")
    return out.getvalue()


def label_of(run: str, *more: str) -> dict[str, Any]:
    """The answer for the sentence."""
    answer: dict[str, Any] = json.loads(printed("predict", run, "--text", SENTENCE, *more))
    return {name: answer[name] for name in ("label", "probability")}


def measured(model: str, train: str, heldout: str, folder: Path) -> dict[str, Any]:
    """Train, and return the answers and the evaluations."""
    run = str(folder / "run")
    data = {"model": model, "data.train": train, "data.eval": heldout, "output_dir": run}
    began = time.perf_counter()
    printed("train", *flags({**data, **SETTINGS}))
    elapsed = time.perf_counter() - began
    evaluations = [json.loads(line) for line in (folder / "run/evaluations.jsonl").open()]
    steps = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    return {
        "sentence": SENTENCE,
        "before": label_of(run, "--adapter", "none"),
        "after": label_of(run),
        "evaluations": [
            {name: line[name] for name in ("step", "loss", "accuracy")} for line in evaluations
        ],
        "peak_bytes": max(line["peak_bytes"] for line in steps),
        "seconds": round(elapsed, 1),
        "settings": SETTINGS,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "train", "heldout"):
        parser.add_argument(name)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        figures = measured(parsed.model, parsed.train, parsed.heldout, Path(temporary))
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))

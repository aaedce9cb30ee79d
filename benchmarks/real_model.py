"""A real model on real data: private memory over many steps of varying lengths, summed over the
process tree.

    python benchmarks/real_model.py --model SmolLM2-135M-Instruct --data gsm8k_train.jsonl
    [--rows mebp mezo] [--runs 5] [--join FILE ...] [--json FILE] [--check]
    python benchmarks/real_model.py --dimensions Qwen2.5-0.5B --batch 1 --steps 60 --peak 450
    [--check]

Each row is ``blockwalk train`` in a process of its own, tokenizer and data included. Counted is
RssAnon + RssShmem + Swap + PTE of all processes of the tree at each instant; the peak after step 20
is held against the peak of the whole run. With ``--dimensions`` the weights are random, and
tokenizer and data are made of the Python sources that are installed here: as many entries as the
model has, records of 32 to ``--max_length`` tokens."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Bound, finish, parser

PEAK_MB = 520
GROWTH = 0.03
SETTLED = 20
EVERY = 0.02
"""Seconds between two looks at the process tree."""

ROWS: dict[str, dict[str, Any]] = {
    "mebp": {"method": "mebp", "frozen": "disk × int4a", "lora": {"rank": 8}},
    "plain": {"method": "plain", "lora": {"rank": 8}},
    "mezo": {"method": "mezo"},
    "zo2": {"method": "zo2", "trainable": "disk"},
}


@dataclass
class Measured:
    """The peaks of one run in MB, and its speed."""

    peak: float
    settled: float
    """The peak up to step :data:`SETTLED`."""
    foreseen: float
    seconds: float
    """Of a step on average, without the first."""
    foreseen_seconds: float
    """The same as foreseen; nan where ``blockwalk doctor`` has not measured this machine."""
    tokens_per_second: float
    loss: float


def tree_bytes(root: int) -> int:
    """Private bytes of a process and all its descendants now; those that end meanwhile count
    nothing, nor does a child that is still its parent's image: until it starts its own program it
    has the parent's pages, as many bytes of address space."""
    found = 0
    waiting = [(root, "")]
    while waiting:
        pid, image = waiting.pop()
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            size = next((line for line in status.splitlines() if line.startswith("VmSize:")), "")
            waiting += [(int(child), size) for task in Path(f"/proc/{pid}/task").iterdir()
                        for child in (task / "children").read_text().split()]  # fmt: skip
            if size == image:
                continue
        except (FileNotFoundError, ProcessLookupError):
            continue
        counted = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")
        found += (
            sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(counted))
            * 1024
        )
    return found


def run(row: str, arguments: Any, folder: Path) -> Measured:
    """One row's run, watched from outside."""
    out = folder / row
    settings = {
        "model": str(arguments.model),
        "data": {
            "train": str(arguments.data),
            "max_length": arguments.max_length,
            "show_first": False,
        },
        "batch_size": arguments.batch,
        "max_steps": arguments.steps,
        "output_dir": str(out),
        **ROWS[row],
    }
    peak, settled = watched(row, settings, folder)
    steps_done = steps(out)
    seconds = sum(step["seconds"] for step in steps_done[1:])
    foreseen = json.loads((out / "forecast.json").read_text())
    return Measured(
        peak / 1e6,
        settled / 1e6,
        foreseen["process_bytes"] / 1e6,
        seconds / len(steps_done[1:]),
        foreseen["average_seconds"] or math.nan,
        sum(step["tokens"] for step in steps_done[1:]) / seconds,
        steps_done[-1]["loss"],
    )


def watched(name: str, settings: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Run ``blockwalk train``, watched from outside: the most private bytes of its processes, and
    the most up to step :data:`SETTLED`. A run that fails ends the program with its last words."""
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(settings))
    words = folder / f"{name}.log"
    peak = settled = 0
    with words.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "blockwalk", "train", str(config)], stdout=log, stderr=log
        )
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            if len(steps(Path(settings["output_dir"]))) < SETTLED:
                settled = peak
            time.sleep(EVERY)
    if process.returncode:
        sys.exit(f"{name}: {words.read_text()[-2000:]}")
    return peak, settled


def steps(out: Path) -> list[dict[str, Any]]:
    """The steps that the run has logged so far."""
    log = out / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def made(name: str, longest: int) -> tuple[Path, Path]:
    """A block store of random weights with a tokenizer, and records for it; made once."""
    from benchmarks.common import installed_text, random_store, with_tokenizer
    from tokenizers import Tokenizer

    from blockwalk.plan.placement import Codec

    store = with_tokenizer(random_store(name, Codec.INT4A), name)
    records = store.with_name(f"{store.name}-{longest}.jsonl")
    if not records.exists():
        trained = Tokenizer.from_file(str(store / "tokenizer.json"))
        ids = trained.encode(installed_text(1 << 21)).ids
        drawn = random.Random(0)
        lengths = [drawn.randint(32, longest) for _ in range(256)]
        starts = [drawn.randrange(len(ids) - longest) for _ in lengths]
        rows = [
            {"text": trained.decode(ids[at : at + size])}
            for at, size in zip(starts, lengths, strict=True)
        ]
        records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return store, records


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", help="a checkpoint's folder, a .gguf file or a hub name")
    options.add_argument("--data", help="records with prompt and completion, or messages")
    options.add_argument(
        "--dimensions",
        help="in place of both: a model's name, for random weights at its dimensions",
    )
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--runs", type=int, default=1, help="of each row, one after the other")
    options.add_argument(
        "--join", nargs="*", default=[], metavar="FILE", help="runs that --json wrote earlier"
    )
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--max_length", type=int, default=512)
    options.add_argument("--rows", nargs="+", choices=ROWS, default=["mebp"])
    options.add_argument(
        "--peak",
        type=float,
        default=PEAK_MB,
        help="the bound of mebp's peak in MB, of SmolLM2 unless given",
    )
    arguments = options.parse_args()
    if bool(arguments.dimensions) == bool(arguments.model and arguments.data):
        options.error("give --model and --data, or --dimensions")
    if arguments.dimensions:
        arguments.model, arguments.data = made(arguments.dimensions, arguments.max_length)
    bounds = []
    figures: dict[str, list[dict[str, Any]]] = {}
    for path in arguments.join:
        for row, runs in json.loads(Path(path).read_text())["figures"].items():
            figures.setdefault(row, []).extend(runs)
    titles = (
        f"{'peak MB':>9}{f'to step {SETTLED}':>12}{'foreseen':>10}{'s a step':>10}{'foreseen':>10}"
    )
    print(f"{'':8}{titles}{'tokens/s':>10}{'last loss':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for row in arguments.rows:
            runs = figures.setdefault(row, [])
            for _ in range(arguments.runs):
                of_run = Path(folder) / str(len(runs))
                of_run.mkdir()
                runs.append(vars(run(row, arguments, of_run)))
            for found in runs:
                columns = f"{row:8}{found['peak']:9.0f}{found['settled']:12.0f}"
                columns += f"{found['foreseen']:10.0f}{found['seconds']:10.2f}"
                columns += f"{found['foreseen_seconds']:10.2f}{found['tokens_per_second']:10.1f}"
                print(f"{columns}{found['loss']:11.4f}")
            bounds += bounds_of(row, runs, arguments.peak)
    finish(arguments, figures, bounds)


def bounds_of(row: str, runs: list[dict[str, Any]], peak_MB: float) -> Iterator[Bound]:
    """What a row's runs are held to: growth and peak of the worst, forecasts' middle error."""
    growth = max(found["peak"] / found["settled"] for found in runs) - 1
    yield Bound(f"{row}: growth of the peak after step {SETTLED}", growth, GROWTH)
    if row != "mebp":
        return
    yield Bound("mebp: peak, MB", max(found["peak"] for found in runs), peak_MB)
    yield Bound("mebp: forecast of memory off by", off(runs, "foreseen", "peak"), 0.06)
    timed = [found for found in runs if not math.isnan(found["foreseen_seconds"])]
    if timed:
        error = off(timed, "foreseen_seconds", "seconds")
        yield Bound("mebp: forecast of seconds off by", error, 0.10)


def off(runs: list[dict[str, Any]], foreseen: str, found: str) -> float:
    """The middle error of a forecast."""
    return statistics.median(abs(figures[foreseen] / figures[found] - 1) for figures in runs)


if __name__ == "__main__":
    main()

"""Memory of rows of many thousand tokens, on one rank.

    python benchmarks/long_rows.py [--part foreseen process packed tiled tiled-long kept context]
        [--check] [--json FILE]

``foreseen``: what a step of ``mebp`` on one row of 32,768 tokens holds in tensors, by the program.
``process``: ``blockwalk train`` on one row of 8,192 tokens, watched from outside, and its forecast.
``packed``: four documents of 2,048 tokens in one row, beside one document of 8,192; each is a
process of its own. ``tiled``: blocks by tiles beside blocks computed whole, seconds and gradients
of 1,024 tokens, and ``tiled-long`` of 8,192 (``long_rows_by_tiles.py``). ``kept``: tiles that keep
their graphs beside those that are computed again, seconds of 4,096 tokens. Adapters have rank 8;
weights are random at true dimensions.
``context``, if asked for: four ranks that hold parts of one row of 8,192, beside one rank; it needs
SmolLM2's file (``long_rows_in_parts.py``)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    Bound,
    finish,
    installed_text,
    model_config,
    parser,
    random_batch,
    random_store,
    with_tokenizer,
)

from blockwalk.plan.placement import Codec

TOKENS = 32_768
TENSORS = {"Qwen2.5-3B": 1000, "Qwen2.5-0.5B": 480, "Gemma3-1B": 650}
"""MB of tensors that a step on :data:`TOKENS` tokens is foreseen with, at most."""
PROCESS_MODEL = "Qwen2.5-0.5B"
PROCESS_TOKENS = 8192
PROCESS_MB = 520
FORECAST_ERROR = 0.08
DOCUMENTS = 4
PACKED_MB = 5
"""MB that packed documents hold beyond one document of as many tokens, at most."""


def foreseen_tensors(name: str) -> float:
    """MB of tensors on the device at the peak of a step, by its program."""
    from blockwalk import method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.program.compile import compile
    from blockwalk.program.program import Pool, Shape, StepKind
    from blockwalk.walk.unit_costs import UnitCosts

    costs = UnitCosts(model_config(name), lora=LoraSettings(rank=8), padded=False)
    plan = method("mebp")
    shape = Shape(1, TOKENS)
    counted = costs(plan, shape)
    program = compile(plan, costs.spec(), StepKind.TRAIN, shape, costs=counted, page_cache=0)
    return program.peaks()[Pool.DEVICE] / 1e6


def of_programs(figures: dict[str, Any]) -> list[Bound]:
    bounds = []
    for name, limit in TENSORS.items():
        found = foreseen_tensors(name)
        figures[f"{name}: tensors foreseen at 1 × {TOKENS:,}, MB"] = found
        print(f"{name}: {found:.0f} MB of tensors foreseen at 1 × {TOKENS:,}", flush=True)
        bounds.append(Bound(f"{name}: tensors at 1 × {TOKENS:,}, MB", found, limit))
    return bounds


def of_a_run(figures: dict[str, Any]) -> list[Bound]:
    from benchmarks.real_model import steps, watched

    store = with_tokenizer(random_store(PROCESS_MODEL, Codec.INT4), PROCESS_MODEL)
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        records = folder / "records.jsonl"
        text = installed_text(1 << 17)  # of which the first tokens are taken
        records.write_text(json.dumps({"text": text}) + "\n")
        settings = {
            "model": str(store),
            "data": {
                "train": str(records),
                "max_length": PROCESS_TOKENS,
                "allow_truncation": True,
                "show_first": False,
            },
            "batch_size": 1,
            "max_steps": 2,
            "method": "mebp",
            "frozen": "disk × int4",
            "lora": {"rank": 8},
            "output_dir": str(folder / "run"),
        }
        peak, _ = watched("long", settings, folder)
        forecast = json.loads((folder / "run" / "forecast.json").read_text())
        seconds = [step["seconds"] for step in steps(folder / "run")]
    peak_mb = peak / 1e6
    foreseen_mb = forecast["process_bytes"] / 1e6
    case = f"{PROCESS_MODEL} at 1 × {PROCESS_TOKENS:,}"
    print(f"{case}: {peak_mb:.0f} MB, {foreseen_mb:.0f} foreseen; steps of {seconds} s", flush=True)
    figures[case] = {"peak_MB": peak_mb, "foreseen_MB": foreseen_mb, "seconds": seconds}
    return [
        Bound(f"{case}: the process, MB", peak_mb, PROCESS_MB),
        Bound(f"{case}: forecast's error", abs(foreseen_mb / peak_mb - 1), FORECAST_ERROR),
    ]


def serve(documents: int) -> None:
    """Take two steps on one row of so many documents, in this process, and print its peak."""
    from blockwalk import Walker, method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.system.process_memory import PeakMemory

    with PeakMemory(0.003) as memory:
        import torch

        store = random_store(PROCESS_MODEL, Codec.INT4)
        plan = method("mebp", frozen="disk × int4")
        with Walker(store, plan, lora=LoraSettings(rank=8), device="cpu") as walker:
            batch = random_batch(walker.spec.vocab_size, 1, PROCESS_TOKENS)
            length = PROCESS_TOKENS // documents
            batch["position_ids"] = torch.arange(length).repeat(documents)[None]
            seconds = [walker.step(batch).seconds for _ in range(2)]
    print(json.dumps({"peak_MB": memory.highest / 1e6, "seconds": seconds}))


def of_packed_rows(figures: dict[str, Any]) -> list[Bound]:
    random_store(PROCESS_MODEL, Codec.INT4)
    found = {}
    for documents in (1, DOCUMENTS):
        command = [sys.executable, __file__, "--serve", str(documents)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[documents] = json.loads(answer.splitlines()[-1])
        print(f"{PROCESS_TOKENS:,} tokens in {documents} documents: {found[documents]}", flush=True)
    figures["documents of one row"] = found
    more = found[DOCUMENTS]["peak_MB"] - found[1]["peak_MB"]
    case = f"{DOCUMENTS} × {PROCESS_TOKENS // DOCUMENTS:,} packed over 1 × {PROCESS_TOKENS:,}"
    return [Bound(f"{case}, MB", more, PACKED_MB)]


def of_tiles(tokens: int, figures: dict[str, Any]) -> list[Bound]:
    from benchmarks import long_rows_by_tiles

    return long_rows_by_tiles.of_tiles(figures, tokens)


def of_kept_tiles(figures: dict[str, Any]) -> list[Bound]:
    from benchmarks import long_rows_by_tiles

    return long_rows_by_tiles.of_kept(figures)


def of_parts(figures: dict[str, Any]) -> list[Bound]:
    from benchmarks import long_rows_in_parts

    return long_rows_in_parts.of_parts(figures)


PARTS: dict[str, Callable[[dict[str, Any]], list[Bound]]] = {
    "foreseen": of_programs,
    "process": of_a_run,
    "packed": of_packed_rows,
    "tiled": partial(of_tiles, 1024),
    "tiled-long": partial(of_tiles, 8192),
    "kept": of_kept_tiles,
    "context": of_parts,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", nargs="+", choices=PARTS, default=[*PARTS][:6])
    options.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    figures: dict[str, Any] = {}
    bounds = [bound for part in arguments.part for bound in PARTS[part](figures)]
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

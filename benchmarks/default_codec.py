"""The default codec of frozen weights: held-out loss before and after LoRA training, seconds and
bytes, by codec.

    python benchmarks/default_codec.py --model FILE.gguf --data train.jsonl --heldout test.jsonl
    --json FIGURES [--fold] python benchmarks/default_codec.py --model FOLDER --data train.jsonl
    --heldout test.jsonl --json FIGURES --rounds 3

Each row is ``blockwalk train`` in a process of its own over one set of weights, packed beforehand
as ``blockwalk pack`` does; all rows see the same batches. ``--fold`` multiplies the norms' weights
into the next matrices first (as ``quality.py`` does), so that the weights of a quantised file lie
on no grid; the function is the same. ``--rounds`` repeats short runs without evaluations in turn (A
B A B ...) and takes medians: seconds of a step, peak private bytes of the process tree. A row is
written to ``--json`` as soon as it is there, and rows that the file has are not measured again."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.common import interleaved, machine, parser
from benchmarks.quality import fold
from benchmarks.real_model import steps, watched

from blockwalk.data.corpus import sample
from blockwalk.data.tokenizer import load_tokenizer
from blockwalk.engine.pack import pack
from blockwalk.plan.placement import Codec

CODECS = ("raw", "int8", "int4a", "int4a calibrated", "nf4")


def weights_of(name: str, folded: bool, folder: Path) -> Path:
    """The model as a folder of bfloat16 weights: a GGUF file is dequantised; ``folded`` takes the
    weights off its grid."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name)
    source = {"gguf_file": path.name} if path.is_file() else {}
    base = path.parent if path.is_file() else path
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **source)
    if source:  # as from a GGUF file it is marked as quantised, and such a model is not saved
        del model.config.quantization_config
        values = model.state_dict()
        model = type(model)(model.config)
        model.load_state_dict(values)
    if folded:
        fold(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base, **source).save_pretrained(folder)
    return folder


def packed(model: Path, row: str, arguments: argparse.Namespace, folder: Path) -> Path:
    """The weights in a row's codec, packed once; the folder itself for raw."""
    codec, _, calibrated = row.partition(" ")
    if codec == "raw":
        return model
    store = folder / row.replace(" ", "-")
    if not store.exists():
        sequences: list[Any] = []
        if calibrated:
            sequences = sample(
                str(arguments.data),
                load_tokenizer(model),
                arguments.sequences,
                arguments.max_length,
            )
        pack(model, store, Codec(codec), sequences=sequences)
    return store


def trained(
    model: Path, row: str, arguments: argparse.Namespace, count: int, evaluates: bool
) -> dict[str, float]:
    """One run's figures: seconds of a step, peak private megabytes, and the held-out losses where
    it evaluates."""
    held_out = (
        {"eval": str(arguments.heldout), "eval_limit": arguments.heldout_records}
        if evaluates
        else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = {
            "model": str(model),
            "method": "mebp",
            "frozen": "disk × raw",
            "data": {
                "train": str(arguments.data),
                "max_length": arguments.max_length,
                "show_first": False,
                **held_out,
            },
            "lora": {"rank": 8},
            "optimizer": {
                "learning_rate": arguments.learning_rate,
                "warmup_steps": min(5, count - 1),
            },
            "batch_size": arguments.batch,
            "max_steps": count,
            "output_dir": str(out),
        }
        peak, _ = watched(row, settings, Path(folder))
        seconds = statistics.median(step["seconds"] for step in steps(out)[1:])
        figures = {"seconds": seconds, "peak MB": peak / 1e6}
        if evaluates:
            losses = [
                json.loads(line)["loss"]
                for line in (out / "evaluations.jsonl").read_text().splitlines()
            ]
            figures |= {"before": losses[0], "after": losses[-1]}
        return figures


def stored_megabytes(path: Path) -> float:
    """Megabytes of the files that hold a row's weights."""
    return (
        sum(
            file.stat().st_size
            for file in path.iterdir()
            if file.suffix in (".safetensors", ".bin")
        )
        / 1e6
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True, help="a GGUF file, or a checkpoint's folder")
    options.add_argument(
        "--data", required=True, help="the records to train on, and to calibrate with"
    )
    options.add_argument("--heldout", required=True, help="the records of held-out losses")
    options.add_argument("--heldout_records", type=int, default=32)
    options.add_argument(
        "--sequences", type=int, default=32, help="records that calibrated packing sees"
    )
    options.add_argument(
        "--fold", action="store_true", help="multiply norms' weights into the next matrices first"
    )
    options.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--max_length", type=int, default=160)
    options.add_argument("--learning_rate", type=float, default=5e-4)
    options.add_argument(
        "--rounds", type=int, default=0, help="measure speed and memory in so many rounds instead"
    )
    arguments = options.parse_args()
    file = Path(arguments.json) if arguments.json else None
    figures: dict[str, Any] = (
        json.loads(file.read_text())["figures"] if file and file.exists() else {}
    )
    names = [
        "heldout_records",
        "sequences",
        "fold",
        "steps",
        "batch",
        "max_length",
        "learning_rate",
    ]
    settings = {name: getattr(arguments, name) for name in names}

    def keep() -> None:
        if file:
            value = {"machine": machine(), "settings": settings, "figures": figures}
            file.write_text(json.dumps(value, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = weights_of(arguments.model, arguments.fold, folder / "model")
        if arguments.rounds:
            stores = {row: packed(model, row, arguments, folder) for row in arguments.codecs}
            peaks: dict[str, list[float]] = {row: [] for row in stores}

            def run_of(row: str) -> float:
                measured = trained(stores[row], row, arguments, arguments.steps, evaluates=False)
                peaks[row].append(measured["peak MB"])
                return measured["seconds"]

            rounds = interleaved(
                {row: lambda row=row: run_of(row) for row in stores}, arguments.rounds
            )
            for row, seconds in rounds.items():
                middle = {
                    "seconds": statistics.median(seconds),
                    "peak MB": statistics.median(peaks[row]),
                }
                figures[row] = {
                    **middle,
                    "stored MB": stored_megabytes(stores[row]),
                    "rounds": seconds,
                }
                print(
                    f"{row:20}{middle['seconds']:8.3f} s{middle['peak MB']:8.0f} MB private",
                    flush=True,
                )
            keep()
            return
        for row in arguments.codecs:
            if row not in figures:
                store = packed(model, row, arguments, folder)
                figures[row] = trained(store, row, arguments, arguments.steps, evaluates=True)
                keep()
            losses = figures[row]
            print(
                f"{row:20} held-out {losses['before']:.4f} before, {losses['after']:.4f} after",
                flush=True,
            )


if __name__ == "__main__":
    main()

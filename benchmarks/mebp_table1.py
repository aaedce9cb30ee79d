"""MeBP's table 1 on this machine: peak memory and seconds a step of exact LoRA gradients with 4-bit
weights on disk.

Random weights at true dimensions, batch 1, LoRA rank 8 on all linear layers, AdamW. Each model runs
in a process of its own; memory is the peak of RssAnon + RssShmem + VmSwap + VmPTE of that whole
process, which reads a tokenizer of as many entries as the model has, and lets go of it before it
opens the model, as a run does. The time stands beside two LoRA forwards of the same lazily decoded
weights, MeZO's step, taken in turn in the same process; MeZO's memory (``zo2`` from the same files)
is that of another process. ``--blocks`` adds table 2, the share of decoding in forwards and in
backwards, and figure 2, seconds and memory of each block (``--plot``: drawn for the last model).

    python benchmarks/mebp_table1.py [--model Qwen2.5-0.5B ...] [--seq 256] [--steps 5] [--blocks]
    [--plot NAME] [--dora]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NONE = float("nan")
INF = float("inf")
PUBLISHED = {
    ("Qwen2.5-0.5B", 256): (320, 1.44, 335, 1.15), ("Qwen2.5-1.5B", 256): (460, 1.66, 410, 1.5),
    ("Qwen2.5-3B", 256): (662, 1.75, 445, 1.15), ("Gemma3-1B", 256): (569, 1.94, 450, 1.5),
    ("Gemma3-4B", 256): (1029, 1.70, 540, 1.15), ("Qwen2.5-1.5B", 128): (405, 1.44, 405, 1.5),
    ("Qwen2.5-1.5B", 512): (625, 1.78, 625, 1.6), ("Qwen2.5-1.5B", 1024): (994, 1.89, 610, 1.6),
}  # fmt: skip
"""Published MB and MeBP/MeZO seconds (Song and Tang 2025, tables 1 and 3; iPhone 15 Pro Max), and
our bounds for both."""
MIXTURES = {
    ("Mixtral-8x7B", 256): (NONE, NONE, 900, INF),
    ("Qwen3-30B-A3B", 256): (NONE, NONE, 900, INF),
}
"""Mixtures of experts, which the paper has none of; run where ``--model`` names them, since they
take 26 and 17 GB of disk."""


AGAINST_MEZO = 1.2
"""Peak memory by that of MeZO, at most: the paper's own claim."""


def mezo_peak(name: str, sequence: int) -> float:
    """Peak bytes of two steps of MeZO on the same files, in this process."""
    from benchmarks.common import random_batch, random_store, read_tokenizer

    from blockwalk import Walker, method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.placement import Codec
    from blockwalk.system.process_memory import PeakMemory

    store = random_store(name, Codec.INT4)
    plan = method("zo2", frozen="disk × int4", trainable="disk × fp32")
    with PeakMemory(0.003) as memory:
        read_tokenizer(store)
        with Walker(store, plan, lora=LoraSettings(rank=8), device="cpu") as walker:
            for step in range(2):
                walker.step(random_batch(walker.spec.vocab_size, 1, sequence, seed=step))
    return memory.highest


def measure(name: str, sequence: int, steps: int, *, blocks: bool, dora: bool) -> dict[str, Any]:
    """One model, in this process."""
    import torch

    from blockwalk.system.process_memory import PeakMemory, process_bytes

    imported = process_bytes()
    from benchmarks.common import median, random_batch, random_store, read_tokenizer
    from benchmarks.step_profile import step_profile

    from blockwalk import Walker, method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.placement import Codec

    store = random_store(name, Codec.INT4)
    lora = LoraSettings(rank=8, options={"use_dora": True} if dora else {})
    with PeakMemory(0.003) as memory, ExitStack() as opened:
        read_tokenizer(store)
        walker = opened.enter_context(
            Walker(store, method("mebp", frozen="disk × int4"), lora=lora, device="cpu")
        )
        vocab = walker.spec.vocab_size
        trained: list[float] = []
        forwards: list[float] = []
        walker.step(random_batch(vocab, 1, sequence))
        for step in range(1, steps + 1):
            batch = random_batch(vocab, 1, sequence, seed=step)
            trained.append(walker.step(batch).seconds)
            began = time.perf_counter()
            walker.evaluate(batch)
            walker.evaluate(batch)
            forwards.append(time.perf_counter() - began)
        peak = memory.highest
        parts = step_profile(walker, random_batch(vocab, 1, sequence)) if blocks else []
        return {
            "model": name, "sequence": sequence, "trainable": walker.spec.numel(trainable=True),
            "peak_MB": peak / 1e6, "import_torch_MB": imported / 1e6, "seconds": median(trained),
            "mezo_seconds": median(forwards),
            "ratio": median([a / b for a, b in zip(trained, forwards, strict=True)]),
            "parts": [asdict(part) for part in parts],
            "threads": torch.get_num_threads(),
        }  # fmt: skip


def in_own_process(name: str, sequence: int, steps: int, *flags: str) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--worker",
        "--model",
        name,
        "--seq",
        str(sequence),
        "--steps",
        str(steps),
    ]
    process = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{name}: {process.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return figures


def main() -> None:
    arguments = options()
    if arguments.worker and arguments.mezo:
        print(json.dumps({"mezo_MB": mezo_peak(arguments.model[0], arguments.seq) / 1e6}))
        return
    if arguments.worker:
        of = (arguments.model[0], arguments.seq, arguments.steps)
        print(json.dumps(measure(*of, blocks=arguments.blocks, dora=arguments.dora)))
        return
    from benchmarks.common import Bound, finish, random_store, with_tokenizer
    from benchmarks.step_profile import Part, in_words, picture

    from blockwalk.plan.placement import Codec

    cases = (
        [(name, arguments.seq) for name in arguments.model] if arguments.model else list(PUBLISHED)
    )
    flags = [flag for flag in ("--blocks", "--dora") if getattr(arguments, flag[2:])]
    figures: list[dict[str, Any]] = []
    bounds: list[Bound] = []
    print(
        f"{'model':<14} {'seq':>5} {'trained':>8} {'peak MB':>8} {'(above torch)':>13}"
        f" {'MeZO MB':>8} {'published':>9} {'bound':>6} {'s/step':>7} {'MeZO s':>7} {'ratio':>6}"
        f" {'published':>9} {'bound':>6}"
    )
    for name, sequence in cases:
        with_tokenizer(random_store(name, Codec.INT4), name)
        row = in_own_process(name, sequence, arguments.steps, *flags)
        row |= in_own_process(name, sequence, arguments.steps, "--mezo")
        figures.append(row)
        published = (PUBLISHED | MIXTURES).get((name, sequence), (NONE, NONE, INF, INF))
        print(f"{name:<14} {sequence:>5} {row['trainable'] / 1e6:>7.2f}M {row['peak_MB']:>8.0f}"
              f" {row['peak_MB'] - row['import_torch_MB']:>13.0f} {row['mezo_MB']:>8.0f}"
              f" {published[0]:>9} {published[2]:>6}"
              f" {row['seconds']:>7.2f} {row['mezo_seconds']:>7.2f} {row['ratio']:>6.2f}"
              f" {published[1]:>9} {published[3]:>6}",
              flush=True)  # fmt: skip
        if arguments.blocks:
            for line in in_words([Part(**part) for part in row["parts"]]):
                print(f"{'':>14} {line}", flush=True)
        bounds.append(Bound(f"{name} at {sequence}: peak MB", row["peak_MB"], published[2]))
        bounds.append(
            Bound(
                f"{name} at {sequence}: peak over MeZO's",
                row["peak_MB"] / row["mezo_MB"],
                AGAINST_MEZO,
            )
        )
        bounds.append(
            Bound(f"{name} at {sequence}: seconds over two forwards", row["ratio"], published[3])
        )
    if arguments.plot:
        parts = [Part(**part) for part in figures[-1]["parts"]]
        for value, title in (("seconds", "Seconds"), ("peak_MB", "Peak MB of the process")):
            (ROOT / "benchmarks" / "results" / f"{arguments.plot}_{value}.svg").write_text(
                picture(title, value, parts)
            )
    finish(arguments, figures, bounds)


def options() -> argparse.Namespace:
    from benchmarks.common import parser

    options = parser(__doc__)
    options.add_argument(
        "--model", nargs="*", help="names in benchmarks/common.py; all published ones unless given"
    )
    options.add_argument("--seq", type=int, default=256)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument(
        "--blocks", action="store_true", help="seconds, decoding and memory of each block"
    )
    options.add_argument(
        "--plot",
        metavar="NAME",
        help="with --blocks: draws results/NAME_seconds.svg and NAME_peak_MB.svg",
    )
    options.add_argument(
        "--dora", action="store_true", help="DoRA in place of LoRA, beside the same bounds"
    )
    options.add_argument("--mezo", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return options.parse_args()


if __name__ == "__main__":
    main()

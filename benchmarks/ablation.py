"""What each idea of `mebp` takes off a LoRA step's memory, and what it costs in time: from
transformers + PEFT to Blockwalk, one setting at a time.

    python benchmarks/ablation.py [--model Qwen2.5-0.5B] [--seq 256] [--steps 5]
    python benchmarks/ablation.py --model FOLDER --data FILE.jsonl --batch 4 --seq 512

Each row is a process of its own, and they take their steps in turn. Memory is the process's private
memory at its peak, which the kernel cannot drop: pages of mapped weights are not in it. Weights,
tokens and data are those of ``benchmarks/vs_peft.py``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vs_peft import PEERS, RANK, batches, measure, take_steps, theirs

PEFT = "transformers + PEFT, bfloat16, checkpointed"
IN_MEMORY = {"recompute": "all", "loss": "model"}
MAPPED = {**IN_MEMORY, "frozen": "disk × raw"}
BY_BLOCK = {
    "loss": "model",
    "frozen": "disk × raw",
    "trainable": "disk × fp32",
    "optimizer_state": "disk × fp32",
    "activation": "disk",
    "update.timing": "block",
    "recompute": "auto",
}
CHUNKED = {**BY_BLOCK, "loss": "chunked"}
ROWS: dict[str, tuple[str, Mapping[str, str]]] = {
    "the same walk by Blockwalk, weights in memory": ("plain", IN_MEMORY),
    "+ weights mapped from the disk": ("plain", MAPPED),
    "+ inputs, graphs and updates block by block": ("plain", BY_BLOCK),
    "+ a loss that never holds all logits": ("plain", CHUNKED),
    "+ weights in 4 bits: mebp": ("mebp", {"frozen": "disk × int4a"}),
}
"""What each row adds to the one before it, and the settings that say so."""


def walk(name: str, arguments: argparse.Namespace) -> Callable[[int], float]:
    """A function that takes one step of a row and answers its loss."""
    from benchmarks.common import random_store, read_tokenizer

    from blockwalk import Walker, method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.placement import Codec

    row, settings = ROWS[name]
    plan = method(row, **settings)
    codec = plan.frozen.codec if plan.frozen.codec.encoded else Codec.RAW
    model = Path(arguments.model) if arguments.data else random_store(arguments.model, codec)
    read_tokenizer(model)
    if not arguments.data:  # a store is read as it is packed
        plan = method(row, **settings, **{"frozen.codec": "raw"})
    walker = Walker(model, plan, lora=LoraSettings(rank=RANK), device="cpu")
    batch_of = batches(
        arguments.model, walker.spec.vocab_size, arguments.batch, arguments.seq, arguments.data
    )
    return lambda step: walker.step(batch_of(step)).loss


def serve(name: str, arguments: argparse.Namespace) -> None:
    """Take a step for every line on standard input; answer its loss, seconds and the process's peak
    memory."""
    from blockwalk.system.process_memory import PeakMemory

    with PeakMemory(0.003) as memory:
        if name == PEFT:
            step = theirs(
                arguments.model,
                arguments.seq,
                peer=PEERS["bf16 checkpointed"],
                batch=arguments.batch,
                data=arguments.data,
            )
        else:
            step = walk(name, arguments)
        take_steps(step, memory)


def main() -> None:
    from benchmarks.common import finish, median, parser, random_store, with_tokenizer

    from blockwalk.plan.placement import Codec

    options = parser(__doc__)
    options.add_argument("--model", default="Qwen2.5-0.5B")
    options.add_argument("--seq", type=int, default=256)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--data", type=Path, help="JSON lines of a real model's data")
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--serve", choices=[PEFT, *ROWS], help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments)
        return
    if arguments.data is None:
        for codec in (Codec.RAW, Codec.INT4A):
            with_tokenizer(random_store(arguments.model, codec), arguments.model)
    answers = measure((PEFT, *ROWS), arguments.steps, __file__)
    figures = {
        name: {
            "peak_MB": steps[-1]["peak"] / 1e6,
            "seconds": median([step["seconds"] for step in steps]),
            "losses": [step["loss"] for step in steps],
        }
        for name, steps in answers.items()
    }
    print(
        f"{arguments.model}, rank {RANK}, {arguments.batch} × {arguments.seq} tokens,"
        f" {arguments.steps} rounds"
    )
    print(f"{'':<50}{'peak MB':>9}{'s/step':>8}")
    for name, row in figures.items():
        print(f"{name:<50}{row['peak_MB']:>9.0f}{row['seconds']:>8.2f}")
    finish(arguments, figures, [])


if __name__ == "__main__":
    main()

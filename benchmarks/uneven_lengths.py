"""What a step over ranks loses to waiting where rows have unequal lengths: those of GSM8K, or of
any JSON lines.

    python benchmarks/uneven_lengths.py --model FOLDER [--data FILE.jsonl] [--json FILE]

In tokens: ranks that meet in every micro-batch (their blocks' weights are gathered from each other)
wait in each for the longest; ranks that meet once a step, or whose micro-batches visit a block
together, wait for the one with the most. In seconds: two ranks of one thread walk a small model
over such rows, and by turns over rows of one length with as many tokens a step."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import finish, median, parser
from benchmarks.sharded_runs import VOCABULARY, make_model

from tests.support.processes import run_ranks

WORLDS = (2, 4, 16, 64)
MICRO_BATCHES = (1, 4)
ROWS = (1, 4)
STEPS = 2000
MEASURED_STEPS = 12


def row_lengths(model: str, data: Path) -> Any:
    """Return the tokens of each record, prompt and completion together, int64 [N]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    texts = ["\n".join(str(value) for value in record.values()) for record in records]
    return np.array([len(ids) + 1 for ids in tokenizer(texts)["input_ids"]])


def drawn(lengths_N: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Return lengths drawn in the order of shuffled epochs."""
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape))
    epochs = [generator.permutation(lengths_N) for _ in range(-(-count // len(lengths_N)))]
    return np.concatenate(epochs)[:count].reshape(shape)


def lost(lengths_N: Any, world: int, micro_batches: int, rows: int) -> dict[str, float]:
    """Return shares of a step: its padding, and what ranks wait for each other."""
    tokens_TMWR = drawn(lengths_N, (STEPS, micro_batches, world, rows))
    walked_TMW = rows * tokens_TMWR.max(axis=3)  # a rank pads its own rows of a micro-batch
    work = walked_TMW.sum() / world
    return {
        "padding": 1 - float(tokens_TMWR.sum() / walked_TMW.sum()),
        "met in every micro-batch": 1 - float(work / walked_TMW.max(axis=2).sum()),
        "met once": 1 - float(work / walked_TMW.sum(axis=1).max(axis=1).sum()),
    }


def batches(lengths_N: Any, micro_batches: int, world: int) -> list[dict[str, torch.Tensor]]:
    """Return global batches of a row for each rank and micro-batch, padded to the longest."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for lengths_B in drawn(lengths_N, (MEASURED_STEPS, micro_batches * world)):
        shape = (len(lengths_B), int(lengths_B.max()))
        ids_BS = torch.randint(3, VOCABULARY, shape, generator=generator)
        mask_BS = torch.arange(shape[1]) < torch.from_numpy(lengths_B)[:, None]
        labels_BS = torch.where(mask_BS, ids_BS, -100)
        made.append({"input_ids": ids_BS, "attention_mask": mask_BS.long(), "labels": labels_BS})
    return made


def even(lengths_N: Any, micro_batches: int, world: int) -> list[dict[str, torch.Tensor]]:
    """Return batches of as many tokens a step, all rows as long as each other."""
    tokens_TB = drawn(lengths_N, (MEASURED_STEPS, micro_batches * world))
    return [
        batches(np.array([round(float(row.mean()))]), micro_batches, world)[0] for row in tokens_TB
    ]


def walked(rank: int, arguments: argparse.Namespace, lengths_N: Any) -> dict[str, Any]:
    """Return this rank's seconds of each step, by row of the table."""
    from blockwalk.plan.methods import method
    from blockwalk.walk.walker import Walker

    torch.set_num_threads(1)
    world = dist.get_world_size()
    seconds: dict[str, Any] = {}
    for micro_batches, together in ((1, 1), (4, 1), (4, 4)):
        plan = method(
            "fcdp",
            mesh={"world": world, "ranks_per_node": world},
            gradient_accumulation_steps=micro_batches,
            together=together,
        )
        kinds = {
            "uneven": batches(lengths_N, micro_batches, world),
            "even": even(lengths_N, micro_batches, world),
        }
        with Walker(make_model(arguments, lora=False), plan, device="cpu") as walker:
            row: dict[str, list[float]] = {kind: [] for kind in kinds}
            for warm in (True, False):
                for step, kind in itertools.product(range(MEASURED_STEPS), kinds):
                    dist.barrier()
                    began = time.perf_counter()
                    walker.step(kinds[kind][step])
                    walker.flush()
                    dist.barrier()
                    if not warm:
                        row[kind].append(time.perf_counter() - began)
        seconds[f"A = {micro_batches}, together {together}"] = row
    return seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True, help="a folder with a tokenizer")
    options.add_argument(
        "--data", type=Path, default=Path("/work/shared/real/gsm8k/gsm8k_train.jsonl")
    )
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--layers", type=int, default=6)
    arguments = options.parse_args()
    lengths_N = row_lengths(arguments.model, arguments.data)
    quantiles = np.quantile(lengths_N, [0, 0.5, 0.95, 1]).tolist()
    print(f"{len(lengths_N)} rows of {quantiles} tokens (least, median, 95%, most)")
    figures: dict[str, Any] = {"lengths": quantiles, "tokens": {}, "seconds": {}}
    for world, micro_batches, rows in itertools.product(WORLDS, MICRO_BATCHES, ROWS):
        shares = lost(lengths_N, world, micro_batches, rows)
        name = f"{world} ranks, A = {micro_batches}, {rows} rows"
        figures["tokens"][name] = shares
        print(f"  {name:<28} " + "  ".join(f"{what} {x:.3f}" for what, x in shares.items()))
    import blockwalk.walk.walker  # noqa: F401  # imported and certified once, before ranks are forked
    from blockwalk.cutting.verify import certified

    certified(make_model(arguments, lora=False))
    short_N = np.minimum(lengths_N, 250)  # the model has 256 positions
    for name, row in run_ranks(2, walked, arguments, short_N, timeout=500)[0].items():
        ratio = median([a / b for a, b in zip(row["uneven"], row["even"], strict=True)])
        shares = lost(short_N, 2, int(name.split()[2].rstrip(",")), 1)
        figures["seconds"][name] = {"uneven / even": ratio, "of tokens": shares, **row}
        print(f"  2 ranks, {name}: uneven ÷ even {ratio:.3f}")
    finish(arguments, figures, [])


if __name__ == "__main__":
    main()

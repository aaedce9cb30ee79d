"""What a step over ranks loses to waiting where rows have unequal lengths: those of GSM8K, or of
any JSON lines.

    python benchmarks/uneven_lengths.py --model FOLDER --data FILE.jsonl [--check] [--json FILE]

In tokens, over many steps: ranks that meet in every micro-batch, because they gather blocks from
each other, wait in each for the one with the most tokens; ranks that meet once a step, for the one
with the most tokens of the step. Rows of a micro-batch lie side by side, filled up to whole tiles.

In seconds: two ranks with a core each walk a small model over such rows, and by turns over rows of
one length. A rank waits while it computes no micro-batch, longer than with rows of one length. What
is foreseen of that is made of the ranks' own seconds of each micro-batch."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bound, finish, median, parser
from benchmarks.sharded_runs import VOCABULARY, make_model

from tests.support.processes import run_ranks

WORLDS = (2, 4, 16, 64)
MICRO_BATCHES = (1, 4)
ROWS = (1, 4)
STEPS = 2000
TILE = 64
"""Tokens that the rows of a micro-batch are filled up to a multiple of."""
SYSTEMS: dict[str, tuple[str, int, int]] = {
    "zero3, a micro-batch at a time": ("zero3", 2, 1),
    "zero3, all micro-batches together": ("zero3", 2, 4),
    "mics, two nodes of one rank": ("mics", 1, 1),
}
"""Method, ranks of a node, and micro-batches a visit of a block: ranks that meet in every
micro-batch, in every block once a step, and at the step's end."""
A = 4
"""Micro-batches of the measured steps."""
COMPUTES = ("PROLOGUE", "FORWARD", "LOSS", "BACKWARD", "PROLOGUE_BACKWARD")
"""Ops that compute a micro-batch."""


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
    """Return shares of a step's time, by tokens: filling, and what ranks wait for each other."""
    tokens_TMW = drawn(lengths_N, (STEPS, micro_batches, world, rows)).sum(axis=3)
    walked_TMW = -(-tokens_TMW // TILE) * TILE
    work = walked_TMW.sum() / world
    return {
        "filling": 1 - float(tokens_TMW.sum() / walked_TMW.sum()),
        "met in every micro-batch": 1 - float(work / walked_TMW.max(axis=2).sum()),
        "met once": 1 - float(work / walked_TMW.sum(axis=1).max(axis=1).sum()),
    }


def batches(lengths_TB: Any) -> list[dict[str, torch.Tensor]]:
    """Return global batches of a row for each micro-batch and rank, padded to the longest."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for lengths_B in lengths_TB:
        shape = (len(lengths_B), int(lengths_B.max()))
        ids_BS = torch.randint(3, VOCABULARY, shape, generator=generator)
        mask_BS = torch.arange(shape[1]) < torch.from_numpy(lengths_B)[:, None]
        labels_BS = torch.where(mask_BS, ids_BS, -100)
        made.append({"input_ids": ids_BS, "attention_mask": mask_BS.long(), "labels": labels_BS})
    return made


def walked(rank: int, arguments: argparse.Namespace, lengths_N: Any) -> dict[str, Any]:
    """Return this rank's steps by system and kind of rows: the seconds of each, and those of its
    compute lane by micro-batch and beside these."""
    from blockwalk.plan.methods import method
    from blockwalk.walk.walker import Walker

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    world = dist.get_world_size()
    uneven_TB = drawn(lengths_N, (arguments.rounds, A * world))
    even_TB = np.full_like(uneven_TB, round(float(lengths_N.mean())))
    kinds = {"uneven": batches(uneven_TB), "even": batches(even_TB)}
    answers: dict[str, Any] = {}
    for name, (row, ranks_per_node, together) in SYSTEMS.items():
        plan = method(
            row,
            mesh={"world": world, "ranks_per_node": ranks_per_node},
            gradient_accumulation_steps=A,
            together=together,
        )
        with Walker(make_model(arguments, lora=False), plan, device="cpu") as walker:
            answers[name] = {kind: [] for kind in kinds}
            for warm in (True, False):
                for step, kind in itertools.product(range(arguments.rounds), kinds):
                    answer = _one_step(walker, kinds[kind][step])
                    if not warm:
                        answers[name][kind].append(answer)
    return answers


def _one_step(walker: Any, batch: dict[str, torch.Tensor]) -> tuple[float, list[float]]:
    """Return the seconds of a step, and those that the rank computes in each micro-batch."""
    walker.timeline = []
    dist.barrier()
    began = time.perf_counter()
    walker.step(batch)
    dist.barrier()
    seconds = time.perf_counter() - began
    computed = [0.0] * A
    for _, ops in walker.timeline:
        for op, op_began, op_ended in ops:
            if op.kind in COMPUTES:
                computed[op.micro_batch] += op_ended - op_began
    return seconds, computed


def shares(answers: list[Any], name: str, meets_once: bool) -> dict[str, float]:
    """Return shares of the seconds of steps over uneven rows: those in which a rank computed no
    micro-batch, beyond those of even rows; and what is foreseen of them by the ranks' own seconds
    of each micro-batch."""
    seconds_T, computed_TMW = _measured(answers, name, "uneven")
    still = seconds_T.sum() - computed_TMW.sum() / len(answers)
    even_T, of_even_TMW = _measured(answers, name, "even")
    still_when_even = even_T.sum() - of_even_TMW.sum() / len(answers)
    met = computed_TMW.sum(axis=1).max(axis=1) if meets_once else computed_TMW.max(axis=2)
    waits = met.sum() - computed_TMW.sum() / len(answers)
    return {
        "seconds, uneven": median(seconds_T.tolist()),
        "seconds, even": median(even_T.tolist()),
        "waited": float((still - still_when_even) / seconds_T.sum()),
        "foreseen": float(waits / seconds_T.sum()),
    }


def _measured(answers: list[Any], name: str, kind: str) -> tuple[Any, Any]:
    """Return the seconds of each step, [T], and those that each rank computes in each of its
    micro-batches, [T, M, W]."""
    seconds_WT = np.array([[seconds for seconds, _ in answer[name][kind]] for answer in answers])
    computed_WTM = np.array([[row for _, row in answer[name][kind]] for answer in answers])
    return seconds_WT.max(axis=0), computed_WTM.transpose(1, 2, 0)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True, help="a folder with a tokenizer")
    options.add_argument(
        "--data", type=Path, required=True, help="a file of JSON lines, such as GSM8K"
    )
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--rounds", type=int, default=12, help="measured steps of each kind")
    arguments = options.parse_args()
    lengths_N = row_lengths(arguments.model, arguments.data)
    quantiles = np.quantile(lengths_N, [0, 0.5, 0.95, 1]).tolist()
    print(f"{len(lengths_N)} rows of {quantiles} tokens (least, median, 95%, most)")
    figures: dict[str, Any] = {"lengths": quantiles, "tokens": {}, "seconds": {}}
    for world, micro_batches, rows in itertools.product(WORLDS, MICRO_BATCHES, ROWS):
        of_tokens = lost(lengths_N, world, micro_batches, rows)
        name = f"{world} ranks, A = {micro_batches}, {rows} rows"
        figures["tokens"][name] = of_tokens
        print(f"  {name:<28} " + "  ".join(f"{what} {x:.3f}" for what, x in of_tokens.items()))
    import blockwalk.walk.walker  # noqa: F401  # imported and certified once, before ranks are forked
    from blockwalk.cutting.verify import certified

    certified(make_model(arguments, lora=False))
    answers = run_ranks(2, walked, arguments, lengths_N, timeout=500)
    bounds = []
    for name, (row, _, together) in SYSTEMS.items():
        figures["seconds"][name] = row_figures = shares(
            answers, name, row == "mics" or together == A
        )
        print(f"  {name:<36} " + "  ".join(f"{what} {x:.3f}" for what, x in row_figures.items()))
        difference = abs(row_figures["waited"] - row_figures["foreseen"])
        bounds.append(Bound(f"{name}: waited, beside what is foreseen", difference, 0.05))
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

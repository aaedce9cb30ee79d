"""Blocks over stages: beside one process, on paper, when a stage dies, beside torch's pipelines.

    python benchmarks/pipeline.py [--part exact mixed order gathers paper random kills peer]
        [--check] [--json FILE] [--seconds 480]

``exact``: gradients of nine families of models on 2 and 4 stages, by chunks and micro-batches, and
20 steps of AdamW with clipping, beside the same walk by one process. ``mixed``: stages of two ranks
that share state, or parts of sequences, beside one process. ``order``: compute ops of a stage
beside torch.distributed.pipelining's tables. ``gathers``: those of a step, with chunks that stay
and without. ``paper``: 2,000 random plans whose stages are run together by the simulator.
``random``: 20 of them on four ranks. ``kills``: a stage that dies or is stopped at a random moment,
50 times, and the run that goes on from the checkpoint before. ``peer``: a step by
torch.distributed.pipelining with FSDP2 beside ours, in turns (root).

A part goes by pieces. With ``--json`` each piece is written when it is done, and a call goes on
with those that the file lacks, for ``--seconds``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Bound, finish, median, parser
from benchmarks.pipeline_deaths import ENDS_WITHIN, deaths
from benchmarks.pipeline_peer import RATES, ROUNDS, rounds
from benchmarks.pipeline_runs import MIXED, exact, mixed, random_runs, seeds_of_four_ranks

from blockwalk.program.program import OpKind, Pool
from blockwalk.program.stages import visits
from tests.closed_form.test_stages import moves, of_torch, walk_on_paper
from tests.ranks.test_stages import KINDS

Figures = dict[str, Any]
Piece = tuple[str, Callable[[], Any]]
"""A piece's name, which begins with its part's, and the function that makes its figures."""

PROGRAMS = 2000
RUNS = 20
DEATHS = 50
_PAPER_AT_ONCE = 100
_DEATHS_AT_ONCE = 5


def order() -> dict[str, int]:
    """Compare the visits of every stage with torch's, and count those that differ."""
    compared = 0
    unlike = 0
    for stages, chunks, groups in product(range(2, 9), (1, 2, 3, 4), range(1, 33)):
        if chunks == 1 and groups < stages:
            continue  # torch takes no fewer
        if groups % max(1, groups // stages):
            continue  # nor does it take these in rounds
        for stage, expected in of_torch(stages, chunks, groups).items():
            compared += 1
            unlike += visits(stage, stages, chunks, groups) != expected
    return {"compared": compared, "unlike": unlike}


def gathered(chunks: int) -> dict[str, Any]:
    """Count the gathers of a step, and the bytes that reuse adds on a stage, beside a chunk's."""
    count, programs = moves(OpKind.GATHER, 2, chunks)
    without, plain = moves(OpKind.GATHER, 2, chunks, reuse=False)
    share = max(
        (program.peaks()[Pool.DEVICE] - other.peaks()[Pool.DEVICE]) / (largest * program.slot_bytes)
        for (program, largest), (other, _) in zip(programs, plain, strict=True)
    )
    return {"with": count, "without": without, "chunks more on the device": share}


def on_paper(start: int, stop: int) -> dict[str, Any]:
    """Walk random plans on paper, and return what broke, by seed."""
    broken = {}
    for seed in range(start, stop):
        try:
            walk_on_paper(seed)
        except AssertionError as error:
            broken[seed] = str(error)[:200]
    return {"plans": stop - start, "broken": broken}


def pieces(parts: list[str]) -> Iterator[Piece]:
    """Yield the pieces of some parts."""
    if "exact" in parts:
        for stages, kind in product((2, 4), KINDS):
            yield f"exact, {kind} on {stages} stages", partial(exact, kind, stages)
    if "mixed" in parts:
        for kind in MIXED:
            yield f"mixed, {kind}", partial(mixed, kind)
    if "order" in parts:
        yield "order", order
    if "gathers" in parts:
        for chunks in (1, 2):
            yield f"gathers, {chunks} chunks a stage", partial(gathered, chunks)
    if "paper" in parts:
        for start in range(1000, 1000 + PROGRAMS, _PAPER_AT_ONCE):
            stop = start + _PAPER_AT_ONCE
            yield f"paper, seeds {start} to {stop - 1}", partial(on_paper, start, stop)
    if "random" in parts:
        for stages, seeds in seeds_of_four_ranks(RUNS).items():
            yield f"random, {stages} stages", partial(random_runs, stages, seeds)
    if "kills" in parts:
        for start in range(0, DEATHS, _DEATHS_AT_ONCE):
            numbers = range(start, start + _DEATHS_AT_ONCE)
            yield f"kills {start + 1} to {numbers.stop}", partial(deaths, numbers)
    if "peer" in parts:
        for rate in RATES:
            yield f"peer, {rate or 'unshaped'}", partial(rounds, rate)


def bounds_of(figures: Figures, parts: list[str]) -> Iterator[Bound]:
    """Yield the promises of some parts, from the figures of their pieces."""
    of_part = {part: [v for k, v in figures.items() if k.startswith(part)] for part in parts}
    if of := of_part.get("exact"):
        combinations = sum(f["combinations"] for f in of)
        name = f"gradients with other bits than one process's, {combinations} combinations"
        yield Bound(name, sum(f["unlike"] for f in of), 0)
        worst = max(f["worst tied"] for f in of)
        yield Bound("tied ends: the worst gradient's difference, of its norm", worst, 1e-6)
        count = sum(f["runs"] for f in of)
        name = f"{count} runs of 20 steps of AdamW with clipping: those with other bits"
        yield Bound(name, sum(f["runs unlike"] for f in of), 0)
    if of := of_part.get("mixed"):
        worst = max(f["worst"] for f in of)
        combinations = sum(f["combinations"] for f in of)
        name = f"stages × sharding, stages × context, {combinations} combinations: worst difference"
        yield Bound(name, worst, 1e-6)
    for f in of_part.get("order", []):
        yield Bound(f"orders of {f['compared']} stages unlike torch's", f["unlike"], 0)
    for f in of_part.get("gathers", []):
        name = "gathers with reuse ÷ without, 2 stages, 8 micro-batches"
        yield Bound(name, f["with"] / f["without"], 0.55)
        yield Bound("chunks more on the device with reuse", f["chunks more on the device"], 1)
    if of := of_part.get("paper"):
        count = sum(f["plans"] for f in of)
        broken = sum(len(f["broken"]) for f in of)
        yield Bound(f"random plans of {count} that wait, leak or idle more", broken, 0)
    if of := of_part.get("random"):
        count = sum(f["plans"] for f in of)
        worst = max(f["worst"] for f in of)
        yield Bound(f"{count} random plans on 4 ranks: worst difference of a loss", worst, 1e-6)
    if of := of_part.get("kills"):
        all_deaths = [death for f in of for death in f]
        seconds = max(death["seconds"] for death in all_deaths)
        name = f"{len(all_deaths)} deaths: seconds until the other stage has ended, worst"
        yield Bound(name, seconds, ENDS_WITHIN)
        silent = sum(not death["named"] for death in all_deaths)
        yield Bound("deaths without a line that names the rank", silent, 0)
        unlike = sum(not death["same"] for death in all_deaths)
        yield Bound("runs that went on with other bits", unlike, 0)
    for rate in RATES if "peer" in parts else ():
        if f := figures.get(f"peer, {rate or 'unshaped'}"):
            theirs = median(f["seconds"][f["peer"]])
            lean = median(f["seconds"]["ours"]) / theirs
            name = f"a step with shared sums ÷ that of {f['peer']}, {rate or 'unshaped'}"
            rests = f"{ROUNDS} rounds in turn; {lean:.3f} without them"
            yield Bound(name, median(f["seconds"]["ours, shared sums"]) / theirs, 1.05, rests=rests)


PARTS = ("exact", "mixed", "order", "gathers", "paper", "random", "kills", "peer")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--seconds", type=float, default=1e9, help="begin no piece after these")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    file = Path(arguments.json) if arguments.json else None
    figures: Figures = json.loads(file.read_text())["figures"] if file and file.exists() else {}
    todo = [(name, make) for name, make in pieces(arguments.part) if name not in figures]
    for number, (name, make) in enumerate(todo):
        if time.monotonic() - began > arguments.seconds:
            print(f"{len(todo) - number} pieces are left: call this again")
            break
        figures[name] = make()
        print(f"{name}: {json.dumps(figures[name])[:300]}", flush=True)
        if file is not None:
            file.write_text(json.dumps({"figures": figures}) + "\n")
    finish(arguments, figures, list(bounds_of(figures, list(PARTS))))


if __name__ == "__main__":
    main()

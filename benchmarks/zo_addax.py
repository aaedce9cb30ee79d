"""Addax beside what it is made of: long rows by two forward passes, short ones by gradients, in one
step.

Li et al., "Addax: Utilizing Zeroth-Order Gradients to Improve Memory Efficiency and Performance of
SGD for Fine-Tuning Language Models" (2024): θ ← θ − η·(α·g·z + (1 − α)·∇L), g from the rows of a
batch that are long, ∇L from the others. Here it is a plain loop in memory, for it is to be known
whether the method is worth a place in the engine: all parameters of ``examples/tiny-llama`` in
float32 on its sentiment task, the longer half of each batch of 16 by g·z. Beside it are the shorter
half alone (α = 0) and gradients of all rows, both with plain SGD as Addax has it. A forward pass is
counted on a whole batch: gradients of n of 16 rows count 4·n/16, two passes over n rows 2·n/16.
Rate and α are those, of a grid, whose run with seed 0 at two thirds of the forward passes ends with
the lowest held-out loss.

    python benchmarks/zo_addax.py [--forwards 360] [--seeds 0 1 2 3 4] [--jobs 2] [--json FILE]
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.common import finish, parser
from benchmarks.zo_converge import ROOT, task

from blockwalk import Walker, method
from blockwalk.data.batching import Batches

BATCH = 16
EPSILON = 1e-3
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
ADDAX = "Addax"
SHORT = "short rows alone"
ALL = "all rows by gradients"
CASES: dict[str, tuple[float, tuple[float, ...]]] = {
    ADDAX: (3.0, (3e-4, 1e-3, 3e-3, 1e-2)),
    SHORT: (2.0, (0.0,)),
    ALL: (4.0, (0.0,)),
}
"""Forward passes of a step, and the values of α that are tried."""


@dataclass(frozen=True)
class Run:
    case: str
    rate: float
    alpha: float
    seed: int
    forwards: int


@dataclass(frozen=True)
class End:
    """Where a run ended on held-out records, and the processor's seconds of its steps."""

    accuracy: float
    loss: float
    seconds: float


def step_(model: Any, batch: Mapping[str, torch.Tensor], run: Run, number: int) -> None:
    """One update of the model in place; the mean loss of each part is weighed by α as the paper's
    equation has it."""
    by_length = batch["attention_mask"].sum(1).argsort(stable=True)
    half = BATCH if run.case == ALL else BATCH // 2
    short, long = (
        {key: rows[part] for key, rows in batch.items()}
        for part in (by_length[:half], by_length[half:])
    )
    parameters = list(model.parameters())
    weights = [p.detach().clone() for p in parameters]
    projected = 0.0
    noise = []
    if run.alpha:
        generator = torch.Generator().manual_seed(1000 * run.seed + number)
        noise = [torch.randn(p.shape, generator=generator) for p in parameters]
        losses = []
        for sign in (1.0, -1.0):
            for p, weight, z in zip(parameters, weights, noise, strict=True):
                p.data = weight + sign * EPSILON * z
            with torch.no_grad():
                losses.append(float(model(**long).loss))
        projected = (losses[0] - losses[1]) / (2 * EPSILON)
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight
    gradients = torch.autograd.grad(model(**short).loss, parameters)
    for index, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        p.data -= run.rate * (1 - run.alpha) * gradient
        if run.alpha:
            p.data -= run.rate * run.alpha * projected * noise[index]


def train(run: Run) -> End:
    """One run, in a process of one thread."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    rows, held_out = task(0)
    batches = Batches(rows.answered(), BATCH, seed=run.seed, padding_multiple=8)
    model = AutoModelForCausalLM.from_pretrained(
        ROOT / "examples/tiny-llama", dtype=torch.float32
    ).eval()
    seconds = 0.0
    for number in range(int(run.forwards / CASES[run.case][0])):
        batch = next(batches)
        began = time.process_time()
        step_(model, batch, run, number)
        seconds += time.process_time() - began
    with Walker(copy.deepcopy(model), method("plain"), device="cpu") as walker:
        evaluation = held_out.evaluate(walker)
    assert evaluation.accuracy is not None
    return End(evaluation.accuracy, evaluation.loss, seconds)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--forwards", type=int, default=360)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options.add_argument("--jobs", type=int, default=2)
    arguments = options.parse_args()
    figures: dict[str, Any] = {}
    print(f"{'':<22} {'rate':>6} {'α':>7} {'seconds':>8} {'loss':>6}  accuracy by seed")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for case, (_, alphas) in CASES.items():
            grid = [
                Run(case, *both, 0, arguments.forwards * 2 // 3) for both in product(RATES, alphas)
            ]
            tried = dict(zip(grid, pool.map(train, grid), strict=True))
            best = min(
                tried,
                key=lambda run: (
                    tried[run].loss if tried[run].loss == tried[run].loss else float("inf")
                ),
            )
            runs = [
                Run(case, best.rate, best.alpha, seed, arguments.forwards)
                for seed in arguments.seeds
            ]
            ends = list(pool.map(train, runs))
            loss, seconds = (
                statistics.fmean(values)
                for values in zip(*((e.loss, e.seconds) for e in ends), strict=True)
            )
            accuracies = "  ".join(f"{100 * end.accuracy:.1f}%" for end in ends)
            print(
                f"{case:<22} {best.rate:>6g} {best.alpha:>7g} {seconds:>8.1f} {loss:>6.3f} "
                f" {accuracies}",
                flush=True,
            )
            figures[case] = {
                "rate": best.rate,
                "alpha": best.alpha,
                "ends": [vars(end) for end in ends],
            }
            figures[case]["grid"] = [{**vars(run), **vars(end)} for run, end in tried.items()]
    finish(arguments, figures, [])


if __name__ == "__main__":
    main()

"""``compile: true`` beside ``compile: false``: seconds of a step, seconds of compiling, and how far
the results are apart.

The example model (or ``--model``), all parameters in float32, ``mezo``, ``zo2`` with its blocks on
disk, and exact gradients (``plain``). Cases take one step each in turn; medians over ``--steps``.
One graph serves every block of a kind, so compiling takes as long for eighty blocks as for two.

    python benchmarks/compiled.py [--model examples/tiny-llama] [--batch 16] [--seq 64] [--steps 7]
    [--json FILE] [--check]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Bound, finish, interleaved, median, parser, random_batch

from blockwalk import Walker, method

ROOT = Path(__file__).resolve().parents[1]
CASES: dict[str, dict[str, Any]] = {
    "mezo": {"name": "mezo", "optimizer": {"learning_rate": 1e-6}},
    "zo2": {
        "name": "zo2",
        "trainable": "disk",
        "frozen": "disk",
        "optimizer": {"learning_rate": 1e-6},
    },
    "plain": {"name": "plain", "optimizer": {"learning_rate": 1e-6}},
}
APART = 1e-4
"""Of the loss, relatively, after all steps: float32 sums in another order."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default=str(ROOT / "examples/tiny-llama"))
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--seq", type=int, default=64)
    options.add_argument("--steps", type=int, default=7)
    options.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = options.parse_args()
    figures = []
    bounds = []
    print(
        f"{'method':<8} {'eager s':>9} {'compiled s':>11} {'speedup':>8} {'compiling s':>12}"
        f" {'losses apart':>13}"
    )
    for name in arguments.case:
        losses: dict[str, list[float]] = {"eager": [], "compiled": []}
        with ExitStack() as stack:

            def stepper(walker: Walker, into: list[float]) -> Callable[[], float]:
                def step() -> float:
                    data = random_batch(
                        walker.spec.vocab_size, arguments.batch, arguments.seq, seed=len(into)
                    )
                    began = time.perf_counter()
                    into.append(walker.step(data).loss)
                    return time.perf_counter() - began

                return step

            runs = {}
            for case in losses:
                plan = method(**CASES[name], compute_dtype="float32", compile=case == "compiled")
                runs[case] = stepper(
                    stack.enter_context(Walker(arguments.model, plan, device="cpu")), losses[case]
                )
            first_results = {case: run() for case, run in runs.items()}
            seconds = {
                case: median(values) for case, values in interleaved(runs, arguments.steps).items()
            }
        difference = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
        row = {"method": name, "eager_s": seconds["eager"], "compiled_s": seconds["compiled"],
               "compiling_s": first_results["compiled"] - seconds["compiled"],
               "losses_apart": difference}  # fmt: skip
        figures.append(row)
        speedup = seconds["eager"] / seconds["compiled"]
        print(
            f"{name:<8} {row['eager_s']:>9.3f} {row['compiled_s']:>11.3f} {speedup:>8.2f}"
            f" {row['compiling_s']:>12.1f} {difference:>13.1e}",
            flush=True,
        )
        bounds.append(Bound(f"{name}: losses apart", difference, APART))
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

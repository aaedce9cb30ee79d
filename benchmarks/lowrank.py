"""Low-rank noise beside Gaussian noise, and an int4 base on disk beside a resident one; four
queries a step.

All parameters of a bfloat16 model of random weights are trained in memory, by Gaussian and by
low-rank noise: the same matrices and vectors. Then a LoRA of every linear layer, by low-rank noise,
on the same model in memory, and on one in int4 on disk. The cases of a table take one step each in
turn, every other round in the opposite order; a ratio is the median of those within a round. A
table stands by itself: no more than two models lie in memory.

    python benchmarks/lowrank.py [--model Qwen2.5-0.5B] [--shape 1x64 2x256] [--rounds 5]
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WARM = 2
"""Rounds that do not count."""
BOUNDS = {"1x64": 2.0, "2x256": 1.2}
"""Tokens a second with low-rank noise by those with Gaussian noise, at least."""
ON_DISK = 0.95
"""Tokens a second of low-rank noise with the base in int4 on disk by those with it in bfloat16 in
memory, at least."""
GAUSSIAN = "Gaussian"
LOW = "low rank"
LORA = "low rank, LoRA"
DISK = "low rank, LoRA, base int4 on disk"
TABLES = ((GAUSSIAN, LOW), (LORA, DISK), (LOW, DISK))


def measure(name: str, cases: tuple[str, ...], shape: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, by case, all cases in turn."""
    from benchmarks.common import interleaved, random_store
    from benchmarks.zo_runs import stepper

    from blockwalk import Walker, method
    from blockwalk.plan.placement import Codec

    batch, _, sequence = shape.partition("x")
    runs = {}  # type: ignore[var-annotated]
    seconds = {case: [] for case in cases}
    with ExitStack() as stack:
        for case in cases:
            zo = {"noise": "gaussian" if case == GAUSSIAN else "lowrank", "queries": 4}
            store = random_store(name, Codec.INT4 if case == DISK else Codec.RAW, "bfloat16")
            settings: dict[str, Any] = {"frozen": "disk × int4"} if case == DISK else {}
            plan = method("zo2" if case == DISK else "mezo", zo=zo, **settings)
            lora = {"rank": 8} if case in (LORA, DISK) else None
            walker = stack.enter_context(Walker(store, plan, lora=lora, device="cpu"))
            runs[case] = stepper(walker, int(batch), int(sequence))
        interleaved(runs, WARM)
        for number in range(rounds):
            for case, values in interleaved(
                dict(reversed(runs.items())) if number % 2 else runs, 1
            ).items():
                seconds[case] += values
    return seconds


def main() -> None:
    from benchmarks.common import Bound, finish, median, parser

    options = parser(__doc__)
    options.add_argument("--model", default="Qwen2.5-0.5B")
    options.add_argument("--shape", nargs="+", default=list(BOUNDS), help="batch x tokens")
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    figures: list[dict[str, Any]] = []
    bounds: list[Bound] = []
    for shape in arguments.shape:
        batch, _, sequence = shape.partition("x")
        for first, second in TABLES:
            load = os.getloadavg()[0]
            seconds = measure(arguments.model, (first, second), shape, arguments.rounds)
            ratio = median([a / b for a, b in zip(seconds[first], seconds[second], strict=True)])
            print(f"{shape}, load {load:.1f}: {second} by {first}: {ratio:.3f}", flush=True)
            for case, each in seconds.items():
                rate = int(batch) * int(sequence) / median(each)
                print(
                    f"  {case:<34} {rate:8.1f} tokens/s  " + " ".join(f"{s:.2f}" for s in each),
                    flush=True,
                )
                figures.append(
                    {"shape": shape, "case": case, "beside": [first, second], "tokens_per_s": rate}
                )
            limit = BOUNDS.get(shape, 1.0) if first == GAUSSIAN else ON_DISK
            bounds.append(Bound(f"{shape}: {second} by {first}", ratio, limit, at_most=False))
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

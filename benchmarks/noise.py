"""How fast noise is made: draws a second of each generator, beside torch's normal_ and numpy's.

    python benchmarks/noise.py [--elements 4194304] [--threads 1] [--device cpu] [--json FILE]
    [--check]

All cases run in turn, five rounds, and the median is printed: a neighbour's load then falls on all
of them alike. Times include reading and writing the result's memory. ``--check`` exits with 1 where
a bound is missed: Gaussian draws at least as fast as ``torch.normal_``, Rademacher draws 1.3 times
that (what the zeroth-order methods count on)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.common import Bound, finish, interleaved, median, parser

from blockwalk.numerics.noise.key import NoiseKey
from blockwalk.numerics.noise.noise import fill_, perturbed, random_uint16, stochastic_round
from tests.support.native import by

KEY = NoiseKey(0, 0, 0, "weight")
ROUNDING = NoiseKey(0, 0, 0, "weight", "rounding")


def cases(elements: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Name to what is timed; each makes ``elements`` draws into memory that is there already."""
    z = torch.zeros(elements, device=device)
    half = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    half_out = torch.zeros_like(half)
    words = torch.zeros(elements, dtype=torch.int32, device=device)
    table: dict[str, Callable[[], object]] = {
        "torch normal_": z.normal_,
        "gaussian": lambda: fill_(z, KEY),
        "rademacher": lambda: fill_(z, KEY, 0, "rademacher"),
        "w += s z, float32, gaussian": lambda: perturbed(z, z, KEY, 0, 1e-9),
        "w += s z, float32, rademacher": lambda: perturbed(z, z, KEY, 0, 1e-9, "rademacher"),
        "w + s z, bfloat16, gaussian": lambda: perturbed(half, half_out, KEY, 0, 1e-3),
        "w + s z, bfloat16, rademacher": lambda: perturbed(
            half, half_out, KEY, 0, 1e-3, "rademacher"
        ),
        "w += s z, bfloat16, gaussian, stochastic": lambda: perturbed(
            half, half, KEY, 0, 1e-3, rounding=ROUNDING
        ),
        "float32 to bfloat16, stochastic": lambda: stochastic_round(z, half, ROUNDING),
        "16-bit words": lambda: random_uint16(KEY, 0, words),
    }
    if device.type == "cpu":
        normal = np.random.Generator(np.random.SFC64(0))
        array = z.numpy()
        table["numpy standard_normal"] = lambda: normal.standard_normal(out=array, dtype=np.float32)
        table["gaussian, without a compiler"] = lambda: by(False, fill_, z, KEY)
        table["rademacher, without a compiler"] = lambda: by(False, fill_, z, KEY, 0, "rademacher")
    return table


def measure(elements: int, device: torch.device) -> dict[str, float]:
    """Millions of draws a second by case: medians over rounds in which every case runs once."""

    def timed(run: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            if device.type != "cpu":
                torch.accelerator.synchronize()
            start = time.perf_counter()
            run()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            return time.perf_counter() - start

        return seconds

    runs = {name: timed(run) for name, run in cases(elements, device).items()}
    for run in runs.values():  # compile, and touch the memory
        run()
    return {name: elements / median(seconds) / 1e6 for name, seconds in interleaved(runs).items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--elements", type=int, default=1 << 22)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--device", default="cpu")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    rates = measure(arguments.elements, torch.device(arguments.device))
    base = rates["torch normal_"]
    print(f"{arguments.elements:,} draws, {arguments.threads} thread(s), {arguments.device}")
    for name, rate in rates.items():
        print(f"  {name:42} {rate:9,.0f} M/s   {rate / base:6.2f} × torch normal_")
    bounds = [
        Bound("gaussian / torch normal_", rates["gaussian"] / base, 1.0, at_most=False),
        Bound("rademacher / torch normal_", rates["rademacher"] / base, 1.3, at_most=False),
    ]
    settings = {name: getattr(arguments, name) for name in ("elements", "threads", "device")}
    finish(arguments, {**settings, "million_draws_per_second": rates}, bounds)


if __name__ == "__main__":
    main()

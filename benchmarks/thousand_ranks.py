"""One rank of 1,024 on paper: seconds and memory to compile a step of Llama-3.1-405B.

    python benchmarks/thousand_ranks.py [--check] [--json FILE]

Each method compiles in a process of its own, the median of five; memory is the highest that the
process held, interpreter and libraries included. No weight and no other rank is needed."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

METHODS = ("zero3", "fcdp", "hzp")
MICRO_BATCHES = 64
SECONDS = 2.0
MEGABYTES = 300.0
ROUNDS = 5


def compiled(name: str) -> dict[str, float]:
    """Compile a step in this process."""
    from blockwalk.plan.methods import method
    from blockwalk.program.compile import compile
    from blockwalk.program.program import Shape, StepKind
    from blockwalk.simulate.planner import steady
    from tests.given import decoder

    model = decoder(layers=126, hidden=16384, wide=53248, keys=1024, vocab=128256, tied=False)
    mesh = {"world": 1024, "ranks_per_node": 8}
    plan = method(name, mesh=mesh, gradient_accumulation_steps=MICRO_BATCHES)
    pending = steady(plan, model)
    began = time.perf_counter()
    program = compile(plan, model, StepKind.TRAIN, Shape(1, 4096), pending=pending, device="cuda")
    seconds = time.perf_counter() - began
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"ops": len(program.ops), "seconds": seconds, "MB": highest}


def in_own_process(name: str) -> dict[str, float]:
    """Compile a step in a fresh process."""
    command = [sys.executable, __file__, "--method", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print each method's figures."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--method", help=argparse.SUPPRESS)
    options.add_argument("--json", metavar="FILE")
    options.add_argument("--check", action="store_true")
    arguments = options.parse_args()
    if arguments.method:
        print(json.dumps(compiled(arguments.method)))
        return
    from benchmarks.common import Bound, finish, median

    figures: dict[str, Any] = {}
    bounds = []
    for name in METHODS:
        runs = [in_own_process(name) for _ in range(ROUNDS)]
        found = {key: median([run[key] for run in runs]) for key in runs[0]}
        figures[name] = found
        print(f"{name}: {found['ops']:,.0f} ops, {found['seconds']:.2f} s, {found['MB']:.0f} MB")
        bounds.append(Bound(f"{name}, seconds to compile a step", found["seconds"], SECONDS))
        bounds.append(Bound(f"{name}, MB of its process", found["MB"], MEGABYTES))
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

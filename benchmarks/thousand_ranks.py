"""One rank of 1,024 on paper: seconds and memory to compile a step of Llama-3.1-405B, and to open
the model, of which the rank's slices are counted and not allocated.

    python benchmarks/thousand_ranks.py [--part compile|open ...] [--check] [--json FILE]

Each method compiles, or opens, in a process of its own, the median of so many; memory is the
highest that the process held, interpreter and libraries included. No weight and no other rank is
needed: the model is on torch's meta device, the ranks are its fake process group."""

from __future__ import annotations

import argparse
import itertools
import json
import os
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
SECONDS_TO_OPEN = 60.0
ROUNDS = {"compile": 5, "open": 3}


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


def opened(name: str) -> dict[str, float]:
    """Open the model in this process, as rank 0 of a group that nobody else is in."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, LlamaConfig

    from blockwalk.plan.methods import method
    from blockwalk.ranks.watch import Watch
    from blockwalk.walk.walker import Walker
    from tests.support.held import held

    new_group: Any = dist.new_group
    dist.new_group = lambda members=None, **_: new_group(members, backend="fake")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    watch: Any = object()
    Watch.current = watch  # nobody else lives
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, **heads, vocab_size=128256, tie_word_embeddings=False)
    mesh = {"world": 1024, "ranks_per_node": 8}
    plan = method(name, mesh=mesh, gradient_accumulation_steps=MICRO_BATCHES)
    began = time.perf_counter()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    walker = Walker(model, plan, device="meta")
    seconds = time.perf_counter() - began
    pools = held(walker.engine)
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {
        "seconds": seconds,
        "MB": highest,
        "device GB": pools["device"] / 1e9,
        "host GB": pools["host"] / 1e9,
        "parameters": walker.spec.numel(),
    }


WORK = {"compile": compiled, "open": opened}


def in_own_process(part: str, name: str) -> dict[str, float]:
    """Do a part for one method in a fresh process."""
    command = [sys.executable, __file__, "--part", part, "--method", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print each method's figures."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--part", choices=sorted(WORK), nargs="+", default=list(WORK))
    options.add_argument("--method", help=argparse.SUPPRESS)
    options.add_argument("--json", metavar="FILE")
    options.add_argument("--check", action="store_true")
    arguments = options.parse_args()
    if arguments.method:
        print(json.dumps(WORK[arguments.part[0]](arguments.method)), flush=True)
        os._exit(0)  # nobody is there to say goodbye to
    from benchmarks.common import Bound, finish, median

    figures: dict[str, Any] = {}
    bounds = []
    for part, name in itertools.product(arguments.part, METHODS):
        runs = [in_own_process(part, name) for _ in range(ROUNDS[part])]
        found = {key: median([run[key] for run in runs]) for key in runs[0]}
        figures[f"{part} {name}"] = found
        values = ", ".join(f"{key} {value:,.2f}" for key, value in found.items())
        print(f"{part} {name}: {values}", flush=True)
        if part == "compile":
            bounds.append(Bound(f"{name}, seconds to compile a step", found["seconds"], SECONDS))
            bounds.append(Bound(f"{name}, MB of its process", found["MB"], MEGABYTES))
        else:
            bounds.append(Bound(f"{name}, seconds to open", found["seconds"], SECONDS_TO_OPEN))
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

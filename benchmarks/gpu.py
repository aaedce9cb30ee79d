"""Zeroth order on a GPU: OPT-1.3B to 30B dimensions in fp16, batch 1 × 2048, weights on the device or in host memory.

Cases: a naive MeZO loop with everything resident, ``mezo``, ``zo2`` with the blocks in host memory, and ``zo2`` with one idea
taken out. What can be resident at once takes one step each in turn, round after round; a case that does not fit is
named and left out. Peak memory is the most that each case's own allocations took (caching allocator), in a process of its
own. A profiler trace of ``zo2`` steps shows copies beside compute.

    benchmarks/gpu.sh [--model OPT-1.3B ...] [--rounds 5] [--dtype float16] [--no-trace] [--check]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks import zo_runs
from benchmarks.common import Bound, finish, interleaved, machine, median, parser, random_store

from blockwalk.plan.placement import Codec

RESULTS = Path(__file__).resolve().parent / "results"
PUBLISHED_MB = {"OPT-1.3B": 3750, "OPT-6.7B": 4992, "OPT-13B": 6180}
"""ZO2's peak in fp16 at batch 1 × 2048 on an A100 (Wang et al. 2025, table 1). Ours is to be half of it."""
THROUGHPUT = 0.97
"""Tokens a second of ``zo2`` by those of the naive resident loop, at least."""
CASES = (zo_runs.NAIVE, zo_runs.MEZO, *zo_runs.ABLATIONS)


def opened(case: str, name: str, arguments: argparse.Namespace, stack: ExitStack) -> Any:
    """A function that takes one step of a case and says its seconds."""
    if case == zo_runs.NAIVE:
        model = zo_runs.naive_model(name, arguments.dtype, "cuda")
        return zo_runs.naive_stepper(model, arguments.batch, arguments.seq)
    store = random_store(name, Codec.RAW, arguments.dtype)
    walker = stack.enter_context(zo_runs.open_walker(case, store, "host", "cuda"))
    return zo_runs.stepper(walker, arguments.batch, arguments.seq)


def peak(case: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak device memory of three steps of one case, and its seconds, alone in this process."""
    try:
        with ExitStack() as stack:
            step = opened(case, name, arguments, stack)
            step()
            torch.cuda.reset_peak_memory_stats()
            before = allocations()
            seconds = [step() for _ in range(2)]
            made = allocations() - before
            return {"peak_MB": torch.cuda.max_memory_allocated() / 1e6, "reserved_MB": torch.cuda.max_memory_reserved() / 1e6,
                    "alone_tokens_per_s": arguments.batch * arguments.seq / min(seconds),
                    "allocations_after_first_step": made}  # fmt: skip
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}


def allocations() -> int:
    """Device segments and pinned host blocks that were ever asked of CUDA."""
    segments: int = torch.cuda.memory_stats()["segment.all.allocated"]
    pinned: int = torch.cuda.host_memory_stats()["num_host_alloc"]
    return segments + pinned


def in_own_process(case: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", case, "--model", name, "--dtype", arguments.dtype]
    command += ["--batch", str(arguments.batch), "--seq", str(arguments.seq)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-1000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def together(cases: list[str], name: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step, the cases in turn; empty where they do not fit side by side."""
    try:
        with ExitStack() as stack:
            runs = {case: opened(case, name, arguments, stack) for case in cases}
            interleaved(runs, 2)
            return interleaved(runs, arguments.rounds)
    except torch.OutOfMemoryError:
        return {}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def trace(name: str, arguments: argparse.Namespace, path: Path) -> None:
    """Two steps of ``zo2`` for a trace viewer: copies in and out should lie beside the compute stream's kernels."""
    from torch.profiler import ProfilerActivity, profile

    with ExitStack() as stack:
        step = opened("zo2", name, arguments, stack)
        step(), step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step(), step()
    profiler.export_chrome_trace(str(path))
    gc.collect()
    torch.cuda.empty_cache()


def measure(name: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Bound]]:
    """All cases of one model, and its bounds."""
    random_store(name, Codec.RAW, arguments.dtype)
    rows: dict[str, Any] = {case: in_own_process(case, name, arguments) for case in CASES}
    fit = [case for case in CASES if "peak_MB" in rows[case]]
    seconds: dict[str, list[float]] = {}
    for case in fit:  # pairs: the largest models leave no room for more side by side
        if case != "zo2" and "zo2" in fit:
            pair = together([case, "zo2"], name, arguments)
            if pair:
                seconds[case] = pair[case]
                rows[case]["zo2_over_this"] = median([a / b for a, b in zip(pair[case], pair["zo2"], strict=True)])
                seconds["zo2"] = [*seconds.get("zo2", []), *pair["zo2"]]
    tokens = arguments.batch * arguments.seq
    for case in CASES:
        row = rows[case]
        if case in seconds:
            row["tokens_per_s"] = tokens / median(seconds[case])
        speed = row.get("tokens_per_s", row.get("alone_tokens_per_s", float("nan")))
        told = next((key for key in ("out_of_memory", "error") if key in row), "")
        print(f"{name:<9} {case:<25} {row.get('peak_MB', float('nan')):>9.0f} {speed:>10.1f}"
              f" {row.get('zo2_over_this', float('nan')):>10.3f} {told}", flush=True)  # fmt: skip
    bounds = [
        Bound(f"{name}, {case}: segments and pinned blocks after the first step", rows[case][key], 0)
        for case in (zo_runs.MEZO, "zo2")
        if (key := "allocations_after_first_step") in rows[case]
    ]
    if "zo2_over_this" in rows[zo_runs.NAIVE]:
        ratio = rows[zo_runs.NAIVE]["zo2_over_this"]
        bounds.append(Bound(f"{name}: zo2 by naive resident MeZO", ratio, THROUGHPUT, at_most=False))
    if name in PUBLISHED_MB and (arguments.batch, arguments.seq, arguments.dtype) == (1, 2048, "float16"):
        held = rows["zo2"].get("peak_MB", float("inf"))
        bounds.append(Bound(f"{name}: peak MB of zo2, half of ZO2's", held, PUBLISHED_MB[name] / 2))
    return rows, bounds


def main() -> None:
    arguments = options()
    if not torch.cuda.is_available():
        raise SystemExit(f"this benchmark needs a CUDA GPU, and torch {torch.__version__} sees none here")
    if arguments.worker:
        print(json.dumps(peak(arguments.worker, arguments.model[0], arguments)))
        return
    gpu = torch.cuda.get_device_name().replace(" ", "-").replace("/", "-")
    RESULTS.mkdir(exist_ok=True)
    print(f"{'model':<9} {'case':<25} {'peak MB':>9} {'tokens/s':>10} {'zo2/this':>10}")
    figures: dict[str, Any] = {}
    bounds: list[Bound] = []
    for name in arguments.model:
        figures[name], added = measure(name, arguments)
        bounds += added
        shown = [{**vars(bound), "holds": bound.holds} for bound in bounds]
        value = {"machine": machine(), "batch": arguments.batch, "sequence": arguments.seq, "dtype": arguments.dtype,
                 "figures": figures, "bounds": shown}  # fmt: skip
        # written after each model: a later one may be stopped
        (RESULTS / f"{gpu}.json").write_text(json.dumps(value, indent=1) + "\n")
    if arguments.trace:
        trace(arguments.model[0], arguments, RESULTS / f"{gpu}-trace.json")
    finish(arguments, figures, bounds)


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--model", nargs="+", default=["OPT-1.3B", "OPT-6.7B", "OPT-13B", "OPT-30B"])
    made.add_argument("--dtype", default="float16")
    made.add_argument("--batch", type=int, default=1)
    made.add_argument("--seq", type=int, default=2048)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--no-trace", dest="trace", action="store_false")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made.parse_args()


if __name__ == "__main__":
    main()

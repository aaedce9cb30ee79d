"""First order on one GPU: ``plain`` against ``fcdp`` and ``hzp`` of one rank, optimizer states in host memory.

    benchmarks/gpu.sh sharded [--model Qwen2.5-0.5B ...] [--rounds 3] [--json FILE]

Every case runs in a process of its own, the cases in turn, round after round: tokens a second from the median step, the peak
of the case's own allocations (caching allocator). Float32 masters, bfloat16 compute, random weights at true dimensions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.common import Bound, finish, interleaved, median, model_config, parser, random_batch

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {"trainable": "device × fp32"}),
    "plain, host states": ("plain", {"trainable": "host × fp32", "optimizer_state": "host × fp32"}),
    "fcdp, host states": ("fcdp", {"optimizer_state": "host × fp32 × world"}),
    "hzp, host states": ("hzp", {"optimizer_state": "host × fp32 × world"}),
    "hzp, device states": ("hzp", {}),
}
"""Method and settings; all recompute every block."""
WARM_UP = 2


def measure(case: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step and the peak on the device, alone in this process."""
    from transformers import AutoModelForCausalLM

    from blockwalk import Walker, method

    row, settings = CASES[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(name, "float32"))
    plan = method(row, compute_dtype="bfloat16", recompute="all", prefetch=1, **settings)
    batch = random_batch(model.config.vocab_size, arguments.batch, arguments.seq)
    seconds = []
    try:
        with Walker(model, plan, device="cuda") as walker:
            for k in range(WARM_UP + arguments.steps):
                if k == WARM_UP:
                    torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                began = time.perf_counter()
                walker.step(batch)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    return {"seconds": seconds[WARM_UP:], "peak_MB": torch.cuda.max_memory_allocated() / 1e6}


def in_own_process(case: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", case, "--model", name]
    command += [part for key in ("batch", "seq", "steps") for part in (f"--{key}", str(getattr(arguments, key)))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-1000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of one model, in turn."""
    answers: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def run(case: str) -> float:
        answers[case].append(in_own_process(case, name, arguments))
        return 0.0

    interleaved({case: lambda case=case: run(case) for case in CASES}, arguments.rounds)  # type: ignore[misc]
    rows: dict[str, Any] = {}
    for case, found in answers.items():
        whole = [each for each in found if "seconds" in each]
        if len(whole) < len(found):
            rows[case] = next(each for each in found if "seconds" not in each)
        else:
            second = median([statistics.median(each["seconds"]) for each in whole])
            tokens = arguments.batch * arguments.seq
            rows[case] = {"tokens_per_s": tokens / second, "peak_MB": max(each["peak_MB"] for each in whole)}
        row = rows[case]
        told = next((f" {key}" for key in ("out_of_memory", "error") if key in row), "")
        speed, peak = row.get("tokens_per_s", float("nan")), row.get("peak_MB", float("nan"))
        print(f"{name:<14} {case:<20} {speed:>10.1f} {peak:>10.0f}{told}", flush=True)
    return rows


def bounds_of(name: str, rows: dict[str, Any]) -> list[Bound]:
    """Optimizer states in host memory leave the device: 8 bytes a parameter of Adam's, 4 of the master."""
    if not all("peak_MB" in rows[case] for case in ("hzp, host states", "hzp, device states")):
        return []
    share = rows["hzp, host states"]["peak_MB"] / rows["hzp, device states"]["peak_MB"]
    return [Bound(f"{name}: device peak with host states by that with device states", share, 0.75)]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--model", nargs="+", default=["Qwen2.5-0.5B", "Qwen2.5-1.5B"])
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--seq", type=int, default=1024)
    made.add_argument("--steps", type=int, default=8)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"this benchmark needs a CUDA GPU, and torch {torch.__version__} sees none here")
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments.model[0], arguments)))
        return
    print(f"{'model':<14} {'case':<20} {'tokens/s':>10} {'peak MB':>10}")
    figures = {name: compare(name, arguments) for name in arguments.model}
    finish(arguments, figures, [bound for name, rows in figures.items() for bound in bounds_of(name, rows)])


if __name__ == "__main__":
    main()

"""A training step inside a hard memory limit, page cache included: a process in a memory cgroup
(v1), from a cold cache.

    python benchmarks/memory_limit.py [--model Qwen2.5-0.5B --limit-mb 440] [--steps 2] [--full]

LoRA of rank 8 on int4 weights on disk; with ``--full`` all parameters by AdamW, float32 masters,
moments and gradients on disk. Needs root and a cgroup v1 memory controller; says so and skips
elsewhere."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONTROLLER = Path("/sys/fs/cgroup/memory")
LIMITS = {"Qwen2.5-0.5B": 440, "Qwen2.5-3B": 560, "Qwen2.5-32B": 1600, "Llama-3-70B": 2500}
"""Megabytes (10⁶) that each model must complete in. The last two need 18 and 40 GB of disk."""
FULL = {"Qwen2.5-0.5B": 2500, "Qwen2.5-3B": 5000}
"""The same with all parameters trained; 18 bytes of disk a parameter."""
SLIDE = {
    "trainable": "disk × fp32",
    "optimizer_state": "disk × fp32",
    "gradient": "disk × fp32",
    "recompute": "all",
}
"""What makes ``plain`` a walk from disk."""


def why_not() -> str | None:
    """Why a limit cannot be set here, or None."""
    if not (CONTROLLER / "memory.limit_in_bytes").exists():
        return "there is no cgroup v1 memory controller"
    if os.geteuid() != 0:
        return "making a cgroup needs root"
    return None


def drop_from_cache(folder: Path) -> None:
    """Sync a folder's files and ask the kernel to forget their pages: what stays cached is charged
    to nobody."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def run_limited(
    command: Sequence[str],
    limit: int,
    timeout: float = 3600,
    *,
    stderr: int | None = subprocess.PIPE,
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run a command in a cgroup of its own, limited to ``limit`` bytes; answers it and the cgroup's
    peak bytes. What it says on standard error is kept, or goes where ``stderr`` says (None: to this
    process's)."""
    group = CONTROLLER / f"blockwalk-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        process = subprocess.run(
            ["sh", "-c", enter, "sh", *command],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=timeout,
            check=False,
        )
        return process, int((group / "memory.max_usage_in_bytes").read_text())
    finally:
        (group / "memory.force_empty").write_text("0")
        group.rmdir()


def worker(store: str, steps: int, full: bool) -> None:
    """A few steps on a store, in this process."""
    from benchmarks.common import random_batch

    from blockwalk import Walker, method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.system.process_memory import PeakMemory

    plan = method("mebp", frozen="disk × raw")
    lora = LoraSettings(rank=8)
    with (
        PeakMemory(0.05) as memory,
        Walker(
            store,
            method("plain", **SLIDE) if full else plan,
            lora=None if full else lora,
            device="cpu",
        ) as walker,
    ):
        results = []
        for step in range(steps):
            results.append(walker.step(random_batch(walker.spec.vocab_size, 1, 256, seed=step)))
            print(f"  step {step + 1}: {results[-1].seconds:.2f} s", file=sys.stderr, flush=True)
        print(json.dumps({"losses": [r.loss for r in results],
                          "seconds": [r.seconds for r in results],
                          "private": memory.highest}))  # fmt: skip


def limited_run(
    store: Path, limit: int, steps: int, full: bool = False
) -> tuple[dict[str, Any], int]:
    """Steps on a store from a cold cache under a limit of bytes; answers their figures and the
    peak.

    Raises:
        RuntimeError: the process was killed, or failed.
    """
    drop_from_cache(store)
    command = [
        sys.executable,
        __file__,
        "--worker",
        str(store),
        "--steps",
        str(steps),
        *(["--full"] if full else []),
    ]
    done, peak = run_limited(command, limit, stderr=None)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode} under {limit / 1e6:.0f} MB")
    return json.loads(done.stdout.splitlines()[-1]), peak


def main() -> None:
    from benchmarks.common import Bound, finish, parser, random_store

    from blockwalk.plan.placement import Codec

    options = parser(__doc__)
    options.add_argument("--model", choices=sorted(LIMITS))
    options.add_argument(
        "--limit-mb", type=int, help="the limit of --model, instead of the one promised"
    )
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--full", action="store_true", help="train all parameters")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    limits = FULL if arguments.full else LIMITS
    if arguments.model and not (arguments.limit_mb or arguments.model in limits):
        options.error(
            f"nothing is promised for all parameters of {arguments.model}: give --limit-mb"
        )
    if arguments.worker:
        worker(arguments.worker, arguments.steps, arguments.full)
        return
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    figures = []
    bounds = []
    for name in [arguments.model] if arguments.model else limits:
        store = random_store(name, Codec.RAW if arguments.full else Codec.INT4)
        limit = (arguments.limit_mb or limits[name]) * 10**6
        size = sum(path.stat().st_size for path in store.iterdir())
        try:
            result, peak = limited_run(store, limit, arguments.steps, arguments.full)
            print(
                f"{name}: {size / 1e6:.0f} MB of weights, {limit / 1e6:.0f} MB of memory"
                f" ({result['private'] / 1e6:.0f} of it"
                f" private): {result['seconds'][-1]:.2f} s a step"
            )
            figures.append(
                {
                    "model": name,
                    "full": arguments.full,
                    "limit": limit,
                    "store": size,
                    "peak": peak,
                    **result,
                }
            )
        except RuntimeError as error:
            print(f"{name}: {error}")
        bounds.append(
            Bound(
                f"{name} completes in {limit / 1e6:.0f} MB",
                float(bool(figures) and figures[-1]["model"] == name),
                1,
                False,
            )
        )
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()

"""All of OPT-1.3B's dimensions fine-tuned in float32 (5.3 GB of weights) inside a hard 2 GB memory
cgroup.

``zo2`` with every block on disk. The limit is the kernel's (cgroup v1, memory and where it is kept
memory+swap): page cache of the block store counts against it, and a process that needs more is
killed. Needs root and a writable memory controller; elsewhere it says why it does nothing and exits
with 0, under ``--check`` too.

    python benchmarks/zo_cgroup.py [--model OPT-1.3B] [--limit 2GB] [--steps 3] [--batch 1] [--seq
    128]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONTROLLER = Path("/sys/fs/cgroup/memory")


def obstacle() -> str | None:
    """Why the limit cannot be set here; None where it can."""
    if not (CONTROLLER / "memory.limit_in_bytes").exists():
        return f"there is no cgroup v1 memory controller at {CONTROLLER}"
    if not os.access(CONTROLLER, os.W_OK):
        return f"{CONTROLLER} is not writable: this needs root"
    return None


@contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """A memory cgroup of this size, removed afterwards."""
    group = CONTROLLER / f"blockwalk-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(nbytes))
        yield group
    finally:
        group.rmdir()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """The steps, in a process that is inside the group already."""
    from benchmarks.common import random_batch, random_store

    from blockwalk import Walker, method
    from blockwalk.plan.placement import Codec
    from blockwalk.system.process_memory import PeakMemory

    store = random_store(arguments.model, Codec.RAW, "float32")
    plan = method(
        "zo2", frozen="disk", trainable="disk", update={"flush_every": arguments.flush_every}
    )
    with (
        PeakMemory(0.01) as memory,
        Walker(store, plan, device="cpu", workdir=arguments.workdir) as walker,
    ):
        steps = []
        for step in range(arguments.steps):
            result = walker.step(
                random_batch(walker.spec.vocab_size, arguments.batch, arguments.seq, seed=step)
            )
            steps.append(
                {
                    "loss": result.loss,
                    "projected_grad": result.projected_grad,
                    "seconds": result.seconds,
                }
            )
            print(
                f"step {result.step}: loss {result.loss:.4f}, g {result.projected_grad:.4g},"
                f" {result.seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        trained = walker.spec.numel(trainable=True)
    return {"steps": steps, "trained": trained, "peak_MB": memory.highest / 1e6}


def run(arguments: argparse.Namespace, limit: int) -> dict[str, Any]:
    """The training process inside the group, and what the kernel counted."""
    command = [sys.executable, __file__, "--worker", *sys.argv[1:], "--workdir", arguments.workdir]
    with limited(limit) as group:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        process = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=enter
        )
        highest = int((group / "memory.max_usage_in_bytes").read_text())
    figures = {
        "returncode": process.returncode,
        "limit_MB": limit / 1e6,
        "charged_peak_MB": highest / 1e6,
    }
    return figures | (json.loads(process.stdout.splitlines()[-1]) if not process.returncode else {})


def main() -> None:
    arguments = options()
    if arguments.worker:
        print(json.dumps(train(arguments)))
        return
    from tempfile import TemporaryDirectory

    from benchmarks.common import CACHE, Bound, finish, random_store

    from blockwalk.plan.parsing import parse_bytes
    from blockwalk.plan.placement import Codec

    if (reason := obstacle()) is not None:
        print(f"skipped: {reason}")
        return
    random_store(arguments.model, Codec.RAW, "float32")  # made outside of the limit
    with TemporaryDirectory(dir=arguments.workdir or CACHE, prefix="run-") as folder:
        arguments.workdir = folder
        figures = run(arguments, parse_bytes(arguments.limit))
    if not figures["returncode"]:
        weights = 4 * figures["trained"]
        print(
            f"{arguments.model}: {weights / 1e9:.2f} GB of weights trained under a limit of"
            f" {arguments.limit}; the process held {figures['peak_MB']:.0f} MB, the kernel charged"
            f" {figures['charged_peak_MB']:.0f} MB with page cache;"
            f" {figures['steps'][-1]['seconds']:.1f} s a step"
        )
    # −9 is the kernel's out-of-memory killer
    finish(
        arguments,
        figures,
        [
            Bound(
                f"{arguments.model} in {arguments.limit}: exit status",
                abs(figures["returncode"]),
                0,
            )
        ],
    )


def options() -> argparse.Namespace:
    from benchmarks.common import parser

    options = parser(__doc__)
    options.add_argument("--model", default="OPT-1.3B")
    options.add_argument("--limit", default="2GB")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--seq", type=int, default=128)
    options.add_argument("--flush-every", type=int, default=1)
    options.add_argument(
        "--workdir",
        help="where the run's two generations of weights go (twice the model); the cache's folder",
    )
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return options.parse_args()


if __name__ == "__main__":
    main()

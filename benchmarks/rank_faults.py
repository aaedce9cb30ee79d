"""What a run over ranks does when a rank dies, is stopped, cannot be reached, or hangs: seconds
until every rank has ended; and when a rank or its link is slow: it goes on, to the same losses.

    sudo python benchmarks/rank_faults.py [--check] [--json FILE] [--rounds 20] [--at_once 10]

Each run trains a small model on two ranks with the limits that every run has; after some steps the
last rank does something to itself. It counts as ended when no rank is left, and every rank that
could speak has said why in one line. A slow rank takes ten times as long for its forwards; a slow
link sends 64 kbit a second (the kernel's token bucket filter)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, median, parser

from blockwalk import method
from blockwalk.ranks.launch import lost_rank
from blockwalk.ranks.watch import STUCK_AFTER
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.cluster import cluster
from tests.support.processes import run_ranks

OVER_NODES = ("unreachable", "slow link")
FAULTS = {"killed": 30.0, "stopped": 30.0, "unreachable": 30.0, "stuck": STUCK_AFTER + 10}
"""Each with the seconds in which the run must end."""
SLOW = ("slow rank", "slow link")
"""With these a run goes on: 30 steps, the last 20 of them disturbed."""


def until_it_ends(rank: int, fault: str, folder: Path) -> None:
    """Train until the run ends; the last rank does the harm. A run that should go on has one before
    it that nobody disturbs."""
    said = os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    mesh = {"world": 2, "ranks_per_node": 1 if fault in OVER_NODES else 2}

    def train(steps: int, harm: bool) -> list[float]:
        losses = []
        with Walker(tiny_model("llama"), method("distzo2", mesh=mesh), device="cpu") as walker:
            for step in range(steps):
                losses.append(walker.step(random_batch(8, seed=step)).loss)
                time.sleep(0.05)
                if harm and rank == 1 and step == 10:
                    (folder / "began").write_text(str(time.time()))
                    _harm(fault, walker)
        return losses

    try:
        if fault not in SLOW:
            train(1_000_000, harm=True)
        same = train(30, harm=False) == train(30, harm=True)
    except RuntimeError as error:
        print(lost_rank(rank, error) or error, file=sys.stderr, flush=True)
        os._exit(1)
    print(
        f"rank {rank}: went on to {'the same' if same else 'OTHER'} losses",
        file=sys.stderr,
        flush=True,
    )


def _harm(fault: str, walker: Walker) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "unreachable":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    elif fault == "slow link":
        filtered = "tc qdisc add dev eth0 root tbf rate 64kbit burst 4kb latency 400ms"
        subprocess.run(filtered.split(), check=True)
    elif fault == "slow rank":
        forward = walker.engine.cut.forward

        def slowly(*arguments: Any) -> Any:
            began = time.monotonic()
            answer = forward(*arguments)
            time.sleep(9 * (time.monotonic() - began))
            return answer

        walker.engine.cut.forward = slowly  # type: ignore[method-assign]
    else:
        walker.engine.cut.forward = lambda *_: time.sleep(1e6)  # type: ignore[method-assign,assignment]


def once(fault: str, pipe: Any) -> None:
    """One run: seconds from the harm to the end of the last rank, exit codes, and what was said."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if fault in OVER_NODES:
            with cluster(2, 1) as nodes:
                codes = nodes.run(until_it_ends, fault, folder, timeout=100, may_die=True)
                ended = time.time()
        else:
            codes = run_ranks(2, until_it_ends, fault, folder, timeout=100, may_die=True)
            ended = time.time()
        said = "\n".join((folder / f"said-{rank}").read_text() for rank in range(2))
        lines = [line for line in said.splitlines() if line.startswith("rank ")]
        pipe.send(
            {
                "seconds": ended - float((folder / "began").read_text()),
                "codes": codes,
                "said": lines,
            }
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--at_once", type=int, default=10)
    arguments = options.parse_args()
    tiny_model("llama")
    waiting = [fault for _ in range(arguments.rounds) for fault in (*FAULTS, *SLOW)]
    found: dict[str, list[Any]] = {fault: [] for fault in (*FAULTS, *SLOW)}
    context = multiprocessing.get_context("fork")
    for first in range(0, len(waiting), arguments.at_once):
        running = []
        for fault in waiting[first : first + arguments.at_once]:
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=once, args=(fault, sending))
            process.start()
            sending.close()
            running.append((fault, process, receiving))
        for fault, process, receiving in running:
            try:
                found[fault].append(receiving.recv())
            except EOFError:
                found[fault].append({"seconds": float("inf"), "codes": [0, 0], "said": []})
            process.join()
    bounds = []
    for fault, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        print(
            f"{fault:12} {len(runs)} runs: seconds {min(seconds):.1f} to {max(seconds):.1f},"
            f" median {median(seconds):.1f}"
        )
        for line in dict.fromkeys(line for run in runs[:1] for line in run["said"]):
            print(f"{'':13}{line}")
        if fault in SLOW:
            went_on = sum(
                not any(run["codes"]) and len(run["said"]) == 2 and "OTHER" not in str(run)
                for run in runs
            )
            bounds.append(
                Bound(
                    f"{fault}: runs that went on to the same losses",
                    went_on,
                    len(runs),
                    at_most=False,
                )
            )
            continue
        ended = sum(all(run["codes"]) and bool(run["said"]) for run in runs)
        bounds.append(
            Bound(f"{fault}: seconds until the run has ended, worst", max(seconds), FAULTS[fault])
        )
        bounds.append(
            Bound(
                f"{fault}: runs ended with exit codes and a message",
                ended,
                len(runs),
                at_most=False,
            )
        )
    finish(arguments, found, bounds)


if __name__ == "__main__":
    main()

"""A stage that is killed or stopped at a random moment: how soon the other one ends, what it says,
and how the run goes on."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blockwalk.cutting.verify import certified
from tests.models import random_batch
from tests.ranks.test_stages import CLIPPED, made, make
from tests.support.processes import run_ranks

ENDS_WITHIN = 30.0


def _until_it_ends(rank: int, folder: Path, fault: str, victim: int, after: float) -> None:
    said = os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(said, 2)
    with made("llama", 2, 2, 4, CLIPPED) as walker:
        for step in range(2):
            walker.step(random_batch(8, 10, seed=step))
        walker.save_state(folder / "saved")

        def harm() -> None:
            time.sleep(after)
            (folder / "began").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

        if rank == victim:
            threading.Thread(target=harm, daemon=True).start()
        try:
            for step in range(2, 1_000_000):
                walker.step(random_batch(8, 10, seed=step % 5))
        except RuntimeError as error:
            print(f"rank {rank}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            os._exit(1)


def _resumed(rank: int, folder: Path) -> float:
    with made("llama", 2, 2, 4, CLIPPED) as walker:
        walker.load_state(folder)
        return walker.step(random_batch(8, 10, seed=2)).loss


def _uninterrupted(rank: int) -> float:
    with made("llama", 2, 2, 4, CLIPPED) as walker:
        return [walker.step(random_batch(8, 10, seed=step)).loss for step in range(3)][-1]


def deaths(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Kill a stage once for each number, every tenth time stop it instead, and go on from the
    checkpoint before."""
    certified(make("llama"))
    expected = run_ranks(2, _uninterrupted)[0]
    answers = []
    for number in numbers:
        fault = "stopped" if number % 10 == 9 else "killed"
        after = random.Random(number).uniform(0.05, 1.5)
        victim = number % 2
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run_ranks(2, _until_it_ends, folder, fault, victim, after, timeout=120, may_die=True)
            began = float((folder / "began").read_text())
            lines = (folder / f"said-{1 - victim}").read_text().strip().splitlines()
            answers.append(
                {
                    "fault": fault,
                    "seconds": time.time() - began,
                    "named": any(f"rank {victim}" in line for line in lines),
                    "said": lines[-1] if lines else "",
                    "same": run_ranks(2, _resumed, folder / "saved")[0] == expected,
                }
            )
    return answers

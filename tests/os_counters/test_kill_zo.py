"""Oracle: a run that nobody killed. SIGKILL comes 30 times, at random moments and inside random
writes; each time at most the step in flight is lost, and the run ends with the same weights, bit
for bit."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KILLS = 30


def run(folder: Path, steps: int, said: Callable[[int], None] = lambda _: None) -> dict[str, int]:
    """Take the run in ``folder`` from where it stands to ``steps``; ``said`` hears of every step
    that is done. Answers a checksum of each weight."""
    import torch

    from blockwalk import method
    from blockwalk.walk.walker import Walker
    from tests.models import random_batch

    settings: dict[str, Any] = {"update": {"flush_every": 2}, "optimizer": {"learning_rate": 1e-2}}
    plan = method(
        "zo2",
        trainable="disk × bf16",
        frozen="disk",
        zo={"kind": "hizoo", "hessian_alpha": 1e-3},
        **settings,
    )
    base = folder.parent / "base"
    ledger = folder / "ledger.jsonl"
    with Walker(base, plan, workdir=folder, ledger=ledger, device="cpu") as walker:
        said(walker.steps_done)
        while walker.steps_done < steps:
            walker.step(random_batch(2, 8, seed=walker.steps_done))
            said(walker.steps_done)
            if walker.steps_done % 10 == 5:
                walker.flush()  # resident units are written then
        walker.flush()
        weights = walker.engine.trained.weights()
        return {
            name: zlib.crc32(w.contiguous().view(-1).view(torch.uint8).numpy())
            for name, w in weights.items()
            if isinstance(w, torch.Tensor)
        }


def die_inside_a_write(after: int, draw: random.Random) -> None:
    """Let the process kill itself in its ``after``-th write, with part of it done."""
    left = [after]

    def cut(call: Callable[..., int], keep: Callable[[Any, int], Any]) -> Callable[..., int]:
        def write(fd: int, data: Any, *rest: int) -> int:
            left[0] -= 1
            if left[0] == 0:
                whole = sum(map(len, data)) if isinstance(data, list) else len(data)
                call(fd, keep(data, draw.randrange(whole)), *rest)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(fd, data, *rest)

        return write

    os.pwritev = cut(os.pwritev, lambda data, size: [bytes(data[0])[:size]])
    os.write = cut(os.write, lambda data, size: data[:size])


def kill_often(folder: Path) -> dict[str, Any]:
    """Start the run again and again and kill it each time; answers what was lost, and the weights
    at the end."""
    draw = random.Random(11)
    lost = []
    said = folder.parent / "said"
    killed = inside = 0
    while killed < KILLS:
        at_random = killed % 2 == 0
        pause = draw.uniform(0.0, 0.5)
        after = draw.randrange(1, 24)
        child = os.fork()
        if child == 0:
            if not at_random:
                die_inside_a_write(after, random.Random(after))
            run(folder, 10**6, lambda step: append(said, step))
        if at_random:
            time.sleep(pause)
            os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        killed = killed + 1
        inside = inside + (not at_random)
        heard = int(said.read_text().split()[-1]) if said.exists() else 0
        path = folder / "ledger.jsonl"
        steps = path.read_bytes().count(b"\n") - 1 if path.exists() else 0
        lost.append(heard - steps)
    end = steps + 3
    found = run(folder, end)
    expected = run(folder.parent / "whole", end)
    return {
        "lost": max(lost),
        "killed": killed,
        "inside": inside,
        "steps": end,
        "weights": found,
        "expected": expected,
    }


def append(path: Path, step: int) -> None:
    with path.open("a") as file:
        print(step, file=file)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
def test_killed_thirty_times(tmp_path: Path) -> None:
    from tests.models import tiny_model

    tiny_model("opt", tied=True).save_pretrained(tmp_path / "base")
    (tmp_path / "killed").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["killed"], found["inside"]) == (KILLS, KILLS // 2)
    assert found["lost"] <= 0, "a step that had counted was lost"
    assert found["steps"] > KILLS
    assert found["weights"] == found["expected"]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    run(place / "first", 1)  # imports everything and checks the model, once for all children
    gc.freeze()  # whose collections would copy the pages of all that was imported
    print(json.dumps(kill_often(place / "killed")))

"""Oracle: an order of events that only ranks which do not wait for each other can have. One node
stands still inside a micro-batch until the other one has begun the last; a control whose ranks meet
in each micro-batch cannot come there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.program.program import Op, OpKind
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.held import masters
from tests.support.processes import run_ranks

MICRO_BATCHES = 4
PATIENCE = 30.0
"""Seconds after which a rank that stands still goes on, and says that nobody came."""


def _stands_still(
    rank: int, name: str, folder: Path, patience: float, waits: bool
) -> tuple[bool, dict[str, torch.Tensor]]:
    """Return whether, while node 1 stood still before its first block in the second micro-batch,
    node 0 began its last; and the masters after the step. ``waits`` False: nobody stands still."""
    mesh = {"world": 4, "ranks_per_node": 2}
    plan = method(name, mesh=mesh, gradient_accumulation_steps=MICRO_BATCHES, together=1)
    reached = folder / f"last-micro-batch-of-rank-{rank % 2}"
    came = True
    with Walker(tiny_model("llama"), plan, device="cpu") as walker:
        prepare = walker.estimator.prepare

        def prepared(op: Op) -> Callable[[], Any]:
            work = prepare(op)
            if op.kind is not OpKind.FORWARD or op.unit != 1:
                return work

            def done() -> Any:
                nonlocal came
                if rank < 2 and op.micro_batch == MICRO_BATCHES - 1:
                    reached.touch()
                if waits and rank >= 2 and op.micro_batch == 1:
                    deadline = time.monotonic() + patience
                    while not reached.exists() and time.monotonic() < deadline:
                        time.sleep(0.01)
                    came = reached.exists()
                return work()

            return done

        walker.estimator.prepare = prepared  # type: ignore[method-assign]
        walker.step(random_batch(4 * MICRO_BATCHES, 8))
        walker.flush()
        return came, masters(walker)


@pytest.mark.parametrize("name", ["mics", "fcdp", "hzp"])
def test_nodes_that_do_not_meet_in_a_micro_batch_do_not_wait(name: str, tmp_path: Path) -> None:
    certified(tiny_model("llama"))
    unheld = run_ranks(4, _stands_still, name, tmp_path, PATIENCE, False)
    for file in tmp_path.iterdir():
        file.unlink()
    answers = run_ranks(4, _stands_still, name, tmp_path, PATIENCE, True)
    assert all(came for came, _ in answers)
    for (_, weights), (_, expected) in zip(answers, unheld, strict=True):
        assert all(torch.equal(weights[parameter], expected[parameter]) for parameter in expected)


def test_nodes_that_meet_in_each_micro_batch_wait(tmp_path: Path) -> None:
    """The control: ``zero3`` gathers each block over both nodes in every micro-batch, so that no
    patience is long enough."""
    certified(tiny_model("llama"))
    answers = run_ranks(4, _stands_still, "zero3", tmp_path, 2.0, True)
    assert [came for came, _ in answers] == [True, True, False, False]

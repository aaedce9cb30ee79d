"""Node slices are refreshed behind the update, beyond a step's end. Oracle: one process that trains
the whole model by torch's own AdamW; a gate before the wire that the test opens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.plan.placement import StateKind
from blockwalk.program.program import Lane
from blockwalk.walk.walker import Walker
from tests.models import random_batch
from tests.support.messages import refused
from tests.support.processes import run_ranks
from tests.support.sharded_runs import DECAY, LEARNING_RATE, make, plain_run

STEPS = 3


class Gate:
    """The wire between nodes, which gathers wait for, and which may be cut."""

    def __init__(self, groups: Any) -> None:
        self.open = threading.Event()
        self.open.set()
        self.cut = False
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._groups, name)

    def begin_gather_(self, full: torch.Tensor, axes: Any, lane: Lane) -> Any:
        if lane is not Lane.INTER:
            return self._groups.begin_gather_(full, axes, lane)
        assert self.open.wait(30)
        return self._fail if self.cut else self._groups.begin_gather_(full, axes, lane)

    def _fail(self) -> None:
        raise ConnectionError("the cable is out")


def _walks(rank: int, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Steps whose refreshments are held back until the next step has begun; one fails."""
    optimizer = {"learning_rate": LEARNING_RATE, "weight_decay": DECAY}
    plan = method(name, mesh={"world": 2, "ranks_per_node": 1}, optimizer=optimizer, **changes)
    batches = [random_batch(8, 10, seed=step) for step in range(STEPS)]
    with Walker(make("llama", False), plan, device="cpu") as walker:
        home: Any = walker.engine.homes[StateKind.TRAINABLE]
        gate = home.groups = Gate(home.groups)
        gate.open.clear()
        losses = [walker.step(batches[0]).loss]  # ends before its slices are refreshed
        threading.Timer(0.2, gate.open.set).start()
        evaluated = walker.evaluate(random_batch(3, 10, seed=99)).loss
        gate.cut = True
        losses.append(walker.step(batches[1]).loss)
        with refused(RuntimeError, "refreshing", "step 2", "cable"):
            walker.step(batches[2])
        gate.cut = False
        losses.append(walker.step(batches[2]).loss)
        return {"losses": losses, "evaluated": evaluated, "steps": walker.steps_done}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("fcdp", {}), ("hzp", {"update.timing": "block", "prefetch": 0})],
    ids=["on the host", "on the device, at the block's turn"],
)
def test_a_step_ends_before_its_slices_are_refreshed(name: str, changes: dict[str, Any]) -> None:
    """What reads weights waits; a failure is its first reader's and names its step, and the run
    goes on from the masters."""
    certified(make("llama", False))
    batches = [random_batch(8, 10, seed=step) for step in range(STEPS)]
    one = plain_run(make("llama", False), batches[:1])
    every = plain_run(make("llama", False), batches)
    for answer in run_ranks(2, _walks, name, changes):
        assert answer["losses"] == pytest.approx(every["losses"], rel=1e-5)
        assert answer["evaluated"] == pytest.approx(one["evaluated"], rel=1e-5)
        assert answer["steps"] == STEPS

"""Oracle: the operating system's exit codes and clock, where a rank ends inside a block that its
neighbours wait in; and the files that a refused run leaves."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from blockwalk.plan.methods import method
from blockwalk.ranks.exchange import CountedExchange
from blockwalk.ranks.launch import lost_rank
from blockwalk.walk.context_check import require_parts
from blockwalk.walk.walker import Walker
from tests.support.messages import says
from tests.support.processes import run_ranks
from tests.support.rows_in_parts import BATCHES, make

LIMIT = 30.0
"""Seconds in which all ranks end."""
PLAN = method("hzp", mesh={"world": 2, "ranks_per_node": 2, "context": 2}, context={"way": "keys"})


def _struck(rank: int, harm: int) -> str:
    lay, rows = BATCHES["padded"]
    gather = CountedExchange.gather

    def gather_or_end(self: Any, part_P: Any) -> Any:
        if rank == 1 and walker.steps_done:
            os.kill(os.getpid(), harm)
        return gather(self, part_P)

    CountedExchange.gather = gather_or_end  # type: ignore[method-assign]
    try:
        with Walker(make("llama", True), PLAN, device="cpu") as walker:
            for _ in range(2):
                walker.step(lay(rows))
    except RuntimeError as error:
        print(lost_rank(rank, error) or error, file=sys.stderr, flush=True)
        os._exit(13)
    return "went on"


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_inside_a_block_ends_the_others(
    harm: int, capfd: pytest.CaptureFixture[str]
) -> None:
    require_parts(make("llama", True), PLAN)
    began = time.monotonic()
    codes = run_ranks(2, _struck, harm, timeout=2 * LIMIT, may_die=True)
    assert time.monotonic() - began < LIMIT
    assert codes == [13, -signal.SIGKILL]  # a stopped rank is killed by its neighbour
    says(capfd.readouterr().err, "rank 1")

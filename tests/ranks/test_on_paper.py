"""Oracle: what a real rank of as many holds, counted tensor by tensor."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from blockwalk.plan.methods import method
from blockwalk.ranks.watch import Watch
from blockwalk.walk.walker import Walker
from tests.models import tiny_model
from tests.support.held import held
from tests.support.processes import run_ranks

METHODS = ("zero3", "fcdp", "hzp", "mics")
WORLD = 4


def _held(device: str) -> list[dict[str, int]]:
    answers = []
    for name in METHODS:
        mesh = {"world": WORLD, "ranks_per_node": 2}
        plan = method(name, mesh=mesh, gradient_accumulation_steps=2)
        walker = Walker(tiny_model("llama").to(device), plan, device=device)
        answers.append({str(pool): nbytes for pool, nbytes in held(walker.engine).items()})
        if device == "cpu":
            walker.close()
    return answers


def _real(rank: int) -> list[dict[str, int]]:
    return _held("cpu")


def _on_paper(pipe: Any) -> None:
    new_group: Any = dist.new_group
    dist.new_group = lambda members=None, **_: new_group(members, backend="fake")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    watch: Any = object()
    Watch.current = watch
    torch.set_num_threads(1)
    pipe.send(_held("meta"))
    pipe.close()
    os._exit(0)


def test_a_rank_on_paper_holds_what_a_real_one_does() -> None:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_on_paper, args=(sending,))
    process.start()
    sending.close()
    assert receiving.poll(60)
    on_paper = receiving.recv()
    process.join(10)
    real = run_ranks(WORLD, _real)[0]
    assert on_paper == real
    assert all(sum(pools.values()) > 0 for pools in real)

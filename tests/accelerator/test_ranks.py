"""Oracle: the same ranks on CPUs: losses and weights bit for bit where each rank has a device whose
order differs from the others'; and one another: every rank issues its collectives from one thread,
in the same order."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from blockwalk.plan.methods import method
from blockwalk.program.program import Lane
from blockwalk.ranks import groups
from blockwalk.ranks.groups import Groups
from blockwalk.ranks.launch import have_their_own
from blockwalk.ranks.place import Place
from blockwalk.walk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.support.processes import run_ranks
from tests.support.simulated_device import Simulated

MESH = {"world": 4, "ranks_per_node": 2}
CASES: dict[str, dict[str, Any]] = {
    "fcdp": {"gradient_accumulation_steps": 2},
    "zero3": {"recompute": "none"},
    "zeropp": {"optimizer.max_grad_norm": 1.0},
}
Answer = tuple[list[float], dict[str, torch.Tensor], list[tuple[str, Lane]], int]


def walked(rank: int, name: str, device: str) -> Answer:
    """Losses, gathered gradients, the collectives in the order of their issue, and the number of
    threads that issued them."""
    issued: list[tuple[str, Lane]] = []
    threads = set()
    if device == "sim":
        device = f"sim:{rank}"
        torch.accelerator.set_device_index(rank)
        Simulated().order(1 + rank)

    def note(kind: str) -> None:
        kept = getattr(Groups, kind)

        def noted(*args: Any, **options: Any) -> Any:
            issued.append((kind, args[3]))
            threads.add(threading.get_ident())
            return kept(*args, **options)

        setattr(Groups, kind, noted)

    note("begin_gather_")
    note("begin_reduce")
    plan = method(name, mesh=MESH, **CASES[name])
    with Walker(tiny_model("opt", dropout=0.0, num_hidden_layers=2), plan, device=device) as walker:
        losses = [walker.step(random_batch(batch=8, seed=step)).loss for step in range(2)]
        gradients = {
            name: each.cpu()
            for name, each in walker.gradients(random_batch(batch=8, seed=5)).items()
        }
    return losses, gradients, issued, len(threads)


@pytest.mark.parametrize("name", CASES)
def test_ranks_on_devices_walk_as_on_cpus(name: str, sim: Simulated) -> None:
    found: list[Answer] = run_ranks(4, walked, name, "sim", timeout=300)
    expected: list[Answer] = run_ranks(4, walked, name, "cpu", timeout=300)
    for here, there in zip(found, expected, strict=True):
        assert here[0] == there[0]
        assert all(torch.equal(here[1][key], there[1][key]) for key in there[1])
        assert here[2] == found[0][2]
        assert here[3] == 1


def shared(rank: int, lora: dict[str, int] | None, device: str) -> list[float]:
    """Projected gradients, and the loss of an evaluation, of ranks that hold the blocks
    together."""
    if device == "sim":
        device = f"sim:{rank}"
        torch.accelerator.set_device_index(rank)
        Simulated().order(1 + rank)
    plan = method("distzo2", mesh={"world": 2}, optimizer={"name": "sgd", "learning_rate": 1e-2})
    with Walker(
        tiny_model("opt", dropout=0.0, num_hidden_layers=4), plan, lora=lora, device=device
    ) as walker:
        found = [
            walker.step(random_batch(batch=4, seed=step)).projected_grad or 0.0 for step in range(3)
        ]
        return [*found, walker.evaluate(random_batch(batch=3, seed=9)).loss]


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_slices_of_trained_and_of_frozen_blocks_are_gathered_on_devices(
    lora: dict[str, int] | None, sim: Simulated
) -> None:
    on_devices = run_ranks(2, shared, lora, "sim", timeout=300)
    assert on_devices == run_ranks(2, shared, lora, "cpu", timeout=300)


def test_one_visible_device_is_a_rank_s_own_or_everybody_s() -> None:
    def told(names: list[str]) -> bool:
        store: dict[str, str] = {f"device/{rank}": name for rank, name in enumerate(names)}

        class Store:
            set = store.__setitem__
            get = store.__getitem__

        return have_their_own(Store(), Place(0, len(names), 0, len(names)), names[0])

    assert told(["node GPU-1", "node GPU-2"])
    assert told(["one GPU-1", "other GPU-1"])
    assert not told(["node GPU-1", "node GPU-1"])


def test_an_axis_connects_its_ranks_by_its_device_s_backend_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group of all backends would have a mesh of sockets in every axis that no rank ever speaks
    through."""
    asked: list[str | None] = []

    def new_group(members: list[int], *, timeout: timedelta, backend: str | None = None) -> None:
        assert timeout == timedelta(hours=1), (
            "NCCL's is ten minutes: rank 0 may write for longer at a run's end"
        )
        asked.append(backend)

    monkeypatch.setattr(groups.dist, "get_backend_config", lambda: "cpu:gloo,xpu:xccl")
    monkeypatch.setattr(groups.dist, "new_group", new_group)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(groups, "started", lambda _: 4)
    mesh = method("zeropp", mesh=MESH).mesh
    groups.make_groups(mesh, torch.device("xpu", 0))
    assert set(asked) == {"xccl"}
    asked.clear()
    groups.make_groups(mesh, torch.device("cpu"))
    assert set(asked) == {"gloo"}

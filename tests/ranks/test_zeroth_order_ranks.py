"""Oracle: one process that cuts the batch the same way: the same ledger bytes and the same bits of every weight."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch.distributed as dist

from blockwalk import method
from blockwalk.walker import Walker
from tests.models import random_batch, tiny_model
from tests.ranks.processes import run_ranks
from tests.reference.test_zeroth_order import assert_same, trained

STEPS = 4
OPTIMIZER = {"name": "sgd", "learning_rate": 3e-2, "schedule": "linear", "total_steps": 12, "weight_decay": 0.1}

Case = tuple[str, str, dict[str, Any]]
"""Method, kind of model, settings."""


def walk(case: Case, mesh: dict[str, int], folder: Path, **changes: Any) -> dict[str, Any]:
    """Losses, ledger without the run's name, and weights of a run."""
    name, kind, settings = case
    plan = method(name, mesh=mesh, **{"optimizer": OPTIMIZER, **settings, **changes})
    model = tiny_model(kind, tied=kind == "opt")
    ledger = folder / "ledger.jsonl"
    with Walker(model, plan, workdir=folder / "work", ledger=ledger, device="cpu") as walker:
        results = [walker.step(random_batch(8, seed=step)) for step in range(STEPS)]
        evaluated = walker.evaluate(random_batch(3, seed=99)).loss
        weights = trained(walker)
        entries = list(walker.ledger.entries) if walker.ledger else []
    lines = ledger.read_bytes().split(b"\n")[1:]
    return {"losses": [(r.loss, r.projected_grad) for r in results], "evaluated": evaluated, "weights": weights,
            "entries": entries, "lines": lines}  # fmt: skip


def _all(rank: int, cases: list[Case], meshes: list[dict[str, int]], folder: Path) -> list[dict[str, Any]]:
    out = []
    for number, (case, mesh) in enumerate(itertools.product(cases, meshes)):
        there = folder / f"{dist.get_world_size()}-{number}"
        out.append(walk(case, {"world": dist.get_world_size(), **mesh}, there))
    return out


def check(world: int, cases: list[Case], meshes: list[dict[str, int]], tmp_path: Path) -> None:
    answers = run_ranks(world, _all, cases, meshes, tmp_path, timeout=240)
    alone: dict[tuple[int, int], dict[str, Any]] = {}
    for number, ((c, case), mesh) in enumerate(itertools.product(enumerate(cases), meshes)):
        data = mesh.get("data", 1)
        if (c, data) not in alone:
            micro_batches = case[2].get("gradient_accumulation_steps", 1) * data
            alone[c, data] = walk(case, {}, tmp_path / f"alone-{c}-{data}", gradient_accumulation_steps=micro_batches)
        expected = alone[c, data]
        for rank, answer in enumerate(answers):
            found = answer[number]
            where = f"{case} {mesh} rank {rank}"
            assert found["losses"] == expected["losses"], where
            assert found["entries"] == expected["entries"], where
            assert found["lines"] == expected["lines"], where
            assert found["evaluated"] == expected["evaluated"], where
            assert_same(found["weights"], expected["weights"])


CASES: list[Case] = [
    ("mezo", "llama", {}),
    ("distzo2", "opt", {"update": {"flush_every": 3}}),
    ("distzo2", "llama", {"trainable": "host × bf16", "gradient_accumulation_steps": 2}),
]


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """Two signs on two ranks; two halves of the batch; with a copy of the blocks each, and with half a copy each."""
    meshes = [{"perturb": 2, "slice": 1}, {"data": 2, "slice": 1}]
    check(2, CASES, meshes, tmp_path / "a")
    check(2, CASES[1:], [{"perturb": 2, "slice": 2}, {"data": 2, "slice": 2}], tmp_path / "b")


def test_four_ranks_are_one_process(tmp_path: Path) -> None:
    """2 × 2; slices of a quarter; slices of a half on nodes of two ranks."""
    meshes = [
        {"data": 2, "perturb": 2, "slice": 1},
        {"data": 2, "perturb": 2, "slice": 4},
        {"data": 2, "perturb": 2, "slice": 2, "ranks_per_node": 2},
    ]
    check(4, CASES[1:], meshes, tmp_path)

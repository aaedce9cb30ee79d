"""Oracle: one process that trains the whole model on the whole batch with torch's own AdamW and
clipping."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import pytest
import torch
from torch import nn

from blockwalk.cutting.verify import certified
from blockwalk.plan.methods import method
from blockwalk.program.compile import compile_ranks
from blockwalk.program.invariants import over_budget
from blockwalk.program.program import Pool, Shape, StepKind
from blockwalk.walk.unit_costs import UnitCosts
from blockwalk.walk.walker import Walker
from tests.models import random_batch
from tests.support.processes import run_ranks
from tests.support.sharded_runs import (
    DECAY,
    LEARNING_RATE,
    _loss,
    canonical,
    compare,
    groups,
    make,
    plain_run,
    walked,
)

METHODS = ("zero3", "zeropp", "mics", "fcdp", "hzp")


def _matrix(
    rank: int, ranks_per_node: int, cases: list[tuple[Any, ...]], steps: int
) -> list[dict[str, Any]]:
    import torch.distributed as dist

    mesh = {"world": dist.get_world_size(), "ranks_per_node": ranks_per_node}
    return [
        walked(
            kind,
            lora,
            name,
            mesh,
            steps,
            gradient_accumulation_steps=micro_batches,
            **dict(changes),
        )
        for kind, lora, name, micro_batches, changes in cases
    ]


def check_matrix(
    world: int,
    ranks_per_node: int,
    cases: list[tuple[Any, ...]],
    steps: int = 3,
    timeout: float = 200,
) -> list[dict[str, Any]]:
    for kind, lora in {case[:2] for case in cases}:
        certified(
            make(kind, lora)
        )  # certified before the ranks are forked, once instead of in each
    answers = run_ranks(world, _matrix, ranks_per_node, cases, steps, timeout=timeout)
    plain: dict[tuple[Any, ...], dict[str, Any]] = {}
    for k, case in enumerate(cases):
        kind, lora, _, _, changes = case
        key = (kind, lora, changes.get("max_grad_norm", 0.0))
        if key not in plain:
            batches = [random_batch(8, 10, seed=step) for step in range(steps)]
            plain[key] = plain_run(make(kind, lora), batches, key[2])
        for answer in answers:
            compare(answer[k], plain[key], case)
    return answers[0]


WHOLE_PARAMETERS = {
    "frozen": "device × raw × nobody",
    "trainable": "device × raw × nobody",
    "gradient": "device × fp32 × nobody",
}
"""Optimizer states alone are spread over ranks."""


PLACED = ("frozen", "trainable", "gradient", "optimizer_state")


NESTED = {
    "mesh.groups": "pair=2",
    "frozen": "device × raw × pair",
    "trainable": "device × raw × pair",
}
"""Parameters over two ranks, gradients over the node, optimizer states over the world."""


def same_bits(answers: list[dict[str, Any]], one: int, other: int) -> None:
    assert answers[one]["losses"] == answers[other]["losses"]
    assert answers[one]["norms"] == answers[other]["norms"]
    for name, value in answers[one]["weights"].items():
        assert torch.equal(value, answers[other]["weights"][name]), name


def test_two_ranks_of_a_node_train_as_one_process() -> None:
    cases: list[tuple[Any, ...]] = [
        ("llama", False, "zero3", 1, {}),
        ("opt", False, "mics", 2, {"prefetch": 0}),
    ]
    cases += [("llama", True, "fcdp", 2, {}), ("mixtral", False, "hzp", 1, WHOLE_PARAMETERS)]
    check_matrix(2, 2, cases)


def test_two_nodes_of_two_ranks_train_as_one_process() -> None:
    """Every method; and bit for bit the same where sums are added in the same order."""
    cases: list[tuple[Any, ...]] = [
        ("llama", False, name, a, {}) for name, a in itertools.product(METHODS, (1, 4))
    ]
    answers = check_matrix(4, 2, cases, steps=2)
    place = {(case[2], case[3]): k for k, case in enumerate(cases)}
    for name in METHODS[1:]:
        same_bits(answers, place["zero3", 1], place[name, 1])
    for name in ("fcdp", "hzp"):
        same_bits(answers, place["mics", 4], place[name, 4])
    same_bits(answers, place["zero3", 4], place["zeropp", 4])


def test_models_and_settings_over_two_nodes() -> None:
    """Tied, LoRA, experts, adaptive cache, block-major accumulation, clipping, kept graphs, states
    off the device."""
    adaptive = {"cache.threshold": 0.8, "budget": 1_000_000}
    cases: list[tuple[Any, ...]] = [("opt", False, "fcdp", 4, {}), ("opt", True, "hzp", 1, {})]
    cases += [
        ("mixtral", False, "fcdp", 1, {}),
        ("mixtral", True, "fcdp", 4, {"together": 2}),
    ]
    cases += [("llama", False, "fcdp", 4, adaptive), ("llama", True, "fcdp", 1, adaptive)]
    cases += [("llama", False, name, 2, {"max_grad_norm": 0.5}) for name in ("fcdp", "mics")]
    cases += [("llama", False, "hzp", 1, {"recompute": "none", "update.timing": "block"})]
    cases += [
        ("opt", False, "hzp", 2, {"recompute": "none", "optimizer_state": "host × fp32 × world"})
    ]
    cases += [
        (
            "llama",
            False,
            "fcdp",
            1,
            {"optimizer_state": "disk × fp32 × world", "update.timing": "block"},
        )
    ]
    answers = check_matrix(4, 2, cases, steps=2)
    clipped = [k for k, case in enumerate(cases) if "max_grad_norm" in case[4]]
    same_bits(answers, *clipped)
    assert max(answers[clipped[0]]["norms"]) > 0.5
    for case, answer in zip(cases, answers, strict=True):
        assert bool(answer["kept"]) == (case[4].get("recompute") == "none"), case


def _adaptive(rank: int) -> tuple[bool, int, list[str]]:
    """Whether the step that ran is the one foreseen, what it peaks at, and the budget's
    objections."""
    mesh = {"world": 2, "ranks_per_node": 1}
    batch = random_batch(4, 10)
    with Walker(make("llama", False), method("fcdp", mesh=mesh), device="cpu") as walker:
        budget = (
            walker.program(StepKind.TRAIN, Shape(2, 10), foresee=True).peaks()[Pool.DEVICE] + 20_000
        )
    plan = method("fcdp", mesh=mesh, budget=budget, **{"cache.threshold": 1.0})
    with Walker(make("llama", False), plan, device="cpu") as walker:
        costs = UnitCosts(walker.engine.cut.base.config, padded=True)(plan, Shape(2, 10))
        (foreseen,) = compile_ranks(plan, walker.spec, StepKind.TRAIN, Shape(2, 10), costs=costs)
        walker.timeline = []
        walker.step(batch)
        ran = walker.timeline[0][0]
    return ran.ops == foreseen.ops, sum(op.device_slice for op in ran.ops), over_budget(ran, budget)


def test_the_adaptive_cache_runs_as_foreseen() -> None:
    """Oracle: the forecast's own program, op for op, and the budget that it promises to stay
    within."""
    certified(make("llama", False))
    for same, kept, wrong in run_ranks(2, _adaptive):
        assert same
        assert kept
        assert wrong == []


def test_twenty_steps() -> None:
    check_matrix(4, 2, [("llama", False, "fcdp", 4, {}), ("opt", True, "hzp", 1, {})], steps=20)


def test_nested_groups_over_eight_ranks_train_as_one_process() -> None:
    check_matrix(8, 4, [("llama", False, name, 1, NESTED) for name in ("hzp", "fcdp")], steps=2)


IN_PAIRS = {"mesh.groups": "pair=2", **{f"{kind}.group": "pair" for kind in PLACED}}
"""All state over two of a node's four ranks: four replicas on two nodes."""


def test_states_over_less_than_a_node_train_as_one_process() -> None:
    """Bit for bit the same whether gradients wait on the device or the host."""
    on_host = {**IN_PAIRS, "gradient.tier": "host"}
    cases: list[tuple[Any, ...]] = [
        ("opt", False, "hzp", 2, IN_PAIRS),
        ("opt", False, "hzp", 2, on_host),
    ]
    answers = check_matrix(8, 4, [*cases, ("llama", True, "mics", 1, IN_PAIRS)], steps=2)
    same_bits(answers, 0, 1)


HALF = tuple(itertools.product(("llama", "opt", "mixtral"), (False, True)))
"""Models, full and LoRA, in bfloat16."""


def _half(
    rank: int, tasks: tuple[tuple[str, bool], ...], methods: tuple[str, ...], steps: int
) -> list[list[dict[str, Any]]]:
    mesh = {"world": 4, "ranks_per_node": 2}
    half = {"compute_dtype": "bfloat16"}
    return [
        [walked(kind, lora, name, mesh, steps, **half) for name in methods] for kind, lora in tasks
    ]


def half_run(masters: nn.Module, steps: int) -> tuple[list[float], nn.Module]:
    """Losses of a plain loop that rounds float32 masters to bfloat16 for every step, and the
    masters after it."""
    trained = [p for p in masters.parameters() if p.requires_grad]
    by_name = {name: p for name, p in masters.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        groups(by_name), lr=LEARNING_RATE, weight_decay=DECAY, foreach=False
    )
    losses = []
    for step in range(steps):
        half = copy.deepcopy(masters).to(torch.bfloat16)
        batch = random_batch(8, 10, seed=step)
        loss = _loss(half, batch)
        loss.backward()
        for master, rounded in zip(
            trained, (p for p in half.parameters() if p.requires_grad), strict=True
        ):
            assert rounded.grad is not None
            master.grad = rounded.grad.float()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, masters


def check_half(tasks: tuple[tuple[str, bool], ...], methods: tuple[str, ...], steps: int) -> None:
    """Against the plain loop; among themselves the methods agree bit for bit."""
    for kind, lora in tasks:
        certified(make(kind, lora))
    answers = run_ranks(4, _half, tasks, methods, steps, timeout=280)[0]
    for (kind, lora), found in zip(tasks, answers, strict=True):
        losses, masters = half_run(make(kind, lora), steps)
        start = {canonical(name): p.detach() for name, p in make(kind, lora).named_parameters()}
        assert found[0]["losses"] == pytest.approx(losses, rel=2e-3), (kind, lora)
        for name, master in masters.named_parameters():
            plain = canonical(name)
            if plain in found[0]["weights"] and "k_proj.bias" not in name:
                moved, ours = (
                    value.detach() - start[plain] for value in (master, found[0]["weights"][plain])
                )
                cosine = torch.nn.functional.cosine_similarity(
                    moved.flatten(), ours.flatten(), dim=0
                )
                assert cosine > 0.9, (kind, lora, plain, float(cosine))
        for other in range(1, len(methods)):
            same_bits(found, 0, other)


def test_sixteen_bit_parameters_with_float32_masters() -> None:
    check_half(HALF[:3], ("zero3", "fcdp"), 3)


WHOLE = pytest.mark.skipif(
    "BLOCKWALK_MATRIX" not in os.environ, reason="takes minutes; set BLOCKWALK_MATRIX=1"
)


@WHOLE
@pytest.mark.parametrize("ranks", [(2, 2), (4, 2), (8, 4)])
def test_the_whole_matrix(ranks: tuple[int, int]) -> None:
    """Methods × full, LoRA × 1, 4 micro-batches × models, over 20 steps; on eight ranks with nested
    groups."""
    nested = NESTED if ranks == (8, 4) else {}
    tasks = itertools.product(("llama", "opt", "mixtral"), (False, True), METHODS, (1, 4))
    cases = [
        (kind, lora, name, a, nested if name in ("fcdp", "hzp") else {})
        for kind, lora, name, a in tasks
    ]
    check_matrix(*ranks, cases, steps=20, timeout=580)


@WHOLE
def test_the_whole_matrix_in_sixteen_bits() -> None:
    check_half(HALF, METHODS, 5)

"""Oracle: the printed program. What a walk really does, recorded where it is done (``effects.py``),
is what its ops say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from blockwalk import LoraSettings, Walker, method
from blockwalk.contrib.mezo_original.in_place import SIGNS
from blockwalk.plan.choices import Timing
from blockwalk.plan.estimators import Estimator
from blockwalk.plan.mesh import make_axes, named, reach
from blockwalk.plan.placement import StateKind, Tier
from blockwalk.program.program import COMPUTES, Op, OpKind, Program, StepKind
from tests.golden.effects import Effect, Effects
from tests.models import random_batch, tiny_model
from tests.support.processes import run_ranks

STEPS = 3
Case = tuple[str, dict[str, Any], bool]
ON_DISK = {"trainable": "disk × fp32", "optimizer_state": "disk × fp32", "gradient": "disk × fp32"}
ALONE: list[Case] = [
    (
        "plain",
        {
            **ON_DISK,
            "recompute": "all",
            "optimizer.max_grad_norm": 1.0,
            "gradient_accumulation_steps": 2,
        },
        False,
    ),
    ("plain", {"optimizer.max_grad_norm": 1.0}, False),
    ("mebp", {"frozen": "disk × raw", "update.timing": "block"}, False),
    (
        "mebp",
        {"frozen": "disk", "gradient_accumulation_steps": 2, "together": 2},
        True,
    ),
    ("mebp", {"frozen": "host × int8", "recompute": "none"}, True),
    ("mezo", {"zo.queries": 2, "gradient_accumulation_steps": 2}, False),
    ("mezo", {"zo.noise": "mezo", "gradient_accumulation_steps": 2}, False),
    ("zo2", {"zo.kind": "fzoo", "zo.queries": 2}, False),
    ("zo2", {"trainable": "disk × bf16", "update.flush_every": 2}, False),
]
FOUR = {"world": 4, "ranks_per_node": 2}
SPREAD: list[Case] = [
    ("mezo", {"mesh": {"world": 4, "perturb": 2, "data": 2}}, False),
    ("zo2", {"mesh": {"world": 4, "perturb": 4}, "zo.kind": "hizoo", "zo.queries": 3}, False),
    (
        "distzo2",
        {"mesh": {**FOUR, "perturb": 2, "data": 2}, "gradient_accumulation_steps": 2},
        False,
    ),
    (
        "zero3",
        {"mesh": FOUR, "gradient_accumulation_steps": 2, "optimizer.max_grad_norm": 1.0},
        False,
    ),
    ("zeropp", {"mesh": FOUR}, False),
    ("mics", {"mesh": FOUR, "gradient_accumulation_steps": 2}, False),
    ("fcdp", {"mesh": FOUR}, False),
    ("hzp", {"mesh": FOUR, "update.timing": "block"}, False),
]


def expected(op: Op, program: Program, walker: Walker, step: int) -> set[Effect]:
    """What the printed op says, in a program of step ``step``."""
    plan = walker.plan
    trains = program.step_kind in (StepKind.TRAIN, StepKind.GRADIENTS)
    zeroth = plan.estimator is Estimator.ZEROTH_ORDER
    deferred = plan.update.timing is Timing.DEFERRED
    done = step - 1 if deferred and program.step_kind is StepKind.TRAIN else step
    if op.kind in COMPUTES:
        found: set[Effect] = set()
        if op.kind is not OpKind.PROLOGUE_BACKWARD and not (
            op.kind is OpKind.BACKWARD and op.keep_graph
        ):
            found.add(("forward", op.unit, op.micro_batch))
        if not zeroth and trains and op.kind not in (OpKind.PROLOGUE, OpKind.FORWARD):
            found.add(("differentiate",))
        first = (
            op.micro_batch < plan.mesh.data
        )  # what is made for a pass's first micro-batch serves all
        if zeroth and trains and plan.zo.noise != "mezo" and first:
            query, sign = plan.kind.passes(plan.zo.queries)[op.forward_pass]
            found |= {("perturbed", step, query, sign * plan.zo.epsilon)} if sign else set()
        return found
    match op.kind:
        case OpKind.SAVE | OpKind.LOAD if op.of_graph:  # pages, which the kernel moves
            return set()
        case OpKind.SAVE | OpKind.LOAD:
            return {(op.kind.lower(), op.unit)}
        case OpKind.PERTURB:
            return {("perturb all", SIGNS[op.forward_pass] * plan.zo.epsilon)}
        case OpKind.UPDATE_ALL:
            trained = (
                unit
                for unit in range(len(walker.spec.units))
                if walker.spec.units[unit].numel(trainable=True)
            )
            return {("update all", step), *(("update", unit, step) for unit in trained)}
        case OpKind.EXCHANGE:
            return {("entry", step)}
        case OpKind.TOTAL:
            return {("total",)}
        case OpKind.CHECK:
            return {("total",), ("check",)}
        case OpKind.NORM:
            return {("norm",)}
        case OpKind.UPDATE if zeroth:
            return {
                ("update", op.unit, done),
                ("apply", *range(done - max(op.entries, 1) + 1, done + 1)),
            }
        case OpKind.UPDATE:
            return {("update", op.unit, step)}
        case OpKind.STORE:
            return {("store", op.unit, done)} if zeroth else {("done with", _group(op))}
        case OpKind.EVICT if plan.home.gathered:
            return set()
        case OpKind.EVICT:
            return _evicted(op, walker)
        case OpKind.FETCH if op.part is StateKind.FROZEN and not plan.home.gathered:
            return {("prefetch", op.unit)} if plan.frozen.tier is Tier.DISK else set()
        case OpKind.FETCH if not plan.home.gathered:
            return {("fetch", op.unit, op.slot)} if zeroth else {("will need", _group(op))}
        case OpKind.GATHER | OpKind.REDUCE if op.axes:
            sums = {("gather", op.lane, *op.axes)} if _sums(op, walker) else set()
            return {(op.kind.lower(), op.lane, *op.axes)} | sums
    return set()


def _group(op: Op) -> Any:
    """The group of state that an op of a first-order run is about."""
    return (op.part, op.unit)


def _sums(op: Op, walker: Walker) -> bool:
    """Whether a reduction is the last one over ranks that hold the same slice: each needs the
    sum."""
    inner, outer = reach(named(make_axes(walker.plan.mesh), op.axes))
    replicas = inner >= walker.plan.optimizer_ranks and outer == walker.plan.mesh.world
    return op.kind is OpKind.REDUCE and replicas


def _evicted(op: Op, walker: Walker) -> set[Effect]:
    zeroth = walker.plan.estimator is Estimator.ZEROTH_ORDER
    found: set[Effect] = {("vacate", op.slot)} if zeroth else set()
    frozen = walker.spec.units[op.unit].numel(trainable=False)
    return found | ({("release", op.unit)} if frozen else set())


def compared(case: Case, patch: pytest.MonkeyPatch) -> set[OpKind]:
    """The kinds of op that a case ran, each of which did what it says."""
    name, settings, adapters = case
    world = settings.get("mesh", {}).get("world", 1)
    lora = LoraSettings(rank=2, target_modules=("q_proj", "v_proj")) if adapters else None
    with Walker(tiny_model("llama"), method(name, **settings), lora=lora, device="cpu") as walker:
        effects = Effects(walker, patch)
        walker.timeline = []
        if walker.plan.estimator is Estimator.BACKPROP:
            walker.gradients(random_batch(8))
        for step in range(1, STEPS + 1):
            walker.step(random_batch(8, seed=step))
        walker.evaluate(random_batch(world, seed=9))
        return set(_compared(walker, effects))


def _compared(walker: Walker, effects: Effects) -> Iterator[OpKind]:
    assert walker.timeline is not None
    at = trained = 0
    for program, _ in walker.timeline:
        trained += program.step_kind is StepKind.TRAIN
        for op in program.ops:
            where = f"{program.step_kind} of step {trained}: {op}"
            found = {effect for effect in effects.of_ops[at] if effect[0] != "copy"}
            assert found == expected(op, program, walker, trained), where
            if walker.plan.home.gathered and op.kind in (OpKind.GATHER, OpKind.REDUCE):
                assert effects.bytes_of_ops[at] == op.nbytes, where
            if (
                walker.plan.home.gathered
                and op.kind in (OpKind.FETCH, OpKind.CACHE)
                and not op.device_slice
            ):
                assert ("copy", op.nbytes) in effects.of_ops[at], where
            at += 1
            yield op.kind
    assert at == len(effects.of_ops)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case[0]} {case[1]}")
def test_one_process_does_what_is_printed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = compared(case, monkeypatch)
    assert {OpKind.PROLOGUE, OpKind.LOSS} < kinds


def _rank(rank: int, cases: list[Case]) -> list[set[OpKind]]:
    torch.set_num_threads(1)
    found = []
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            found.append(compared(case, patch))
    return found


def test_every_rank_does_what_is_printed() -> None:
    """Four ranks on two nodes, each with its own program."""
    for of_rank in run_ranks(4, _rank, SPREAD):
        assert {
            OpKind.GATHER,
            OpKind.REDUCE,
            OpKind.FETCH,
            OpKind.NORM,
            OpKind.EXCHANGE,
        } < set().union(*of_rank)

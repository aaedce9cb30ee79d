"""Every row's programs as text, whole: what ``test_programs.py`` compares and ``python -m
tests.golden.programs`` rewrites. Not a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockwalk.plan.estimators import Timing
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.placement import NOBODY
from blockwalk.plan.plan import Plan
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, Pending, UnitCost
from blockwalk.program.program import Op, Program, Shape, StepKind
from tests.golden.specs import MODELS

FOLDER = Path(__file__).parent / "programs"
SHAPE = Shape(2, 16)
MESHES = {"2x2": {"world": 4, "ranks_per_node": 2}, "2x4": {"world": 8, "ranks_per_node": 4}}
FOUR: dict[str, Any] = {"gradient_accumulation_steps": 4}

Cases = Iterator[tuple[str, Program]]


def costs(model: ModelSpec) -> Costs:
    """Figures that no two kinds of unit share, so that a mix-up shows."""
    kinds = sorted({unit.kind for unit in model.units})
    figures = (
        (1000 * k + 11, 5000 * k + 13, 2000 * k + 17, 100 * k + 1, 200 * k + 3)
        for k in range(1, len(kinds) + 1)
    )
    return Costs(
        tuple((kind, UnitCost(*each)) for kind, each in zip(kinds, figures, strict=True)),
        scratch=4096,
    )


def variants(name: str) -> Iterator[tuple[str, Plan]]:
    """The plans of a row: as it stands, with four micro-batches in both orders, and what else it
    alone can do."""
    row = METHODS[name]()
    if row.sharded:
        for size, mesh in MESHES.items():
            yield size, method(name, mesh=mesh)
            for order in ("micro_batch", "block"):
                yield (
                    f"{size}, 4 × {order}",
                    method(name, mesh=mesh, accumulation_order=order, **FOUR),
                )
            yield (
                f"{size}, at the block's turn",
                method(name, mesh=mesh, **{"update.timing": Timing.BLOCK}),
            )
            if row.cache.tier == "host":
                yield (
                    f"{size}, threshold",
                    method(name, mesh=mesh, budget=900_000, **{"cache.threshold": 0.8}),
                )
        return
    if row.trainable.group != NOBODY:
        for size, mesh in MESHES.items():
            yield size, method(name, mesh=mesh)
        return
    yield "one rank", method(name)
    if row.update.timing is Timing.DEFERRED:
        yield (
            "on disk, bf16, 2 queries",
            method(name, trainable="disk × bf16", **{"zo.queries": 2}, **FOUR),
        )
        yield "hizoo", method(name, **{"zo.kind": "hizoo"})
    elif row.zeroth_order:
        yield "4 micro-batches", method(name, **FOUR)
        yield "the original's arithmetic", method(name, **{"zo.noise": "mezo"})
    else:
        for order in ("micro_batch", "block"):
            yield f"4 × {order}", method(name, accumulation_order=order, **FOUR)
        yield (
            "recompute: auto, budget",
            method(name, recompute="auto", budget=1_200_000, activation="device"),
        )
        yield "clipped", method(name, **{"optimizer.max_grad_norm": 1.0})


def steps(plan: Plan, model: ModelSpec, device: str) -> Cases:
    """The kinds of step of a plan: the first one, one after it, what it finds pending flushed,
    evaluation."""

    def compiled(kind: StepKind, pending: Pending) -> Program:
        return compile(
            plan,
            model,
            kind,
            SHAPE,
            costs=costs(model),
            pending=pending,
            device=device,
            page_cache=20_000,
        )

    first = compiled(StepKind.TRAIN, Pending())
    yield "first", first
    yield "steady", compiled(StepKind.TRAIN, Pending(entries=1, flush=True, dirty=first.dirty))
    if plan.update.timing is Timing.DEFERRED:
        yield "two pending", compiled(StepKind.TRAIN, Pending(entries=2))
        yield "flush", compiled(StepKind.FLUSH, Pending(entries=2))
    elif not plan.zeroth_order:
        yield "gradients", compiled(StepKind.GRADIENTS, Pending(dirty=first.dirty))
    yield "evaluate", compiled(StepKind.EVALUATE, Pending(dirty=first.dirty))


def cases(name: str, model: str) -> Cases:
    for variant, plan in variants(name):
        for device in ("cpu", "cuda"):
            for step, program in steps(plan, MODELS[model], device):
                yield f"{variant}, {device}, {step}", program


def text(name: str, model: str) -> str:
    """All programs of a row on a model; one that was printed before is named, not printed again."""
    seen: dict[str, str] = {}
    lines = []
    for title, program in cases(name, model):
        body = "\n".join(whole(program))
        if body in seen:
            lines.append(f"== {title}: as {seen[body]}\n")
        else:
            seen[body] = title
            lines.append(f"== {title}\n{body}\n")
    return "\n".join(lines)


def whole(program: Program) -> Iterator[str]:
    """Every field of a program and of its ops that is not its default."""
    for field in dataclasses.fields(program):
        if field.name not in ("ops", "title", "_peaks"):
            yield f"{field.name}: {_value(getattr(program, field.name))}"
    yield f"peaks: {_value(tuple(sorted(program.peaks().items())))}"
    for op in program.ops:
        yield " ".join(_op(op))


def _op(op: Op) -> Iterator[str]:
    yield f"{op.index:3} {op.lane:<10} {op.kind} {op.unit}"
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        if field.name not in ("index", "lane", "kind", "unit") and value != field.default:
            yield f"{field.name}={_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, frozenset):
        return "{" + ",".join(map(str, sorted(value))) + "}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_value, value)) + ")"
    if isinstance(value, Shape):
        return f"{value.batch}×{value.sequence}"
    return str(value)


def path_of(name: str, model: str) -> Path:
    return FOLDER / f"{name}-{model}.txt"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for row in METHODS:
        for spec in MODELS:
            path_of(row, spec).write_text(text(row, spec))

"""Programs of every row as text: what ``test_programs.py`` compares and ``python -m
tests.golden.programs`` rewrites. Not a test.

A file for each row, to be read: models of two blocks, and one variant for each feature, on the
model that shows it best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blockwalk.plan.mesh import PIPELINE
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.model_spec import ModelSpec
from blockwalk.plan.plan import Plan
from blockwalk.plan.work import Work
from blockwalk.program.compile import compile
from blockwalk.program.costs import Costs, Pending, UnitCost
from blockwalk.program.program import Op, Program, Shape, StepKind
from tests.golden.specs import MODELS

FOLDER = Path(__file__).parent / "programs"
SHAPE = Shape(2, 16)
MESHES = {
    "2x2": {"world": 4, "ranks_per_node": 2},
    "2x4": {"world": 8, "ranks_per_node": 4},
    "2 stages of 2": {"world": 4, "ranks_per_node": 2, "pipeline": 2},
}
PAGE_CACHE = 150_000
"""Bytes that hold the graph of one of a Llama's two blocks."""

FIRST = ("first",)
STEPS = ("first", "steady", "gradients", "evaluate")
"""The steps of a plan: the first one, one that finds what it left, gradients without an update, and
an evaluation."""
DEFERRED_STEPS = ("first", "steady", "two pending", "flush", "evaluate")
"""The steps of a plan whose updates wait for the next fetch: with one update pending that is
written back, with two, and with no forward."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One feature of a row: the settings that ask for it, and the programs that show it."""

    model: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: str = "cpu"
    steps: Sequence[str] = FIRST
    stage: int = 0

    def plan(self, row: str) -> Plan:
        return method(row, **self.settings)

    def title(self, step: str) -> str:
        settings = ", ".join(f"{name}: {_setting(value)}" for name, value in self.settings.items())
        stage = f", stage {self.stage + 1}" * bool(self.stage)
        return f"{self.model} on {self.device}, {step} step{stage}" + f" ({settings})" * bool(
            settings
        )


def _setting(value: object) -> str:
    mesh = next((name for name, sizes in MESHES.items() if sizes == value), None)
    return mesh or str(value)


MICRO_BATCHES = {"gradient_accumulation_steps": 2}
BY_BLOCK = {**MICRO_BATCHES, "together": 2}
CLIPPED = {"optimizer.max_grad_norm": 1.0}
AT_TURN = {"update.timing": "block"}
AT_END = {"update.timing": "step"}
ON_2X2 = {"mesh": MESHES["2x2"]}
ON_2X4 = {"mesh": MESHES["2x4"]}
IN_STAGES = {"mesh": MESHES["2 stages of 2"]}
MAPPED = {"trainable": "disk × fp32", "optimizer_state": "disk × fp32", "gradient": "disk × fp32"}

CASES: dict[str, list[Case]] = {
    "plain": [
        Case("llama", steps=("first", "gradients", "evaluate")),
        Case("opt", MICRO_BATCHES | CLIPPED),
        Case("opt", {"compute_dtype": "float32"}, device="cuda"),
        Case("mixtral", BY_BLOCK),
        Case("llama", {"recompute": "auto", "budget": 533_000}),
        Case("opt", MAPPED | MICRO_BATCHES | {"recompute": "all"}, steps=("first", "gradients")),
    ],
    "mebp": [
        Case("llama", steps=STEPS),
        Case("llama", device="cuda", steps=STEPS),
        Case("opt"),
        Case("opt", device="cuda"),
        Case("mixtral"),
        Case("mixtral", device="cuda"),
        Case("llama", MICRO_BATCHES),
        Case("llama", BY_BLOCK),
        Case("opt", AT_END | CLIPPED, device="cuda"),
        Case("llama", {"prefetch": 0}, device="cuda"),
        Case("llama", {"resident": 1}, device="cuda"),
        Case("llama", {"recompute": "none"}),
        Case("llama", {"recompute": "none"}, device="cuda"),
        Case("opt", {"trainable": "device × raw"}, device="cuda"),
        Case("llama", {"activation": "device", "budget": 212_000}, device="cuda"),
    ],
    "mezo": [
        Case("opt", MICRO_BATCHES, steps=("first", "evaluate")),
        Case("opt", {"zo.noise": "mezo"}, steps=("first", "flush")),
    ],
    "zo2": [
        Case("opt", device="cuda", steps=DEFERRED_STEPS),
        Case("opt"),
        Case("llama", {"frozen": "disk × int8", "prefetch": 0}, steps=("steady", "flush")),
        Case("mixtral", device="cuda", steps=("steady",)),
        Case(
            "opt",
            {"trainable": "disk × bf16", "zo.queries": 2} | MICRO_BATCHES,
            steps=DEFERRED_STEPS,
        ),
        Case("opt", {"zo.kind": "hizoo"}, device="cuda"),
        Case("opt", {"resident": 1}, device="cuda", steps=("steady",)),
        Case("opt", {"zo.noise": "lowrank", "zo.queries": 4}, steps=("first",)),
    ],
    "distzo2": [
        Case("opt", ON_2X2, device="cuda", steps=DEFERRED_STEPS),
        Case("llama", ON_2X4 | {"frozen": "host × int8 × node"}, device="cuda"),
    ],
    "zero3": [
        Case("llama", ON_2X2, steps=STEPS),
        Case("opt", ON_2X2 | MICRO_BATCHES | CLIPPED),
        Case("opt", ON_2X4 | AT_TURN),
        Case("opt", ON_2X2 | {"compute_dtype": "float32"}),
        Case("llama", ON_2X2 | BY_BLOCK | {"prefetch": 2}),
        Case("opt", IN_STAGES | MICRO_BATCHES | CLIPPED),
        Case("opt", IN_STAGES | MICRO_BATCHES | CLIPPED, stage=1, steps=("first", "evaluate")),
    ],
    "zeropp": [
        Case("llama", ON_2X2, steps=STEPS),
        Case("opt", ON_2X4 | MICRO_BATCHES | {"prefetch": 0}, steps=("steady",)),
    ],
    "mics": [
        Case("llama", ON_2X2, steps=STEPS),
        Case("opt", ON_2X4 | MICRO_BATCHES, steps=("first", "gradients")),
    ],
    "fcdp": [
        Case("llama", ON_2X2, steps=STEPS),
        Case("opt", ON_2X2 | MICRO_BATCHES, steps=("steady",)),
        Case("opt", ON_2X2 | AT_TURN, steps=("steady",)),
        Case("llama", ON_2X2 | {"cache.threshold": 0.8, "budget": 540_000}, steps=("steady",)),
    ],
    "hzp": [
        Case("opt", ON_2X2 | {"prefetch": 0}, steps=("first", "steady")),
        Case(
            "opt",
            ON_2X4
            | MICRO_BATCHES
            | AT_TURN
            | BY_BLOCK
            | {
                "mesh.groups": ("pair=2",),
                "optimizer_state": "host × fp32 × pair",
                "gradient": "device × fp32 × pair",
                "trainable": "device × raw × pair",
                "frozen": "device × int8 × pair",
            },
        ),
        Case(
            "llama",
            ON_2X4
            | MICRO_BATCHES
            | {
                "mesh.groups": ("pair=2",),
                "trainable": "device × raw × pair",
                "frozen": "device × int8 × pair",
                "gradient": "host × fp32 × node",
            },
        ),
    ],
}
"""The cases of each row."""


def costs(model: ModelSpec) -> Costs:
    """Figures that no two kinds of unit share, so that a mix-up shows."""
    kinds = sorted({unit.kind for unit in model.units})
    figures = (
        (1000 * k + 11, 12_000 * k + 13, 9000 * k + 17, 100 * k + 1, 200 * k + 3)
        for k in range(1, len(kinds) + 1)
    )
    return Costs(
        tuple(
            (kind, UnitCost(*each, again=Work(products=each[3])))
            for kind, each in zip(kinds, figures, strict=True)
        ),
        scratch=4096,
    )


def compiled(plan: Plan, model: ModelSpec, device: str, step: str, stage: int = 0) -> Program:
    """Compile one of the steps of a plan by its name."""

    def program(kind: StepKind, pending: Pending) -> Program:
        return compile(
            plan,
            model,
            kind,
            SHAPE,
            costs=costs(model),
            pending=pending,
            device=device,
            page_cache=PAGE_CACHE,
            coordinates=((PIPELINE, stage),),
        )

    if step == "first":
        return program(StepKind.TRAIN, Pending())
    if step == "two pending":
        return program(StepKind.TRAIN, Pending(entries=2))
    if step == "flush":
        return program(StepKind.FLUSH, Pending(entries=2))
    dirty = program(StepKind.TRAIN, Pending()).dirty
    if step == "steady":
        return program(StepKind.TRAIN, Pending(entries=1, flush=True, dirty=dirty))
    return program(StepKind(step), Pending(dirty=dirty))


def programs(row: str, cases: Sequence[Case]) -> Iterator[tuple[str, Program]]:
    """Yield the programs of some cases of a row, each with its title."""
    for case in cases:
        for step in case.steps:
            program = compiled(case.plan(row), MODELS[case.model], case.device, step, case.stage)
            yield case.title(step), program


def text(row: str) -> str:
    """Return the programs of a row; one that was printed before is named, not printed again."""
    titles: dict[str, str] = {}
    lines = []
    for title, program in programs(row, CASES[row]):
        body = "\n".join(whole(program))
        if body in titles:
            lines.append(f"== {title}: as {titles[body]}\n")
        else:
            titles[body] = title
            lines.append(f"== {title}\n{body}\n")
    return "\n".join(lines)


HEADS = (
    ("step_kind", "shape", "unit_names"),
    ("streamed", "written", "dirty"),
    ("slots", "slot_bytes", "static"),
)
"""The fields of a program that stand before its ops, line by line."""


def whole(program: Program) -> Iterator[str]:
    """Yield all that a program says, and of its ops every field that is not its default."""
    for names in HEADS:
        yield "  ".join(f"{name}={_value(getattr(program, name))}" for name in names)
    yield f"peaks={_value(tuple(sorted(program.peaks().items())))}"
    for op in program.ops:
        yield " ".join(_op(op))


def _op(op: Op) -> Iterator[str]:
    yield f"{op.index:3} {op.lane:<10} {op.kind} {op.unit}"
    defaults = {field.name: field.default for field in dataclasses.fields(op)}
    for name, default in defaults.items():
        value = getattr(op, name)
        if name == "passes":
            yield from _passes(op.passes)
        elif name == "slot" and op.buffer >= 0:
            continue
        elif name not in ("index", "lane", "kind", "unit") and value != default:
            yield f"{name}={_value(value)}"
        if name == "sent" and op.buffer >= 0:
            yield f"buffer={op.buffer}"


def _passes(passes: range) -> Iterator[str]:
    if passes.start:
        yield f"forward_pass={passes.start}"
    if len(passes) > 1:
        yield f"passes={len(passes)}"


def _value(value: object) -> str:
    if isinstance(value, frozenset):
        return "{" + ",".join(map(str, sorted(value))) + "}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_value, value)) + ")"
    if isinstance(value, Shape):
        return f"{value.batch}×{value.sequence}"
    return str(value)


def path_of(row: str) -> Path:
    return FOLDER / f"{row}.txt"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for row in METHODS:
        path_of(row).write_text(text(row))

"""The speed that each card is expected to have, by the planner, and the steps that were found on an
H200 beside their forecasts: the tables of ``docs/cards.md``. Nothing is measured here.

A run settles its tiers, its budget and the blocks that stay as on a machine whose card and host
memory are free; the step is simulated on the card's description (``simulate/machines``).
``--write`` puts the tables into the page."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import model_config

from blockwalk.plan.choices import LoraSettings
from blockwalk.plan.methods import METHODS, method
from blockwalk.plan.words import duration
from blockwalk.program.compile import compile_ranks
from blockwalk.program.program import Pool, Shape, StepKind, human_bytes
from blockwalk.program.settling import Room, Settled, settle
from blockwalk.simulate import hardware
from blockwalk.simulate.hardware import SIMULATED, Hardware
from blockwalk.simulate.planner import Candidate, Task, look_at, steady
from blockwalk.simulate.simulator import Simulation, simulate
from blockwalk.system import atomic_files
from blockwalk.walk.unit_costs import UnitCosts

PAGE = Path(__file__).parents[1] / "docs" / "cards.md"
MARK = "<!-- python benchmarks/cards.py --write -->"
FOUND_MARK = "<!-- found: benchmarks/results/steps_h200.json -->"
CARDS = (
    "rtx-3060-8gb",
    "rtx-4060",
    "rtx-3060",
    "t4",
    "rtx-4090",
    "l40s",
    "a100-80gb",
    "h100-80gb",
    "h200",
    "mi300x",
)
SHAPE = Shape(1, 2048)
FOUND = Path(__file__).parent / "results" / "steps_h200.json"
"""The steps that were found on a card, with date, hardware, versions and commit."""
FOUND_HEAD = (
    "| run, sequences | found, ms | card busy | starts | foreseen, ms | ÷ found | peak found, MB |"
    " foreseen | ÷ found |",
    "|---|---|---|---|---|---|---|---|---|",
)
HEAD = (
    "| card | run | tokens/s | step | device | host | blocks that stay | bound by | |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what is done with it."""

    model: str
    dtype: str
    method: str
    lora_rank: int = 0
    """Of adapters; 0: all parameters are trained."""
    otherwise: tuple[tuple[str, str], ...] = ()
    """Settings of the plan that is looked at where the method's own row does not fit."""


CASES = {
    "7B LoRA": Case("Qwen2.5-7B", "bfloat16", "mebp", 16),
    "13B zo2": Case(
        "OPT-13B", "float16", "zo2", 0, (("trainable", "disk × raw"), ("frozen", "disk × raw"))
    ),
    "70B LoRA": Case("Llama-3-70B", "bfloat16", "mebp", 16),
}
"""Runs by name: LoRA of rank 16 in 4 bits, and all parameters of 16 bits by zeroth order."""


@functools.cache
def costs_of(case: Case) -> UnitCosts:
    """The costs of a case's model on a GPU, on no weights."""
    lora = LoraSettings(rank=case.lora_rank) if case.lora_rank else None
    return UnitCosts(model_config(case.model, case.dtype), lora=lora, device="cuda")


def foreseen(card: Hardware, case: Case, **settings: Any) -> tuple[Settled, Candidate]:
    """A run on a card with nothing else on it: what it settles, and its simulated step."""
    costs = costs_of(case)
    model = costs.spec()
    plan = method(case.method, **settings)
    room = Room(card.device_bytes, card.host_bytes)
    decided = settle(
        plan, model, SHAPE, costs(plan, SHAPE), device="cuda", room=room, named=frozenset(settings)
    )
    return decided, look_at(Task(model, costs, card, SHAPE), case.method, decided.plan)


def row(card_name: str, case_name: str) -> str:
    """A row of the table."""
    card = hardware.load(card_name)
    case = CASES[case_name]
    decided, candidate = foreseen(card, case)
    if candidate.simulation is None and case.otherwise:
        decided, candidate = foreseen(card, case, **dict(case.otherwise))
    plan = decided.plan
    placed = plan.frozen if plan.estimator.facts.walks_back else plan.trainable
    run = f"{case_name}, {placed.tier} × {placed.codec}"
    if candidate.simulation is None:
        return (
            f"| {card_name} | {run} | does not fit: {candidate.refused.partition(';')[0]} | | | |"
            f" | | {SIMULATED} |"
        )
    step = candidate.simulation
    blocks = len(costs_of(case).spec().blocks)
    figures = [
        f"{step.tokens_per_second:,.0f}",
        f"{step.seconds:.2g} s" if step.seconds < 100 else duration(step.seconds),
        human_bytes(candidate.peaks[Pool.DEVICE]),
        human_bytes(candidate.peaks[Pool.HOST]),
        f"{plan.resident} of {blocks}",
        step.bottleneck(),
    ]
    return f"| {card_name} | {run} | {' | '.join(figures)} | {SIMULATED} |"


@functools.cache
def found_steps() -> dict[str, Any]:
    """The steps that were found on an H200, with where they come from."""
    value: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8"))
    return value


def step_foreseen(row: Mapping[str, Any]) -> Simulation | None:
    """A row's step on the card's description; None of another program's loop. No block stays and no
    graph is kept: the walker that ran had no budget."""
    if row["method"] not in METHODS:
        return None
    costs = costs_of(Case(row["model"], row["dtype"], row["method"], row["lora_rank"]))
    model = costs.spec()
    plan = method(row["method"], **row["settings"])
    shape = Shape(row["batch"], found_steps()["sequence"])
    of_units = costs(plan, shape)
    pending = steady(plan, model)
    inputs = {"costs": of_units, "pending": pending, "device": "cuda"}
    programs = compile_ranks(plan, model, StepKind.TRAIN, shape, **inputs)
    return simulate(programs, plan, model, hardware.load("h200"), of_units)


def found_table() -> Iterator[str]:
    """The lines of the steps that were found."""
    yield from FOUND_HEAD
    for name, row in found_steps()["rows"].items():
        step = step_foreseen(row)
        seconds = peak = ("–", "–")
        peak_bytes = row["peak_bytes"]
        if step is not None:
            device = step.program.peaks()[Pool.DEVICE]
            seconds = (f"{1e3 * step.seconds:.0f}", f"{step.seconds / row['seconds']:.2f}")
            peak = (f"{device / 1e6:,.0f}", f"{device / peak_bytes:.2f}")
        figures = [
            f"{row['model']} {row['method']}, {name}",
            f"{1e3 * row['seconds']:.0f}",
            f"{1e3 * row['busy_seconds']:.0f}",
            f"{row['starts']:,}",
            *seconds,
            f"{peak_bytes / 1e6:,.0f}",
            *peak,
        ]
        yield f"| {' | '.join(figures)} |"


def table(cards: Sequence[str] = CARDS, cases: Sequence[str] = tuple(CASES)) -> Iterator[str]:
    """The table's lines."""
    yield from HEAD
    yield from (row(card, case) for case in cases for card in cards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/cards.md")
    write = parser.parse_args().write
    lines = [*table(), "", FOUND_MARK, "", *found_table()]
    print("\n".join(lines))
    if write:
        before, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
        assert mark, f"{PAGE} has no line {MARK}"
        atomic_files.write_bytes(PAGE, "\n".join([before + mark, "", *lines, ""]).encode())


if __name__ == "__main__":
    main()

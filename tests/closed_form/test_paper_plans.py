"""AsyncHZP's configurations as plans and as programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from blockwalk.plan.methods import method
from blockwalk.simulate import hardware

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks").is_dir(), reason="benchmarks are not installed"
)


def of_page() -> list[str]:
    """The configurations of hzp's page, each a block of YAML."""
    page = (ROOT / "docs" / "methods" / "hzp.md").read_text(encoding="utf-8")
    section = page.partition("## The paper's configurations")[2].partition("\n## ")[0]
    parts = section.split("\n\n")
    return [part for part in parts if part.startswith("    mesh:")]


def test_configurations_of_the_page_are_those_of_the_tables() -> None:
    """Oracle: the paper's words for each row, Z1, Z2, Z3, CP and PP, read by eye."""
    from benchmarks.asynchzp import CASES

    names = ["2: 9B", "2: 36B", "4: 8K", "3: PP=8", "4: 128K"]
    sizes = [(64, 8, 8, 8, 1, 16), (64, 8, 8, 8, 4, 64), (256, 8, 8, 8, 1, 64),
             (64, 8, 8, 1, 8, 32), (64, 8, 8, 8, 4, 16)]  # fmt: skip
    blocks = of_page()
    assert len(blocks) == len(names)
    for name, text, (z1, z2, z3, context, stages, micro_batches) in zip(
        names, blocks, sizes, strict=True
    ):
        plan = method("hzp", **yaml.safe_load(text))
        assert plan == method("hzp", **CASES[name].settings())
        assert (plan.optimizer_ranks, plan.gradient_ranks, plan.parameter_ranks) == (z1, z2, z3)
        assert (plan.mesh.context, plan.mesh.pipeline) == (context, stages)
        assert plan.gradient_accumulation_steps == micro_batches


@pytest.mark.parametrize(
    ("name", "mfu", "gigabytes", "worst"),
    [("2: 36B", 0.4626, 57.98, 0.35), ("4: 8K", 0.4950, 63.87, 0.15)],
    ids=["four stages", "no stages"],
)
def test_programs_are_near_the_published_rows(
    name: str, mfu: float, gigabytes: float, worst: float
) -> None:
    """Oracle: AsyncHZP's tables 2 and 4, the 36B: MFU, where the rate of attention alone is fitted,
    on another row, and memory, where nothing is. Stages recompute more than the paper's."""
    from benchmarks.asynchzp import CASES, FITTED, compiled, with_rate

    assert name != FITTED
    kept = json.loads((ROOT / "benchmarks" / "results" / "paper_tables.json").read_text())
    (rate,) = (row["predicted"] for row in kept["asynchzp"] if row["unit"] == "FLOP/s")
    machine = with_rate(hardware.load("asynchzp-64gb"), "attention", rate)
    assert machine.flops_of("bfloat16") <= 0.75 * machine.peak_of("bfloat16")
    assert rate <= 0.75 * machine.peak_of("bfloat16")
    fewer = dataclasses.replace(CASES[name], tokens=CASES[name].tokens // 4)  # for the test's time
    case = compiled(fewer)
    assert case.mfu(machine) == pytest.approx(mfu, rel=worst)
    assert case.gigabytes == pytest.approx(gigabytes, rel=0.15)

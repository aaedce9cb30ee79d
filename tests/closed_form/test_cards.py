"""Oracle: figures that whoever asks for a plan must get (a floor of speed, a ceiling of bytes), the
sizes of pieces by their definition, and for the page the script that prints its rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from blockwalk.numerics.device import PIECE, pieces
from blockwalk.plan.placement import Codec
from blockwalk.program.program import Pool
from blockwalk.simulate import hardware

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")


def test_seven_billion_parameters_train_at_the_speed_of_the_card() -> None:
    """684 tokens/s where weights come from the disk, over 7,000 from the host, more where they and
    graphs stay: beside a host that takes no time."""
    from benchmarks.cards import CASES, SHAPE, costs_of, foreseen

    from blockwalk.plan.methods import method
    from blockwalk.simulate.planner import Task, look_at

    card = hardware.load("h200").without_host()
    case = CASES["7B LoRA"]
    decided, found = foreseen(card, case)
    assert found.simulation is not None
    assert found.simulation.tokens_per_second >= 7000
    assert found.peaks[Pool.DEVICE] <= (decided.plan.budget or 0) == int(0.9 * card.device_bytes)
    task = Task(costs_of(case).spec(), costs_of(case), card, SHAPE)
    host = {"frozen": "host × int4a", "activation": "host"}
    visiting = look_at(task, "host", method("mebp", **host, resident=0, recompute="all"))
    assert visiting.simulation is not None
    assert visiting.simulation.tokens_per_second >= 7000
    disk = look_at(task, "disk", method("mebp", resident=0, recompute="all"))
    assert disk.simulation is not None
    assert disk.simulation.tokens_per_second < 1000


def test_seventy_billion_parameters_train_on_24_gb_from_pinned_pieces() -> None:
    from benchmarks.cards import CASES, costs_of, foreseen

    card = hardware.load("rtx-4090")
    case = CASES["70B LoRA"]
    blocks = [block.nbytes(Codec.INT4A, trainable=False) for block in costs_of(case).spec().blocks]
    assert 42e9 < sum(blocks) < 48e9
    counts = pieces(blocks)
    firsts = [sum(counts[:n]) for n in range(len(counts))]
    assert len(counts) > 1, "no single registration of all"
    assert all(
        sum(blocks[first : first + count]) <= PIECE
        for first, count in zip(firsts, counts, strict=True)
    )
    wide = dataclasses.replace(card, host_bytes=72 * 10**9)  # optimizer states lie there as well
    # As many blocks stay as the budget holds; every one visits.
    beside = {"resident": 0, "trainable": "disk × fp32"}  # adapters stay beside the card
    for machine, settings in ((card, {}), (wide, beside)):
        decided, found = foreseen(machine, case, **settings)
        assert decided.plan.frozen.tier == "host"
        assert found.simulation is not None
        assert found.simulation.tokens_per_second > 200
        assert found.peaks[Pool.DEVICE] <= 0.9 * machine.device_bytes
        assert found.peaks[Pool.HOST] <= 0.8 * machine.host_bytes
    assert found.peaks[Pool.HOST] > sum(blocks)
    assert found.peaks[Pool.DEVICE] < 8e9


@pytest.mark.parametrize(("card", "case"), [("h200", "7B LoRA"), ("rtx-4090", "70B LoRA")])
def test_the_page_has_what_the_script_prints(card: str, case: str) -> None:
    """If not: ``python benchmarks/cards.py --write``."""
    from benchmarks.cards import CARDS, CASES, PAGE, row

    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert row(card, case) in lines
    rows = [line for line in lines if line.startswith("| ") and line.split(" | ")[0][2:] in CARDS]
    assert len(rows) == len(CARDS) * len(CASES)
    assert all(line.endswith("| (simulated) |") for line in rows)


def test_steps_that_were_found_on_a_card_are_foreseen() -> None:
    """Oracle: a profiler's figures of nine steps on an H200, to a quarter in seconds; peaks of the
    walks of zeroth order to 3%, and those of LoRA, whose distance is a known error, to 14%."""
    from benchmarks.cards import found_steps, step_foreseen

    rows = found_steps()["rows"]
    steps = {name: step for name, row in rows.items() if (step := step_foreseen(row)) is not None}
    assert len(rows) == 13
    assert len(steps) == 9
    for name, step in steps.items():
        row = rows[name]
        assert step.seconds == pytest.approx(row["seconds"], rel=0.25), name
        error = 0.14 if row["lora_rank"] else 0.03
        peak = step.program.peaks()[Pool.DEVICE]
        assert peak == pytest.approx(row["peak_bytes"], rel=error), name


def test_the_page_has_the_steps_that_were_found() -> None:
    """If not: ``python benchmarks/cards.py --write``."""
    from benchmarks.cards import PAGE, found_table

    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in found_table() if line not in lines] == []

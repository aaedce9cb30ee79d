"""Oracle: the published rows in ``benchmarks/data``: memory within 15%, everything else within
25%."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
@pytest.mark.parametrize(
    "name",
    [
        "zo2",
        "ablation",
        "zo2_autocast",
        "zo2_batches",
        "zo2_lengths",
        "zo2_qwen3",
        "distzo2",
        "distzo2_batches",
        "distzo2_cards",
        "distzo2_lengths",
        "communication",
        "decompression",
        "links",
        "states",
        "transfer",
        "mebp",
        "fcdp",
    ],
)
def test_published_rows_are_met(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import paper_tables
    from benchmarks.misses import MISSES

    assert name in paper_tables.TABLES
    rows = list(paper_tables.TABLES[name]())
    missed = {
        row["what"].partition(" (ours")[0]
        for row in rows
        if row["error"] is not None and abs(row["error"]) > (0.15 if row["unit"] == "MB" else 0.25)
    }
    assert missed == MISSES.get(name, {}).keys()
    sys.modules.pop("paper_tables")


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_kept_cells_are_within_the_bounds() -> None:
    """Oracle: the published cells of the kept run, each as often as it is published; median 6%, and
    7% of them off by more than 25%, where the goal is 5%."""
    kept = json.loads((BENCHMARKS / "results" / "paper_tables.json").read_text(encoding="utf-8"))
    errors = [
        abs(row["predicted"] / row["published"] - 1)
        for name, rows in kept.items()
        if name not in ("date", "forecast")
        for row in rows
        if row["published"]
    ]
    assert len(errors) >= 400
    assert statistics.median(errors) <= 0.06
    assert sum(error > 0.25 for error in errors) <= 0.07 * len(errors)


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_a_check_fails_where_a_bound_is_broken() -> None:
    """Oracle: rows that are off by what is written here."""
    from benchmarks.misses import broken_bounds

    def cell(error: float, what: str = "a cell") -> dict[str, object]:
        return {"what": what, "error": error, "unit": "tok/s"}

    assert not broken_bounds({"links": [cell(0.06)] * 39})
    assert broken_bounds({"links": [cell(0.07)] * 39})
    (unnamed,) = broken_bounds({"links": [cell(0.01)] * 39 + [cell(0.3)]})
    assert "a cell" in unnamed
    far = [cell(0.3, "Gemma3-1B mebp seconds")] * 2
    assert not broken_bounds({"mebp": [cell(0.01)] * 38 + far})
    assert len(broken_bounds({"mebp": [cell(0.01)] * 36 + far})) == 1
    assert not broken_bounds({"links": [cell(0.01)], "forecast": [cell(0.2)] * 5})


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_largest_batches_are_those_of_the_paper_or_near() -> None:
    """Oracle: FCDP's tables V and VI in ``benchmarks/data``: a batch of b fits, and one of 2b does
    not. 18 of 20 are met; of the others the most rows that fit are at most 35% beyond."""
    kept = json.loads((BENCHMARKS / "results" / "paper_tables.json").read_text(encoding="utf-8"))
    batches = kept["batches"]
    assert len(batches) == 20
    assert sum(row["error"] == 0 for row in batches) >= 18
    assert max(abs(row["beyond"]) for row in batches) <= 0.35


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_programs_hold_what_the_largest_model_leaves_room_for() -> None:
    """Oracle: FCDP's tables V and VI, GPT-30B: rows of a card, 0 where the paper is out of
    memory."""
    from benchmarks.fcdp import largest, power_of_two

    assert power_of_two(largest("ZeRO-3", 30, 2)) == 64 // 16
    assert largest("ZeRO++", 30, 2) == 0
    assert power_of_two(largest("FCDP", 30, 4)) == 256 // 32


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_claims_of_figures_are_foreseen() -> None:
    """Oracle: what FCDP's text says of its figures, in ``benchmarks/data``; the kept run. Median
    15%, worst 35%."""
    kept = json.loads((BENCHMARKS / "results" / "paper_tables.json").read_text(encoding="utf-8"))
    errors = [abs(row["error"]) for row in kept["figures"] if row["error"] is not None]
    assert len(errors) == 10
    assert statistics.median(errors) <= 0.15
    assert max(errors) <= 0.35


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_rows_of_stages_are_within_the_bounds() -> None:
    """Oracle: AsyncHZP's tables in ``benchmarks/data``; the kept run's figures. Median 15%, worst
    35%."""
    kept = json.loads((BENCHMARKS / "results" / "paper_tables.json").read_text(encoding="utf-8"))
    errors = [
        abs(row["error"])
        for row in kept["asynchzp"]
        if row["error"] is not None and "priced by a formula" not in row["what"]
    ]
    assert len(errors) == 11
    assert statistics.median(errors) <= 0.15
    assert max(errors) <= 0.35


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_forecasts_with_nothing_fitted_are_near_the_published_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: ZO2's table on an A100 and DistZO2's on H20s, memory and speed: rates are those of
    the machines as they ship."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import paper_tables

    monkeypatch.setattr(paper_tables, "fitted", None)
    for table, figures in ((paper_tables.zo2_table, 24), (paper_tables.distzo2_table, 30)):
        errors = sorted(abs(row["error"]) for row in paper_tables.forecast_table([table]))
        assert len(errors) == figures - (table is paper_tables.distzo2_table)
        assert statistics.median(errors) <= 0.15
        assert errors[-1] <= 0.35
    sys.modules.pop("paper_tables")


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_blocks_that_stay_make_a_step_as_fast_as_its_slower_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the seconds of the lanes, of the bytes that are still streamed and of what is
    computed, each by itself."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import paper_tables

    faster, bound = (
        [row["predicted"] for row in paper_tables.residency_table()][n::2] for n in (0, 1)
    )
    assert faster[0] >= 1.4
    assert min(faster) >= 1.0
    assert max(bound) <= 1.1
    sys.modules.pop("paper_tables")


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not installed")
def test_help_answers_and_does_nothing_else() -> None:
    """Oracle: argparse's exit code; what the tables print is not there."""
    command = [sys.executable, BENCHMARKS / "paper_tables.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "off by more than 6%" in done.stdout
    assert "more than 5% of them by more than 25%" in " ".join(done.stdout.split())
    assert "published figures missed" not in done.stdout

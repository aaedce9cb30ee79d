"""Oracle: the results that benchmarks kept, and the papers' tables, read here by themselves."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from benchmarks import claims

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def kept(name: str) -> Any:
    """What a benchmark kept."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def cells(word: str) -> list[str]:
    """The cells of the one line of the page that has a word in its first cell."""
    lines = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    (line,) = [line for line in lines if word in line[0]]
    return line


def numbers(cell: str) -> list[float]:
    """The numbers of a cell."""
    return [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*\.?\d*", cell)]


def test_the_page_is_what_the_script_writes() -> None:
    """If not: ``python benchmarks/claims.py``."""
    assert "\n".join(claims.page()) + "\n" == PAGE


def test_figures_of_both_sides_are_those_that_were_kept() -> None:
    peft = kept("vs_peft_smollm2_epyc")["figures"]
    _, _, theirs, ours, *_ = cells("beside PEFT's fastest")
    for cell, side in ((theirs, peft["fastest"]), (ours, "ours")):
        memory, seconds = numbers(cell)
        assert abs(memory - peft["peak_MB"][side]) <= 0.5
        assert abs(seconds - peft["seconds"][side]) <= 0.05
    rows = kept("steps_h200")["rows"]
    _, _, theirs, ours, *_ = cells("Qwen2.5-1.5B")
    for cell, row in ((theirs, rows["peft, 4"]), (ours, rows["raw host, 4"])):
        assert numbers(cell) == [row["peak_bytes"] / 1e6, round(1e3 * row["seconds"])]


def test_what_others_published_is_the_papers_table() -> None:
    with (ROOT / "benchmarks/data/mebp_table1_iphone15promax.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["model"] == "Qwen2.5-3B")
    figures = numbers(cells("MeBP")[1])[:2]
    assert figures == [round(float(row["mebp_MB"])), round(float(row["mebp_s"]), 1)]


def test_no_line_is_without_a_command_that_is_there_and_a_day() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == 10
    for line in lines:
        script = re.search(r"`python (benchmarks/\w+\.py)`", line)
        assert script, line
        assert (ROOT / script[1]).is_file()
        assert re.search(r"\d+ November 2026 \|$", line), line

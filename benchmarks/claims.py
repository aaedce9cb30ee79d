"""The claims of this project beside what others publish or do here: ``docs/claims.md``, written
from what the other benchmarks kept in ``results/`` and from the figures of papers in ``data/``.

    python benchmarks/claims.py          # writes the page
    python benchmarks/claims.py --check  # exit 1 where the page differs from the results"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "claims.md"
HEAD = (
    "| claim | theirs, published | theirs, here | ours, here | where | command | kept |",
    "|---|---|---|---|---|---|---|",
)
ABOVE = """# Claims

<!-- Written by `python benchmarks/claims.py`; edit that script instead. -->

Each line is read from what the command kept in `benchmarks/results`, on the day in the last
column. What others published stands in `benchmarks/data` with its source; they may count otherwise.
A dash is a figure that nobody published, or that was not run here. Memory is private memory of the
whole process, on a GPU the allocator's peak.
"""
BELOW = """
Not measured, and so not claimed: a card's figures beside an expert's setting of another tool,
answers by codec, preference tuning. [All figures](measured.md), with their conditions.
"""


@dataclass(frozen=True)
class Claim:
    """A line of the page."""

    what: str
    published: Callable[[], str]
    theirs: Callable[[], str]
    ours: Callable[[], str]
    place: str
    command: str
    kept: str
    """The day on which the result was kept."""

    def line(self) -> str:
        """Write the line."""
        figures = (self.published(), self.theirs(), self.ours())
        command = f"`python benchmarks/{self.command}`"
        return f"| {' | '.join((self.what, *figures, self.place, command, self.kept))} |"


def nothing() -> str:
    """Write a figure that there is not."""
    return "–"


@cache
def result(name: str) -> Any:
    """The figures that a benchmark kept under a name."""
    content = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    return content.get("figures", content)


def machine_of(name: str) -> str:
    """The machine on which a benchmark kept its figures."""
    path = ROOT / f"benchmarks/results/{name}.json"
    machine = json.loads(path.read_text(encoding="utf-8"))["machine"]
    return f"{machine['cores']} cores, {machine['cpu']}"


@cache
def published(name: str, model: str) -> dict[str, str]:
    """A model's row of a paper's table."""
    with (ROOT / f"benchmarks/data/{name}.csv").open(encoding="utf-8") as file:
        return next(row for row in csv.DictReader(file) if row["model"] == model)


def step(name: str) -> str:
    """Memory and time of a side of the comparison with PEFT."""
    figures = result("vs_peft_smollm2_epyc")
    side = figures["fastest"] if name == "peft" else name
    return f"{figures['peak_MB'][side]:,.0f} MB, {figures['seconds'][side]:.1f} s"


def on_h200(row: str) -> str:
    """Memory and time of a step that was found on an H200."""
    figures = result("steps_h200")["rows"][row]
    return f"{figures['peak_bytes'] / 1e6:,.0f} MB, {1e3 * figures['seconds']:.0f} ms"


def mebp_on_a_phone() -> str:
    """Memory and time of MeBP's table 1."""
    row = published("mebp_table1_iphone15promax", "Qwen2.5-3B")
    return f"{float(row['mebp_MB']):,.0f} MB, {float(row['mebp_s']):.1f} s (iPhone 15 Pro Max)"


def mebp_here() -> str:
    """Memory and time of the same model here."""
    row = next(row for row in result("mebp_table1_epyc") if row["model"] == "Qwen2.5-3B")
    return f"{row['peak_MB']:,.0f} MB, {row['seconds']:.1f} s"


def zo2_on_an_a100() -> str:
    """Memory of ZO2's table 1."""
    row = published("zo2_table1_a100_bs1_seq2048", "OPT-1.3B")
    return f"{int(row['zo2_fp16_MB']):,} MB (A100)"


def seconds_of(side: str) -> str:
    """Seconds of a step of all parameters over 50 Mbit/s."""
    return f"{result('sharded_hsdp')['hsdp']['full A=4, 50mbit'][side]['seconds']:.2f} s"


def difference() -> str:
    """The largest difference of two curves."""
    curves = result("curves-smollm2")
    return f"{curves['largest difference']:.1e} in {curves['steps']} steps"


def limit_of_70b() -> str:
    """The limit under which a step of the 70B model ended."""
    row = result("memory_limit_70b")[0]
    return f"{row['limit'] / 1e9:.1f} GB, {row['seconds'][0]:.0f} s a step"


def kills() -> str:
    """Runs that were killed, and those that did not end as one that was never killed."""
    campaign = result("faults")["kills at 5536651 and 6890eed, 23 November, load 2 to 35"]
    found = campaign["found"]
    return f"{found['kills']:,} kills, {found['resumed']:,} resumes, {len(campaign['told'])} wrong"


def forecasts(kind: str) -> str:
    """Forecast over measured, from the least case to the greatest."""
    cases = [case for case in result("foresight_epyc")["cases"] if case.get(f"measured_{kind}")]
    shares = [case[f"predicted_{kind}"] / case[f"measured_{kind}"] for case in cases]
    return f"{min(shares):.2f} to {max(shares):.2f} times the measured, {len(cases)} cases"


H200 = "one H200, commit 12f79d11"
CORES = "2 cores, shared"
CLAIMS = (
    Claim(
        "LoRA step of SmolLM2-135M on GSM8K, 4 × up to 512 tokens, beside PEFT's fastest setting",
        nothing,
        lambda: step("peft"),
        lambda: step("ours"),
        machine_of("vs_peft_smollm2_epyc"),
        "vs_peft.py",
        "27 November 2026",
    ),
    Claim(
        "The same losses as transformers + PEFT: the largest difference",
        nothing,
        lambda: "0",
        difference,
        CORES,
        "curves.py",
        "23 November 2026",
    ),
    Claim(
        "MeBP: LoRA step of Qwen2.5-3B, 256 tokens",
        mebp_on_a_phone,
        nothing,
        mebp_here,
        machine_of("mebp_table1_epyc"),
        "mebp_table1.py",
        "25 November 2026",
    ),
    Claim(
        "LoRA on a 70B under a hard limit of memory, file pages included",
        nothing,
        nothing,
        limit_of_70b,
        machine_of("memory_limit_70b"),
        "memory_limit.py",
        "23 November 2026",
    ),
    Claim(
        "ZO2's memory: OPT-1.3B, float16, 1 × 2,048 tokens",
        zo2_on_an_a100,
        nothing,
        lambda: on_h200("zo2, 1"),
        H200,
        "cards.py",
        "28 November 2026",
    ),
    Claim(
        "LoRA of Qwen2.5-1.5B on a card, 4 × 2,048 tokens, beside PEFT with checkpointing",
        nothing,
        lambda: on_h200("peft, 4"),
        lambda: on_h200("raw host, 4"),
        H200,
        "cards.py",
        "28 November 2026",
    ),
    Claim(
        "FCDP beside HSDP: all parameters, four micro-batches, 50 Mbit/s between nodes",
        nothing,
        lambda: seconds_of("hsdp"),
        lambda: seconds_of("fcdp"),
        machine_of("sharded_hsdp"),
        "sharded.py",
        "27 November 2026",
    ),
    Claim(
        "Killed runs end with the bits of one that was never killed",
        nothing,
        nothing,
        kills,
        CORES,
        "faults.py",
        "23 November 2026",
    ),
    Claim(
        "Memory is foreseen",
        nothing,
        nothing,
        lambda: forecasts("bytes"),
        machine_of("foresight_epyc"),
        "foresight.py",
        "27 November 2026",
    ),
    Claim(
        "Seconds are foreseen",
        nothing,
        nothing,
        lambda: forecasts("seconds"),
        machine_of("foresight_epyc"),
        "foresight.py",
        "27 November 2026",
    ),
)
"""The page's lines."""


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield ABOVE
    yield from HEAD
    yield from (claim.line() for claim in CLAIMS)
    yield BELOW.rstrip("\n")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--check", action="store_true", help="exit 1 where the page differs")
    arguments = options.parse_args()
    text = "\n".join(page()) + "\n"
    if arguments.check:
        sys.exit(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

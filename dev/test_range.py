"""The suite in two environments: the oldest and the newest supported versions of what Blockwalk
computes with.

    python -m dev.test_range [--only oldest|newest] [--again] [PYTEST ARGUMENT ...]
    python -m dev.test_range --page                      # the page alone, of what is kept

Each environment is made below ``build/range`` and kept. First it trains README's example, then it
runs the suite. The outcome is kept in ``dev/tested_with.json`` and shown by
``docs/tested-with.md``; ``--again`` runs the tests that failed once more, and adds what became of
each. Exit code 1 where the example or a test fails."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from dev.suite_outcome import (
    AGAIN,
    PASSED,
    SKIPPED,
    Failure,
    Verdict,
    account,
    failures,
    fates,
    verdicts,
)

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "range"
KEPT = ROOT / "dev" / "tested_with.json"
PAGE = ROOT / "docs" / "tested-with.md"
OLDEST = (
    "torch==2.11.*",
    "transformers==5.17.*",
    "peft==0.20.*",
    "huggingface_hub==1.33.*",
    "numpy==2.2.*",
)
"""The lower ends of pyproject.toml; the extras for development pull the rest."""
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "numpy",
    "trl",
)
EXAMPLE = "examples/quickstart.yaml"
EXCUSED = (AGAIN[PASSED], AGAIN[SKIPPED])
"""Fates of failures with which the range holds."""
SUITE = ("-q", "-n", "auto", "--dist", "worksteal", "--continue-on-collection-errors")


def environment(name: str, requirements: tuple[str, ...]) -> Path:
    """The Python of an environment with Blockwalk, its development extra and these requirements."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--upgrade",
        "-e",
        ".[dev]",
        *requirements,
    ]
    subprocess.run(install, cwd=ROOT, check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """The versions of :data:`PACKAGES` in an environment."""
    program = "import json, sys; from importlib.metadata import version; "
    program += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    answer = subprocess.run(
        [str(python), "-c", program, *PACKAGES], capture_output=True, text=True, check=True
    )
    return dict(json.loads(answer.stdout))


def quickstart(name: str, python: Path) -> tuple[str, bool]:
    """README's main command in an environment: its last line, or its error, and whether it
    trained."""
    run = FOLDER / name / "quickstart"
    shutil.rmtree(run, ignore_errors=True)
    command = [str(python), "-m", "blockwalk", "train", EXAMPLE, "--output_dir", str(run)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    printed = ended.stdout if ended.returncode == 0 else ended.stderr or ended.stdout
    lines = [line.strip() for line in printed.splitlines() if line.strip()] or ["it said nothing"]
    trained = ended.returncode == 0
    text = next((line for line in lines if line.startswith("held-out loss")), lines[-1])
    return ("trained: " if trained else f"code {ended.returncode}: ") + text, trained


def suite(name: str, python: Path, arguments: list[str], *, again: bool) -> str:
    """Run the suite, or what failed in it, and give its closing line. The report lies beside those
    of earlier runs of what failed; each environment remembers its own failures."""
    folder = FOLDER / name
    earlier = sorted(folder.glob("again-*.xml"))
    report = folder / (f"again-{len(earlier) + 1:03d}.xml" if again else "first.xml")
    if again and not (folder / "first.xml").exists():
        raise SystemExit(f"{name}: nothing was run yet in {folder}: leave --again out")
    if not again:
        for path in (report, *earlier):
            path.unlink(missing_ok=True)
    own = ["-o", f"cache_dir={FOLDER / name / 'pytest_cache'}", "-o", "junit_family=xunit1"]
    failed = ["--last-failed", "--last-failed-no-failures", "none"]
    chosen = [*failed, *arguments] if again else arguments
    run = subprocess.run(
        [str(python), "-m", "pytest", *SUITE, *own, f"--junit-xml={report}", *chosen],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    endings = (" passed", " failed", " skipped", " error")
    closing = next(
        (
            line.strip("= ")
            for line in reversed(run.stdout.splitlines())
            if any(ending in line for ending in endings)
        ),
        "no test ran",
    )
    if not report.exists():
        raise SystemExit(f"{name}: pytest wrote no report:\n{(run.stdout + run.stderr)[-2000:]}")
    return closing


def known(name: str) -> tuple[dict[str, Verdict], dict[str, Verdict] | None]:
    """The verdicts of an environment's first run, and of all runs of what failed, the latest of
    each test; None before there was one."""
    folder = FOLDER / name
    first = verdicts((folder / "first.xml").read_text(encoding="utf-8"))
    reports = sorted(folder.glob("again-*.xml"))
    again: dict[str, Verdict] = {}
    for report in reports:
        again |= verdicts(report.read_text(encoding="utf-8"))
    return first, again if reports else None


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The page *tested with*, of what is known of both environments."""
    text = (
        "# Tested with\n\n`make test-range` trains README's example with the oldest and the newest"
        " supported versions,\nthen runs the suite with both.\n"
    )
    text += (
        "It writes this page. A newer version than the newest here is accepted, and a run says so"
        " in one note.\n\n"
    )
    text += f"| | {' | '.join(rows)} |\n|---|{'---|' * len(rows)}\n"
    for package in PACKAGES:
        text += f"| {package} | {' | '.join(row['versions'][package] for row in rows.values())} |\n"
    known = {name: [Failure(**entry) for entry in row["failures"]] for name, row in rows.items()}
    lines = {
        f"`blockwalk train {EXAMPLE}`": [row["quickstart"] for row in rows.values()],
        "suite": [row["closing"] for row in rows.values()],
        "failures": [account(row["failed"], row["fates"]) for row in rows.values()],
        "date": [row["date"] for row in rows.values()],
        "selection": [row["selection"] for row in rows.values()],
    }
    for label, cells in lines.items():
        text += f"| {label} | {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"
    for name, failures_of_end in known.items():
        for fate in dict.fromkeys(failure.fate for failure in failures_of_end):
            text += f"\nWith the {name} versions, {fate}:\n\n"
            text += "".join(
                f"- `{failure.test}`: {inert(failure.reason)}\n"
                for failure in failures_of_end
                if failure.fate == fate
            )
    return text


def inert(reason: str) -> str:
    """A reason as Markdown that is nothing but text."""
    words = " ".join(reason.split()).replace("`", "'")
    return f"`{words[:200]}`" if words else "no reason was told"


def main() -> int:
    """Test both ends of the range, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("oldest", "newest"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", action="store_true", help="write the page of what is kept alone")
    options, arguments = parser.parse_known_args()
    rows: dict[str, dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))
    if options.page:
        PAGE.write_text(page(rows), encoding="utf-8")
        return 0
    passed = True
    for name, requirements in (("oldest", OLDEST), ("newest", ())):
        if options.only not in (None, name):
            continue
        python = environment(name, requirements)
        example, trained = quickstart(name, python)
        print(f"{name}: {EXAMPLE} {example}", flush=True)
        closing = suite(name, python, arguments, again=options.again)
        selection = " ".join(arguments) or "all"
        if options.again:
            closing = f"{rows[name]['closing']}; the failed ones again: {closing}"
            selection = rows[name]["selection"]
        rows[name] = outcome(*known(name)) | {
            "versions": versions(python),
            "quickstart": example,
            "closing": closing,
            "date": date.today().isoformat(),
            "selection": selection,
        }
        passed &= trained and all(row["fate"] in EXCUSED for row in rows[name]["failures"])
        KEPT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(rows), encoding="utf-8")
        print(f"{name}: {closing}", flush=True)
    return 0 if passed else 1


def outcome(
    first: Mapping[str, Verdict], again: Mapping[str, Verdict] | None = None
) -> dict[str, Any]:
    """What is kept of a first run and of the second, if there was one: how many tests failed, and
    what became of each."""
    rows = failures(first, again)
    return {
        "failed": len(rows),
        "fates": fates(rows),
        "failures": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())

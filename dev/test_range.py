"""The suite in two environments: the oldest and the newest supported versions of what Blockwalk
computes with.

    python dev/test_range.py [--only oldest|newest] [--again] [PYTEST ARGUMENT ...]

Each environment is made below ``build/range`` and kept. The outcome is kept in
``dev/tested_with.json`` and shown by ``docs/tested-with.md``; ``--again`` adds that of the tests
that failed, run once more. Exit code 1 where a test fails."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from datetime import date
from pathlib import Path

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
SUITE = ("-q", "-n", "auto", "--dist", "worksteal")


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


def outcome(python: Path, arguments: list[str]) -> tuple[str, list[str], bool]:
    """The suite's closing line, the names of the tests that failed, and whether all passed."""
    run = subprocess.run(
        [str(python), "-m", "pytest", *SUITE, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = run.stdout.splitlines()
    closing = next(
        (line.strip("= ") for line in reversed(lines) if " passed" in line or " failed" in line),
        "no test ran",
    )
    failed = [
        match[1] for line in lines if (match := re.match(r"(?:FAILED|ERROR) (.+?)(?: - |$)", line))
    ]
    return closing, failed, run.returncode == 0


def page(rows: dict[str, dict[str, object]]) -> str:
    """The page *tested with*, of what is known of both environments."""
    text = (
        "# Tested with\n\n`make test-range` runs the suite with the oldest and the newest"
        " supported versions.\n"
    )
    text += (
        "It writes this page. A newer version than the newest here is accepted, and a run says so"
        " in one note.\n\n"
    )
    text += f"| | {' | '.join(rows)} |\n|---|{'---|' * len(rows)}\n"
    for package in PACKAGES:
        versions = [row["versions"][package] for row in rows.values()]  # type: ignore[index]
        text += f"| {package} | {' | '.join(map(str, versions))} |\n"
    for label, key in (("outcome", "closing"), ("date", "date"), ("selection", "selection")):
        text += f"| {label} | {' | '.join(str(row[key]) for row in rows.values())} |\n"
    for name, row in rows.items():
        failed = row["failed"]
        if isinstance(failed, list) and failed:
            text += f"\nFailed with the {name} versions:\n\n" + "".join(
                f"- `{test}`\n" for test in failed
            )
    return text


def main() -> int:
    """Test both ends of the range, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("oldest", "newest"))
    parser.add_argument("--again", action="store_true")
    options, arguments = parser.parse_known_args()
    rows: dict[str, dict[str, object]] = json.loads(KEPT.read_text(encoding="utf-8"))
    passed = True
    for name, requirements in (("oldest", OLDEST), ("newest", ())):
        if options.only in (None, name):
            python = environment(name, requirements)
            if options.again:
                closing, failed, well = outcome(python, ["--last-failed", *arguments])
                closing = f"{rows[name]['closing']}; the failed ones again: {closing}"
            else:
                closing, failed, well = outcome(python, arguments)
            rows[name] = {
                "versions": versions(python),
                "closing": closing,
                "failed": failed,
                "date": date.today().isoformat(),
                "selection": " ".join(arguments) or "all",
            }
            passed &= well
            KEPT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(page(rows), encoding="utf-8")
            print(f"{name}: {closing}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

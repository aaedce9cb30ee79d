"""Oracle: arithmetic on version numbers, and pyproject.toml's own range."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from blockwalk.system import versions as system_versions
from blockwalk.system.versions import NEWEST_TESTED, is_older, untested

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({"torch": "2.11.0", "transformers": "5.17.0"}, []),
        (
            {
                "torch": f"{NEWEST_TESTED['torch']}.9+cpu",
                "transformers": f"{NEWEST_TESTED['transformers']}.3",
            },
            [],
        ),
        ({"torch": "2.99.0a0+git1", "transformers": "5.17.0"}, ["torch 2.99.0a0+git1"]),
        ({"torch": "3.0", "transformers": "6.0.0.dev0"}, ["torch 3.0", "transformers 6.0.0.dev0"]),
        ({"torch": "not installed", "transformers": "unknown"}, []),
    ],
)
def test_one_note_names_what_is_newer_than_tested(
    versions: dict[str, str], named: list[str]
) -> None:
    note = untested(versions)
    assert bool(note) == bool(named)
    assert all(f"{name} (tested to" in note for name in named)


@pytest.mark.parametrize(
    ("version", "older"),
    [("5.9.1", True), ("5.22.0.dev0", True), ("5.23.0", False), ("6.0", False)],
)
def test_versions_are_compared_by_number(
    version: str, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        system_versions, "installed", lambda packages: dict.fromkeys(packages, version)
    )
    assert is_older("transformers", "5.23") is older


def test_newest_tested_versions_can_be_installed() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    for package, newest in NEWEST_TESTED.items():
        (requirement,) = [each for each in dependencies if each.startswith(f"{package}>=")]
        lower, upper = requirement.removeprefix(f"{package}>=").split(",<")
        assert _numbers(lower) <= _numbers(newest) < _numbers(upper)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]

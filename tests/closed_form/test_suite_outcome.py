"""Oracle: reports of pytest, as it wrote them of tests whose outcomes are known: each failure of a
first run has a name and a fate, and the sum of all is the number that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dev import test_range
from dev.suite_outcome import AGAIN, FAILED, PASSED, SKIPPED, Failure, account, failures, verdicts

pytestmark = pytest.mark.fast

FIRST = """
import pytest
def test_good(): pass
@pytest.mark.parametrize("way", ["a/b.c", "d::e", "f | g"])
def test_ways(way): assert way == "d::e", "way `x` | " + way
class TestInside:
    def test_wrong(self): raise ValueError("9 of 8\\nsecond line")
@pytest.fixture
def broken(): raise OSError("no disk")
def test_setup(broken): pass
@pytest.fixture
def closing(): yield; raise OSError("not closed")
def test_teardown(closing): pass
def test_gone(): assert False
@pytest.mark.xfail
def test_known(): assert False
"""
SECOND = FIRST.replace('assert way == "d::e"', "assert True").replace(
    'raise ValueError("9 of 8\\nsecond line")', 'pytest.skip("needs a GPU")'
)
MODULE = "def test_one(): assert 0\ndef test_two(): assert 0\n"
SKIPPED_MODULE = 'import pytest\npytest.skip("needs transformers 5.23", allow_module_level=True)\n'


def report(folder: Path, texts: dict[str, str], *arguments: str) -> str:
    """What pytest wrote of these modules, in a process of its own."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["--continue-on-collection-errors"]
    command += ["-o", "junit_family=xunit1", "--junit-xml=report.xml", *arguments]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return (folder / "report.xml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Failure]:
    folder = tmp_path_factory.mktemp("suite")
    texts = {"room/test_first.py": FIRST, "room/test_module.py": MODULE, "test_none.py": "1 / 0\n"}
    first = report(folder, texts)
    texts = {"room/test_first.py": SECOND, "room/test_module.py": SKIPPED_MODULE}
    again = report(folder, texts, "--deselect", "room/test_first.py::test_gone", "room")
    return failures(verdicts(first), verdicts(again))


def test_each_failure_has_its_name_and_its_fate(rows: list[Failure]) -> None:
    first = "room/test_first.py"
    fates = {row.test: row.fate for row in rows}
    assert fates == {
        f"{first}::test_ways[a/b.c]": AGAIN[PASSED],
        f"{first}::test_ways[f | g]": AGAIN[PASSED],
        f"{first}::TestInside::test_wrong": AGAIN[SKIPPED],
        f"{first}::test_setup": AGAIN[FAILED],
        f"{first}::test_teardown": AGAIN[FAILED],
        f"{first}::test_gone": AGAIN[""],
        "room/test_module.py::test_one": AGAIN[SKIPPED],
        "room/test_module.py::test_two": AGAIN[SKIPPED],
        "test_none.py": AGAIN[""],
    }


def test_a_skipped_failure_has_the_reason_of_its_skip(rows: list[Failure]) -> None:
    reasons = {row.test.rpartition("::")[2]: row.reason for row in rows}
    assert reasons["test_wrong"] == "needs a GPU"
    assert reasons["test_two"] == "needs transformers 5.23"
    assert "no disk" in reasons["test_setup"]
    assert "ZeroDivisionError" in reasons["test_none.py"]


def end(rows: list[Failure], failed: int) -> dict[str, Any]:
    kept = test_range.outcome({}, {}) | {"failed": failed}
    kept["fates"] = test_range.fates(rows)
    kept["failures"] = [vars_of(row) for row in rows]
    versions = dict.fromkeys(test_range.PACKAGES, "1.0")
    words = dict.fromkeys(("quickstart", "closing", "date", "selection"), "words")
    return kept | words | {"versions": versions}


def vars_of(row: Failure) -> dict[str, str]:
    return {"test": row.test, "fate": row.fate, "reason": row.reason}


def test_the_page_names_every_failure(rows: list[Failure]) -> None:
    page = test_range.page({"oldest": end(rows, len(rows))})
    assert all(f"- `{row.test}`" in page for row in rows)
    assert "without a record" not in page
    assert f"{len(rows)} failed" in page


def test_failures_of_which_nothing_is_known_are_counted() -> None:
    counts = {AGAIN[PASSED]: 20, AGAIN[SKIPPED]: 20}
    assert "56 without a record" in account(96, counts)
    assert "without a record" not in account(40, counts)
    with pytest.raises(AssertionError):
        account(39, counts)


def test_a_first_run_alone_leaves_its_failures_failed() -> None:
    case = '<testcase classname="a" name="b" file="a.py"><failure message="m&#10;n"/></testcase>'
    first = verdicts(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    assert failures(first) == [Failure("a.py::b", FAILED, "m")]


def test_an_example_that_does_not_train_is_told_with_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(test_range, "FOLDER", tmp_path)
    monkeypatch.setattr(test_range, "EXAMPLE", "examples/none.yaml")
    text, trained = test_range.quickstart("oldest", Path(sys.executable))
    assert not trained
    assert text.startswith("code ")
    assert "examples/none.yaml" in text


def test_what_failed_may_run_again_more_than_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The third run has nothing of what passed in the second."""

    def write(name: str, **failed: bool) -> None:
        cases = [
            f'<testcase classname="a" name="{test}" file="a.py">{"<failure/>" * wrong}</testcase>'
            for test, wrong in failed.items()
        ]
        (tmp_path / "oldest" / name).write_text(f"<testsuite>{''.join(cases)}</testsuite>")

    monkeypatch.setattr(test_range, "FOLDER", tmp_path)
    (tmp_path / "oldest").mkdir()
    write("first.xml", b=True, c=True, d=False)
    first, again = test_range.known("oldest")
    assert again is None
    write("again-001.xml", b=False, c=True)
    write("again-002.xml", c=False)
    first, again = test_range.known("oldest")
    fates = {row.test: row.fate for row in failures(first, again)}
    assert fates == {"a.py::b": AGAIN[PASSED], "a.py::c": AGAIN[PASSED]}


def test_what_is_kept_is_what_the_page_shows() -> None:
    import json

    rows = json.loads(test_range.KEPT.read_text(encoding="utf-8"))
    assert test_range.PAGE.read_text(encoding="utf-8") == test_range.page(rows)

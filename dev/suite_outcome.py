"""Outcomes of a suite and of its second run, from pytest's reports: every failure of the first run
is accounted for.

A report is pytest's JUnit file of the family ``xunit1``, which names a test's file."""

from __future__ import annotations

import ast
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PASSED = "passed"
SKIPPED = "skipped"
FAILED = "failed"
_SEVERITY = {PASSED: 0, SKIPPED: 1, FAILED: 2}

AGAIN = {
    PASSED: "passed again alone",
    SKIPPED: "skipped when run again",
    FAILED: "failed again",
    "": "not run again",
}
"""What became of a failure in the second run, by its verdict there; "" where it had none."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one test."""

    outcome: str
    reason: str = ""
    """The first line of a failure, or why the test was skipped."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed in the first run, and what became of it."""

    test: str
    fate: str
    """A value of :data:`AGAIN`; :data:`FAILED` before there was a second run."""
    reason: str


def verdicts(report: str) -> dict[str, Verdict]:
    """Return the verdict on each test of a report, by its id. A test with several entries, such as
    one whose teardown fails, has the worst. A module that was skipped, or that could not be
    imported, stands under its file."""
    by_test: dict[str, Verdict] = {}
    for case in ET.fromstring(report).iter("testcase"):
        test = _id(case)
        verdict = _verdict(case)
        known = by_test.get(test)
        if known is None or _SEVERITY[known.outcome] < _SEVERITY[verdict.outcome]:
            by_test[test] = verdict
    return by_test


def _id(case: ET.Element) -> str:
    """Return a test's id as pytest's command line takes it."""
    name = case.get("name", "")
    classname = case.get("classname", "")
    file = case.get("file") or classname.replace(".", "/") + ".py"
    module = file.removesuffix(".py").replace("/", ".")
    if not classname or name in (module, classname):  # of a module that was never run
        return (file if case.get("file") or classname else name.replace(".", "/") + ".py").strip()
    classes = classname.removeprefix(module).strip(".").split(".")
    return "::".join(filter(None, [file, *classes, name]))


def _verdict(case: ET.Element) -> Verdict:
    for tag, outcome in (("error", FAILED), ("failure", FAILED), ("skipped", SKIPPED)):
        entry = case.find(tag)
        if entry is not None:
            if outcome is SKIPPED and entry.get("type") == "pytest.xfail":
                return Verdict(PASSED, "it fails as it is said to")
            return Verdict(outcome, _reason(entry))
    return Verdict(PASSED)


def _reason(entry: ET.Element) -> str:
    """Return one line: a failure's message, or the reason of a skip. A module that was not run has
    it in its text alone."""
    message = entry.get("message") or ""
    text = entry.text or ""
    if message == "collection failure":
        raised = [line for line in text.splitlines() if line.startswith("E ")]
        message = raised[-1].removeprefix("E ") if raised else message
    elif message == "collection skipped":  # (file, line, reason), as Python writes it
        message = str(ast.literal_eval(text)[-1]).removeprefix("Skipped: ")
    return (message or text).strip().partition("\n")[0].strip()


def failures(
    first: Mapping[str, Verdict], again: Mapping[str, Verdict] | None = None
) -> list[Failure]:
    """Return every failure of a first run, with what became of it in the second, if there was
    one."""
    failed = [test for test, verdict in first.items() if verdict.outcome == FAILED]
    if again is None:
        return [Failure(test, FAILED, first[test].reason) for test in failed]
    rows = []
    for test in failed:
        verdict = again.get(test) or again.get(test.partition("::")[0]) or Verdict("")
        reason = verdict.reason
        if verdict.outcome in (PASSED, ""):
            reason = first[test].reason
        rows.append(Failure(test, AGAIN[verdict.outcome], reason))
    return rows


def fates(rows: Iterable[Failure]) -> dict[str, int]:
    """Return how many failures had each fate."""
    return dict(Counter(row.fate for row in rows))


def account(failed: int, counts: Mapping[str, int]) -> str:
    """Return a sentence that accounts for so many failures, by how many had each fate. Those of no
    fate are named as lost."""
    parts = [f"{count} {fate}" for fate, count in sorted(counts.items())]
    lost = failed - sum(counts.values())
    assert lost >= 0, (failed, counts)
    if lost:
        parts.append(f"{lost} without a record")
    return f"{failed} failed: {', '.join(parts)}" if failed else "none failed"

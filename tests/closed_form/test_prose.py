"""Oracle: the rule of CONTRIBUTING.md on first sentences, read off every docstring of the package by ``ast``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "blockwalk"

ANYWHERE = re.compile(r"(?:^|(?<=[.!?:] ))(What|Of|The same)\b")
"""Openings that no sentence has: a clause, a genitive and a comparison whose noun stands in another sentence."""

NO_NOUN = frozenset(
    re.findall(
        r"\S+",
        "what how where when which who why as if until while since once of from in inside into on onto by to at under beneath "
        "with without within before after beside between through against for like likewise and or but so then else it they "
        "he she ... … args: raises: returns: yields:",
    )
)
"""First words after which a sentence's subject is a clause, a pronoun or missing. *Whether* is none: it says bool."""

DETERMINERS = frozenset(re.findall(r"\w+", "a an the its their his this these those every each all any one no what"))
"""Words that follow a verb at once, and a noun in an apposition only."""


def sentence(docstring: str) -> str:
    """The first paragraph on one line: a sentence's end cannot be told from an abbreviation's."""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def faults(kind: str, docstring: str) -> list[str]:
    """The parts of the rule that a docstring of a ``kind`` (module, class, function, value) breaks."""
    text = sentence(docstring)
    first, second = [*(word.lower() for word in text.split()), "", ""][:2]
    found = [f"a sentence begins with {match[1]!r}" for match in ANYWHERE.finditer(" ".join(docstring.split()))]
    if first in NO_NOUN:
        found.append(f"its subject is no noun: it begins with {text.split()[0]!r}")
    noun = first in DETERMINERS or first == "whether" or first.endswith("ing") or not first.isalpha()
    if second in DETERMINERS and not noun and (kind != "function" or third_person(first)):
        found.append(f"it begins with a verb: {first} {second}")
    if not text.endswith((".", "!", "?", ":")):
        found.append("its first paragraph does not end with a period, or with a colon before what follows")
    return found


def third_person(word: str) -> bool:
    return word.endswith("s") and not word.endswith("ss")


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Kind, line and text of every docstring, and of every string that stands below a field or a constant."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=True)
        if text is not None:
            kind = (
                "module" if isinstance(node, ast.Module) else "class" if isinstance(node, ast.ClassDef) else "function"
            )
            if any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())):
                kind = "value"
            yield kind, node.body[0].lineno, text
        for above, below in zip(node.body, node.body[1:], strict=False):
            match above, below:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str() as text)):
                    yield "value", below.lineno, text


def broken() -> list[str]:
    """Every docstring that breaks the rule, as ``file:line: fault``."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted(ROOT.rglob("*.py"))
        for kind, line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        for fault in faults(kind, text)
    ]


def test_first_sentences_have_a_noun_as_their_subject() -> None:
    assert broken() == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("value", "What a slot holds."),
        ("function", "Bytes of a slot. The same of a frozen one."),
        ("value", "Of a folder."),
        ("class", "Writes a checkpoint."),
        ("function", "Writes a checkpoint."),
        ("module", "Cut a model."),
        ("value", "From 1."),
        ("function", "Where the ledger stands."),
        ("function", "Args:\n    held: bytes."),
        ("class", "A checkpoint without its period"),
    ],
)
def test_a_docstring_that_breaks_the_rule_is_found(kind: str, text: str) -> None:
    assert len(faults(kind, text)) >= 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("function", "Write a checkpoint."),
        ("function", "Whether the folder is there."),
        ("module", "Cutting a model."),
        ("value", "Bytes of one unit's frozen parameters in a slot."),
        ("class", "A checkpoint in two files:\n\n    state.json"),
    ],
)
def test_a_docstring_that_keeps_it_is_left_alone(kind: str, text: str) -> None:
    assert faults(kind, text) == []

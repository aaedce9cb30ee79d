"""Oracle: PEP 257 on first sentences, as CONTRIBUTING.md words it, read off every docstring of the
package by ``ast``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "blockwalk"

NOT_YET_IMPERATIVE = 218
"""Functions whose docstring begins with no imperative. The number may only fall: lower it with each
that is mended."""

IMPERATIVES = frozenset(
    re.findall(
        r"\S+",
        "accept accumulate add align allocate allow announce answer append apply ask assert"
        " assign attach await begin bind "
        "bring build call cast change check choose clean clear close collect combine compare"
        " compile complete compress "
        "compute continue convert copy count create cut decide decode decorate delete describe"
        " destroy detach do draw "
        "discard dissect divide draw drop emit empty encode end enumerate enter evaluate exchange"
        " execute expand expect "
        "extend extract fail fetch fill filter find finish fit flatten flush follow forbid"
        " forecast forget format free gather "
        "generate get give go group guess hand have hide hold import infer initialise install"
        " insert interpolate join keep "
        "kill launch lay leave let limit list load lock log look lower make map mark mean measure"
        " merge move multiply name "
        "normalise note open order pack pad parse part patch pause perturb pick pin place plan"
        " point pop prefer prepare "
        "print probe produce pull push put quantise quote raise rank read rebuild receive record"
        " reduce refuse register "
        "release remove render repeat replace replay report request require reset resolve restore"
        " resume return rewrite "
        "round run sample save say scale search see send serve set settle share show shrink"
        " simulate skip slice solve sort "
        "split spread stack start step stop store subtract sum swap take tell test time track"
        " train translate transpose "
        "turn unmap unpack update upload use validate verify visit wait walk warn watch wrap"
        " write yield zero",
    )
)
"""Verbs that a function's docstring may begin with; whoever needs another one adds it."""

VERBS_ONLY = IMPERATIVES - frozenset(
    re.findall(
        r"\w+",
        "answer call cast change check copy count cut draw drop empty end exchange fit forecast"
        " format free group hand hold "
        "limit list load lock log look lower map mark mean measure move name note open order pack"
        " part pause place plan "
        "point probe push rank read record report request reset return round run sample scale"
        " search see set share show "
        "slice sort split spread stack start step stop store sum swap test time track train turn"
        " update use visit wait walk "
        "watch wrap zero",
    )
)
"""Imperatives that are no nouns and no adjectives: with these no value, class or module begins."""

NO_NOUN = frozenset(
    re.findall(
        r"\S+",
        "what how where when which who why as if until while since once of from in inside into on"
        " onto by to at under beneath "
        "with without within before after beside between through against for like likewise and or"
        " but so then else it they "
        "he she ... … args: raises: returns: yields:",
    )
)
"""First words after which a sentence's subject is a clause, a pronoun or missing. *Whether* is
none: it says bool."""

DETERMINERS = frozenset(
    re.findall(r"\w+", "a an the its their his this these those every each all any one no what")
)
"""Words that follow a verb at once, and a noun in an apposition only."""


def sentence(docstring: str) -> str:
    """The first paragraph on one line: a sentence's end cannot be told from an abbreviation's."""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def faults(kind: str, docstring: str) -> list[str]:
    """Return the parts of the rule that a docstring of a ``kind`` (module, class, function, value)
    breaks."""
    text = sentence(docstring)
    first, second = [*(word.lower() for word in text.split()), "", ""][:2]
    found = []
    if first in NO_NOUN:
        found.append(
            f"it begins with {text.split()[0]!r}, which is neither a noun nor an imperative"
        )
    noun = (
        first in DETERMINERS or first == "whether" or first.endswith("ing") or not first.isalpha()
    )
    if second in DETERMINERS and not noun and (kind != "function" or third_person(first)):
        found.append(f"it begins with a verb: {first} {second}")
    elif kind != "function" and first in VERBS_ONLY:
        found.append(f"a {kind} begins with an imperative: {first} {second}")
    if not text.endswith((".", "!", "?", ":")):
        found.append(
            "its first paragraph does not end with a period, or with a colon before what follows"
        )
    return found


def imperative(docstring: str) -> bool:
    """Return whether a function's docstring begins with an imperative, as PEP 257 asks."""
    return sentence(docstring).split()[0].lower().rstrip(":,;.") in IMPERATIVES


def third_person(word: str) -> bool:
    return word.endswith("s") and not word.endswith("ss")


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Kind, line and text of every docstring, and of every string that stands below a field or a
    constant."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=True)
        if text is not None:
            kind = (
                "module"
                if isinstance(node, ast.Module)
                else "class"
                if isinstance(node, ast.ClassDef)
                else "function"
            )
            if any(
                "property" in ast.unparse(decorator)
                for decorator in getattr(node, "decorator_list", ())
            ):
                kind = "value"
            yield kind, node.body[0].lineno, text
        for above, below in zip(node.body, node.body[1:], strict=False):
            match above, below:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str() as text)):
                    yield "value", below.lineno, text


def every() -> Iterator[tuple[str, str, str]]:
    """Yield ``file:line``, kind and text of every docstring of the package."""
    for path in sorted(ROOT.rglob("*.py")):
        for kind, line, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(ROOT)}:{line}", kind, text


def test_first_sentences_keep_the_rule() -> None:
    assert [
        f"{where}: {fault}" for where, kind, text in every() for fault in faults(kind, text)
    ] == []


def test_functions_that_begin_with_no_imperative_become_fewer() -> None:
    remaining = sum(kind == "function" and not imperative(text) for _, kind, text in every())
    print(f"{remaining} docstrings of functions begin with no imperative; {NOT_YET_IMPERATIVE} may")
    assert remaining <= NOT_YET_IMPERATIVE, (
        "begin a function's docstring with a verb: Return, Read, Write …"
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("value", "What a slot holds."),
        ("value", "Of a folder."),
        ("class", "Writes a checkpoint."),
        ("function", "Writes a checkpoint."),
        ("module", "Cut a model."),
        ("value", "Write gradients to the disk."),
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return the bytes of a slot.", True),
        ("Write: a file.", True),
        ("The bytes of a slot.", False),
        ("Returns 3.", False),
    ],
)
def test_an_imperative_is_told_from_a_noun(text: str, expected: bool) -> None:
    assert imperative(text) is expected

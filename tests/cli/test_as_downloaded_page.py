"""Oracle: the sources of the tests that docs/models.md names, and the table of quantisers that are
read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from blockwalk.models.quantised import METHODS

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| [^|]+ \(`([\w-]+)`\) \| [^|]+ \| `([\w/.]+)::(\w+)(?:\[(.+)\])?` \|$", re.M)


def kinds_of(test: ast.FunctionDef) -> set[object]:
    """Return every constant of a test's decorators, the names of its cases among them."""
    nodes = (node for decorator in test.decorator_list for node in ast.walk(decorator))
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def test_every_format_that_is_trained_as_downloaded_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("## LoRA on weights as downloaded")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    assert len(rows) == section.count("\n| ") - 1, "a row that names no test"
    assert {format for format, *_ in rows} == {*METHODS, "gguf"}
    for _, file, name, kind in rows:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        (test,) = (
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
        )
        assert not kind or kind in kinds_of(test), f"{file}::{name} has no case {kind!r}"

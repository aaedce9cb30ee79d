"""The map from modules to the tests that speak to them, printed.

python dev/tests_map.py           # every module
python dev/tests_map.py ledger    # modules with "ledger" in their name
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from dev.house import House, open_house

TESTS = Path(__file__).parent.parent / "tests"


def imported_by_tests(house: House) -> dict[str, set[str]]:
    """The test files that import each module, as paths below ``tests/``."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                not isinstance(node, ast.ImportFrom)
                or (node.module or "").partition(".")[0] != "blockwalk"
            ):
                continue
            base = (node.module or "").removeprefix("blockwalk").removeprefix(".")
            for alias in node.names:
                longer = f"{base}.{alias.name}".removeprefix(".")
                found[longer if longer in house.modules else base].add(str(path.relative_to(TESTS)))
    return found


def table(house: House, word: str = "") -> str:
    """Return one line a module whose name has ``word``: its tests, else the modules through which
    tests reach it."""
    direct = imported_by_tests(house)
    importers: dict[str, set[str]] = defaultdict(set)
    for arrow in house.arrows:
        importers[arrow.imported].add(arrow.importer)
    lines = ["| module | tests |", "|---|---|"]
    for name in sorted(house.modules):
        if name and word in name and house.modules[name].name != "__init__.py":
            lines.append(
                f"| `{name.replace('.', '/')}` |"
                f" {_files(direct[name]) or _through(importers[name])} |"
            )
    return "\n".join(lines) + "\n"


def _files(tests: Iterable[str]) -> str:
    return ", ".join(f"[{Path(test).stem.removeprefix('test_')}]({test})" for test in sorted(tests))


def _through(importers: Iterable[str]) -> str:
    names = [f"`{name.replace('.', '/')}`" for name in sorted(importers) if name]
    return f"through {', '.join(names)}" if names else "the command line"


if __name__ == "__main__":
    print(table(open_house()[0], *sys.argv[1:2]), end="")

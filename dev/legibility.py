"""Oracle of a text that reads well: how a file names its values, how dense its lines are, and how
many branches its functions have. ``make house`` prints the figures of src and holds their bounds.

The bounds and the list of filler words stand in ``dev/house.toml``.

    python dev/legibility.py [FILE ...]     # each filler name, packed assignment and long function
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "blockwalk"
SETTINGS = Path(__file__).with_name("house.toml")
COLUMNS = 100
COMPLEXITY = 20
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.Assert,
    ast.comprehension,
    ast.With,
)


@dataclass(frozen=True, slots=True)
class Text:
    """The counts of one file, or of several together."""

    lines: int = 0
    """Lines that hold a token which is no comment and no docstring."""
    tokens: int = 0
    names: int = 0
    """Local names and globals that are assigned."""
    fillers: tuple[str, ...] = ()
    """Those of them that say nothing of the value, each with its line."""
    assignments: int = 0
    packed: tuple[str, ...] = ()
    """Assignments of a tuple display to several names."""
    branching: tuple[str, ...] = ()
    """Functions of a complexity over :data:`COMPLEXITY`."""
    wide: tuple[str, ...] = ()
    """Lines over :data:`COLUMNS`."""

    def __add__(self, other: Text) -> Text:
        return Text(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def complexity(function: ast.AST) -> int:
    """McCabe's number of independent ways through a function, those of functions in it included."""
    branches = sum(isinstance(node, _BRANCHES) for node in ast.walk(function))
    operators = (node for node in ast.walk(function) if isinstance(node, ast.BoolOp))
    return 1 + branches + sum(len(node.values) - 1 for node in operators)


def code_tokens(text: str, tree: ast.AST) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a file without comments and docstrings."""
    strings = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and token.start in strings
        if token.type not in _LAYOUT and not docstring:
            yield token


def read(path: Path, words: Collection[str]) -> Text:
    """Count one file; ``words`` are the fillers."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    names: list[ast.Name] = []
    assignments: list[ast.Assign] = []
    branching: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node)
        elif isinstance(node, ast.Assign):
            assignments.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            branches = complexity(node)
            if branches > COMPLEXITY:
                branching.append(f"{path}:{node.lineno}: {node.name} has {branches} branches")
    tokens = list(code_tokens(text, tree))
    lines = text.splitlines()
    return Text(
        lines=len({row for token in tokens for row in range(token.start[0], token.end[0] + 1)}),
        tokens=len(tokens),
        names=len(names),
        fillers=tuple(f"{path}:{n.lineno}: {n.id}" for n in names if n.id in words),
        assignments=len(assignments),
        packed=tuple(
            f"{path}:{n.lineno}: {lines[n.lineno - 1].strip()}"
            for n in assignments
            if isinstance(n.targets[0], ast.Tuple) and isinstance(n.value, ast.Tuple)
        ),
        branching=tuple(branching),
        wide=tuple(f"{path}:{k}" for k, line in enumerate(lines, 1) if len(line) > COLUMNS),
    )


def filler_words() -> frozenset[str]:
    """The words that name no value, from ``dev/house.toml``."""
    settings = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
    return frozenset(settings["filler_names"].split())


def measure(paths: Iterable[Path]) -> Text:
    """Count files together."""
    words = filler_words()
    return sum((read(path, words) for path in paths), Text())


def figures(text: Text) -> dict[str, float]:
    """The figures that ``dev/house.toml`` bounds, by their names there."""
    return {
        "tokens a line": round(text.tokens / max(text.lines, 1), 2),
        "filler names, %": round(100 * len(text.fillers) / max(text.names, 1), 2),
        "packed assignments, %": round(100 * len(text.packed) / max(text.assignments, 1), 2),
        "functions over 20 branches": len(text.branching),
        "lines over 100 columns": len(text.wide),
    }


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]] or sorted(ROOT.rglob("*.py"))
    text = measure(paths)
    for line in (*text.fillers, *text.packed, *text.branching, *text.wide):
        print(line)
    for name, value in figures(text).items():
        print(f"{name:<28} {value:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The gauge of the house: how large its rooms are, and whether imports go one way. ``make house``
prints it, and fails over budget.

Code lines are lines of Python that hold a token which is no comment and no docstring; tokens are
those of Python's own tokenizer, the same left out. C and Triton count by themselves. The layers and
the budget stand in ``dev/house.toml``.

    python dev/house.py [--picture FILE.svg]     # draws a box for each folder, and arrows for the imports between them
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "blockwalk"
SETTINGS = Path(__file__).with_suffix(".toml")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_TRITON = re.compile(r"^\s*import triton$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Arrow:
    """One import: which module imports which, on which line, and whether inside a function."""

    importer: str
    imported: str
    line: int
    inside: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} → {self.imported}"


@dataclass(frozen=True)
class House:
    """The package at ``root`` and the folders that each folder may import, nearest first."""

    root: Path
    may_import: Mapping[str, tuple[str, ...]]

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Every module's file by its name inside the package: ``plan.methods``, or ``plan`` for a
        folder's own."""
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def arrows(self) -> tuple[Arrow, ...]:
        """All imports of one module of the package by another, those for type checkers too."""
        return tuple(
            arrow for name, path in self.modules.items() for arrow in self._imports(name, path)
        )

    def _imports(self, name: str, path: Path) -> Iterator[Arrow]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == self.root.name
            ):
                base = (node.module or "").removeprefix(self.root.name).removeprefix(".")
                for alias in node.names:
                    longer = f"{base}.{alias.name}".removeprefix(".")
                    yield Arrow(
                        name,
                        longer if longer in self.modules else base,
                        node.lineno,
                        id(node) in inside,
                    )
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == self.root.name:
                        base = alias.name.removeprefix(self.root.name).removeprefix(".")
                        yield Arrow(name, base, node.lineno, id(node) in inside)

    def up(self) -> list[Arrow]:
        """The imports that the layers do not allow. The files at the root name what is public, and
        may import anything."""
        pairs = ((arrow, folder(arrow.importer), folder(arrow.imported)) for arrow in self.arrows)
        return [
            arrow
            for arrow, a, b in pairs
            if a and b and a != b and b not in self.may_import.get(a, ())
        ]

    def circles(self) -> list[list[str]]:
        """Groups of modules that import one another."""
        reached = {name: self._reached(name) for name in self.modules}
        groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in self.modules}
        return sorted(sorted(group) for group in groups if len(group) > 1)

    def _reached(self, name: str) -> set[str]:
        found: set[str] = set()
        ahead = [name]
        while ahead:
            for arrow in self._by_importer.get(ahead.pop(), ()):
                if arrow.imported not in found:
                    found.add(arrow.imported)
                    ahead.append(arrow.imported)
        return found

    @cached_property
    def _by_importer(self) -> dict[str, list[Arrow]]:
        found: dict[str, list[Arrow]] = {}
        for arrow in self.arrows:
            if arrow.imported != arrow.importer:
                found.setdefault(arrow.importer, []).append(arrow)
        return found

    @cached_property
    def below(self) -> dict[str, set[str]]:
        """The folders that each folder imports."""
        found: dict[str, set[str]] = {folder(name): set() for name in self.modules if folder(name)}
        for arrow in self.arrows:
            a = folder(arrow.importer)
            b = folder(arrow.imported)
            if a != b and a and b:
                found[a].add(b)
        return found

    def floor_of(self) -> dict[str, int]:
        """The floor of each folder: one above the highest that it imports. Circles are cut where
        they close."""

        def floor(name: str, above: frozenset[str]) -> int:
            return 1 + max(
                (floor(b, above | {name}) for b in self.below[name] if b not in above), default=0
            )

        return {name: floor(name, frozenset({name})) for name in self.below}

    def floors(self) -> int:
        """Folders on the longest way down through the imports between folders."""
        return max(self.floor_of().values(), default=0)

    def size(self) -> dict[str, tuple[int, int]]:
        """Code lines and tokens of each folder, subfolders included; the files at the root stand
        under ``.``."""
        total: dict[str, tuple[int, int]] = {}
        for name, path in self.modules.items():
            text = path.read_text(encoding="utf-8")
            lines, tokens = measure(text) if not _TRITON.search(text) else (0, 0)
            room = folder(name) or "."
            before = total.get(room, (0, 0))
            total[room] = before[0] + lines, before[1] + tokens
        return total


def folder(module: str) -> str:
    """The folder that a module lies in: its first part, where that is a folder; the root's own
    modules lie in none."""
    first, _, rest = module.partition(".")
    return first if rest or (ROOT / first).is_dir() else ""


def measure(text: str) -> tuple[int, int]:
    """Code lines and tokens of a file, without docstrings, comments and blank lines."""
    strings = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _LAYOUT or (token.type == tokenize.STRING and token.start in strings):
            continue
        tokens += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines), tokens


def native_lines(root: Path) -> int:
    """Lines of C, blank ones and comments of their own left out, and code lines of modules of
    Triton's kernels."""
    lines = (
        line.strip()
        for path in root.rglob("*.c")
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    texts = [path.read_text(encoding="utf-8") for path in root.rglob("*.py")]
    kernels = sum(measure(text)[0] for text in texts if _TRITON.search(text))
    return kernels + sum(bool(line) and not line.startswith(("//", "/*", "*")) for line in lines)


def picture(house: House) -> str:
    """The folders by floor as an SVG, with an arrow for each import that no longer way down says as
    well."""
    floor = house.floor_of()
    rows: dict[int, list[str]] = {}
    for name in sorted(floor):
        rows.setdefault(floor[name], []).append(name)
    wide = 104
    high = 30
    gap = 74
    width = 760
    place = {}
    for height, names in rows.items():
        for k, name in enumerate(names):
            left = (width - len(names) * (wide + 36)) / 2 + k * (wide + 36) + 18
            place[name] = left, 20 + (max(rows) - height) * gap
    size = f"{width} {max(rows) * gap}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#889"/></marker></defs>',
        f'<rect width="{width}" height="{max(rows) * gap}" fill="#fff"/>',
    ]
    for a in sorted(floor):
        for b in sorted(house.below[a]):
            if any(b in _reach(house, c) for c in house.below[a] - {b}):
                continue
            (x, y), (u, v) = place[a], place[b]
            lines.append(
                f'<path d="M{x + wide / 2:.0f},{y + high} C{x + wide / 2:.0f},{y + high + 26} {u + wide / 2:.0f},{v - 30}'
                f' {u + wide / 2:.0f},{v - 2}" fill="none" stroke="#889" marker-end="url(#tip)"/>'
            )
    for name, (x, y) in place.items():
        pure = name in ("plan", "program", "simulate")
        lines.append(
            f'<rect x="{x:.0f}" y="{y}" width="{wide}" height="{high}" rx="5" fill="{"#e6f0e6" if pure else "#eef1f8"}"'
            f' stroke="#557"/><text x="{x + wide / 2:.0f}" y="{y + 20}" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _reach(house: House, name: str) -> set[str]:
    """The folders below a folder, at any distance."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        for b in house.below[ahead.pop()] - found:
            found.add(b)
            ahead.append(b)
    return found


def open_house() -> tuple[House, dict[str, int]]:
    """The house as it stands, and its budget."""
    settings = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
    return House(
        ROOT, {name: tuple(below) for name, below in settings["may_import"].items()}
    ), settings["budget"]


def main() -> int:
    house, budget = open_house()
    if sys.argv[1:2] == ["--picture"]:
        Path(sys.argv[2]).write_text(picture(house), encoding="utf-8")
        return 0
    rooms = house.size()
    for name, (lines, tokens) in sorted(rooms.items()):
        print(f"{name:<14} {lines:>6,} code lines {tokens:>8,} tokens")
    found = {
        "files at the root": sum(not folder(name) or name == "" for name in house.modules),
        "floors": house.floors(),
        "arrows up": len(house.up()),
        "circles": len(house.circles()),
        "largest folder": max(lines for lines, _ in rooms.values()),
        "code lines": sum(lines for lines, _ in rooms.values()),
        "tokens": sum(tokens for _, tokens in rooms.values()),
    }
    print(f"native code    {native_lines(ROOT):>6,} lines\n")
    over = [name for name, value in found.items() if value > budget[name]]
    for name, value in found.items():
        print(f"{name:<18} {value:>8,} of {budget[name]:>8,}{'   OVER' if name in over else ''}")
    for arrow in house.up():
        print(f"up: {arrow}")
    for circle in house.circles():
        print(f"circle: {' ↔ '.join(circle)}")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())

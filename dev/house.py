"""The gauge of the house: how large its rooms are, whether imports go one way, how well its text
reads, and at how many sites it asks what a row should say. ``make house`` prints it, and fails over
the bounds of ``dev/house.toml``.

Code lines are lines of Python that hold a token which is no comment and no docstring; tokens are
those of Python's own tokenizer, the same left out. C and Triton count by themselves. Lines have no
bound. A folder's tokens may be 5% above those noted in ``dev/house.toml``; a larger folder is noted
there anew, and the commit's body says in a sentence what the tokens are for.

    python dev/house.py
    python dev/house.py --picture FILE.svg   # a box for each folder, and arrows for imports
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

if __name__ == "__main__":  # a script has its own folder on the path, and not the one above
    sys.path.insert(0, str(Path(__file__).parent.parent))

from dev import legibility, sites

ROOT = Path(__file__).parent.parent / "src" / "blockwalk"
SETTINGS = Path(__file__).with_suffix(".toml")
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
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
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
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                imported = self._by_word(node.value)
                if imported and "import_module" in text:
                    yield Arrow(name, imported, node.lineno, id(node) in inside)

    def _by_word(self, word: str) -> str | None:
        """The module that ``import_module`` takes by a word: ``blockwalk.plan.mesh:name``."""
        name = word.partition(":")[0].removeprefix(f"{self.root.name}.")
        return name if word.startswith(f"{self.root.name}.") and name in self.modules else None

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
    tokens = list(legibility.code_tokens(text, ast.parse(text)))
    rows = {row for token in tokens for row in range(token.start[0], token.end[0] + 1)}
    return len(rows), len(tokens)


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
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif"'
        ' font-size="13">',
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#889"/></marker></defs>',
        f'<rect width="{width}" height="{max(rows) * gap}" fill="#fff"/>',
    ]
    for a in sorted(floor):
        for b in sorted(house.below[a]):
            if any(b in _reach(house, c) for c in house.below[a] - {b}):
                continue
            x, y = place[a]
            u, v = place[b]
            begin = f"{x + wide / 2:.0f}"
            end = f"{u + wide / 2:.0f}"
            lines.append(
                f'<path d="M{begin},{y + high} C{begin},{y + high + 26} {end},{v - 30}'
                f' {end},{v - 2}" fill="none" stroke="#889" marker-end="url(#tip)"/>'
            )
    for name, (x, y) in place.items():
        colour = "#e6f0e6" if name in ("plan", "program", "simulate") else "#eef1f8"
        lines.append(
            f'<rect x="{x:.0f}" y="{y}" width="{wide}" height="{high}" rx="5" fill="{colour}"'
            f' stroke="#557"/><text x="{x + wide / 2:.0f}" y="{y + 20}" text-anchor="middle">'
            f"{name}</text>"
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


@dataclass(frozen=True, slots=True)
class Bounds:
    """What ``dev/house.toml`` bounds: figures of the house and its text, and each folder's
    tokens."""

    figures: Mapping[str, float]
    tokens: Mapping[str, int]


def open_house() -> tuple[House, Bounds]:
    """The house as it stands, and its bounds."""
    settings = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
    house = House(ROOT, {name: tuple(below) for name, below in settings["may_import"].items()})
    return house, Bounds(settings["bounds"], settings["tokens"])


def figures(house: House) -> dict[str, float]:
    """Each figure that has a bound, by its name in ``dev/house.toml``."""
    places = sites.sites(house.root)
    files = {place.partition(":")[0] for place in places}
    return {
        "files at the root": sum(not folder(name) for name in house.modules),
        "floors": house.floors(),
        "arrows up": len(house.up()),
        "circles": len(house.circles()),
        "sites": len(places),
        "files with sites": len(files),
        **legibility.figures(legibility.measure(house.modules.values())),
    }


def sizes_of_main() -> dict[str, tuple[int, int]]:
    """The size of each folder on the branch main; nothing where there is no such branch."""
    command = ["git", "archive", "main", "src/blockwalk"]
    archive = subprocess.run(command, cwd=ROOT.parents[1], capture_output=True, check=False)
    if archive.returncode:
        return {}
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(place, filter="data")
        return House(Path(place) / "src" / "blockwalk", {}).size()


def main() -> int:
    house, bounds = open_house()
    if sys.argv[1:2] == ["--picture"]:
        Path(sys.argv[2]).write_text(picture(house), encoding="utf-8")
        return 0
    over = False
    on_main = sizes_of_main()
    rooms = house.size()
    for name, (lines, tokens) in sorted(rooms.items()):
        growth = tokens - on_main.get(name, (0, 0))[1]
        noted = bounds.tokens.get(name, 0)
        excess = tokens > 1.05 * noted
        over = over or excess
        note = f"   OVER 5% above {noted:,}" if excess else ""
        print(f"{name:<14} {lines:>6,} lines {tokens:>8,} tokens {growth:>+7,} from main{note}")
    lines = sum(lines for lines, _ in rooms.values())
    tokens = sum(tokens for _, tokens in rooms.values())
    print(f"{'all':<14} {lines:>6,} lines {tokens:>8,} tokens")
    print(f"native code    {native_lines(ROOT):>6,} lines\n")
    for name, value in figures(house).items():
        excess = value > bounds.figures[name]
        over = over or excess
        note = "   OVER" if excess else ""
        print(f"{name:<28} {value:>8,} of {bounds.figures[name]:>8,}{note}")
    for arrow in house.up():
        print(f"up: {arrow}")
    for circle in house.circles():
        print(f"circle: {' ↔ '.join(circle)}")
    return over


if __name__ == "__main__":
    sys.exit(main())

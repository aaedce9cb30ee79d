"""Reads of placements: places outside the file of residences that ask where state lives, by form.

Counted over the syntax tree:

- *facts*: reads of a bool-valued member of ``Plan``, ``Placements``, ``UnitSizes``, ``TierFacts``,
  ``HomeFacts`` or a row of residences, by the receivers that hold one.
- *comparisons* with a member of ``Tier``, ``Codec`` or ``Timing``, with the name of a group, or in
  a ``match``; *names*: comparisons with the name of a residence.
- *branches*: a condition that reads a ``.tier`` or a placement's ``.group``, or calls ``is_cpu``,
  and no fact of the first form.

    python dev/placement_reads.py           # how many of each form
    python dev/placement_reads.py --list    # each place as well
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "blockwalk"
ROWS = "program/residence.py"
"""The file of residences, whose rows may ask."""
CLASSES = {
    "Plan": {"plan", "_plan", "row", "candidate", "self"},
    "Placements": {"places", "_places", "self"},
    "TierFacts": {"facts", "_facts", "tier", "masters", "states", "self"},
    "HomeFacts": {"home", "facts", "self"},
    "UnitSizes": {"sizes", "self"},
    "ResidenceFacts": {"residence", "self"},
    "UpdaterFacts": {"updater", "self"},
}
"""Classes whose facts are counted, and the receivers of each; self counts inside these classes."""
MEMBERS = {"Tier", "Codec", "Timing"}
GROUPS = {"NOBODY", "NODE", "WORLD"}
PLACED = {"frozen", "trainable", "gradient", "optimizer_state", "activation", "placement"}
NAMES = {"resident", "paged", "mapped", "streamed", "sliced", "copied", "gathered", "inside"}
"""The names of residences."""


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _members(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Yield the members of a class, and whether each is bool-valued."""
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            yield member.target.id, ast.unparse(member.annotation) == "bool"
        elif isinstance(member, ast.FunctionDef):
            returns = ast.unparse(member.returns) if member.returns else ""
            yield member.name, returns == "bool"


def facts(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return the bool-valued members, each with the receivers that count."""
    receivers: dict[str, set[str]] = defaultdict(set)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                for name, is_bool in _members(node):
                    if is_bool:
                        receivers[name] |= CLASSES[node.name]
    return receivers


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _class_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.ClassDef):
            return node.name
    return ""


def _conditions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand


def _reads_placement(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _last(node.func) == "is_cpu"
    if not isinstance(node, ast.Attribute):
        return False
    placed = _last(node.value) in PLACED or "getattr" in ast.unparse(node.value)
    return node.attr == "tier" or (node.attr == "group" and placed)


def reads(
    tree: ast.Module, counted: dict[str, set[str]]
) -> Iterator[tuple[str, ast.expr | ast.pattern]]:
    """Yield the form and the place of each read."""
    parents = _parents(tree)
    asked: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in counted:
            receiver = _last(node.value)
            elsewhere = receiver == "self" and _class_of(node, parents) not in CLASSES
            loaded = isinstance(node.ctx, ast.Load)
            if receiver in counted[node.attr] and loaded and not elsewhere:
                asked |= set(ast.walk(node))
                yield "facts", node
        elif isinstance(node, ast.Compare | ast.MatchValue):
            inner = list(ast.walk(node))
            if any(isinstance(x, ast.Constant) and x.value in NAMES for x in inner):
                yield "names", node
            elif any(
                _last(x) in GROUPS or (isinstance(x, ast.Attribute) and _last(x.value) in MEMBERS)
                for x in inner
            ):
                yield "comparisons", node
    seen: set[ast.AST] = set()
    for condition in _conditions(tree):
        for node in ast.walk(condition):
            if node not in asked | seen and _reads_placement(node):
                seen.add(node)
                yield "branches", node  # type: ignore[misc]


def placement_reads(root: Path = ROOT) -> list[tuple[str, str]]:
    """Return each read under a folder: its form, and ``file:line: text``."""
    trees = {
        path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(root.rglob("*.py"))
    }
    counted = facts(trees)
    return [
        (form, f"{name}:{node.lineno}: {ast.unparse(node)}")
        for name, tree in trees.items()
        if name != ROWS
        for form, node in reads(tree, counted)
    ]


def main() -> int:
    places = placement_reads()
    if "--list" in sys.argv:
        print("\n".join(f"{form:<12} {place}" for form, place in sorted(places)))
    forms = Counter(form for form, _ in places)
    files = {place.partition(":")[0] for _, place in places}
    print(f"{len(places)} reads in {len(files)} files: {dict(sorted(forms.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

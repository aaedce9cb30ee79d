"""Sites: places outside a row's own file that ask which tier, codec, estimator, loss, noise or
sharding a plan has. A row that owns its facts is asked for the fact instead.

Counted over the syntax tree: a member of ``Tier`` or ``Estimator``; a comparison with a member of
``Codec``; a property that stands for a row (``on_disk``, ``zeroth_order``, ``sharded`` …); a
setting such as ``noise`` compared with a word; a table of rows looked up by a name.

    python dev/sites.py     # every site, and how many there are in how many files
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "blockwalk"
OWNERS = {
    "plan/choices.py",
    "plan/codecs.py",
    "plan/estimators.py",
    "plan/losses.py",
    "plan/objectives.py",
    "plan/methods.py",
    "plan/noise_kinds.py",
    "plan/placement.py",
    "plan/tiers.py",
    "plan/update_rules.py",
    "plan/zeroth_order_kinds.py",
}
"""Files of rows, with the tables that hold them; a codec's own file beside them is in FOLDERS."""
FOLDERS = ("numerics/codecs/", "numerics/noise/", "contrib/")
MEMBERS = {"Tier", "Estimator"}
STANDS_FOR_A_ROW = {
    "on_device",
    "on_host",
    "on_disk",
    "zeroth_order",
    "differentiates",
    "_differentiates",
    "sharded",
}
SETTINGS = {"tier", "codec", "loss", "noise", "target", "objective", "estimator", "kind"}
"""Attributes of a plan that name a row; compared with a word they are sites."""
OF_A_PLAN = {"plan", "zo", "cache", "frozen", "trainable", "gradient", "optimizer_state"}
"""What such an attribute is read from; ``activation`` and others are found by ``tier`` and
``codec``."""
TABLES = {
    *("NOISES", "RULES", "KINDS", "LOSSES", "OBJECTIVES"),
    *("TIERS", "CODECS", "METHODS", "ESTIMATORS"),
}


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _names_a_row(node: ast.AST) -> bool:
    """Whether an expression reads a setting that names a row, as in ``plan.zo.noise``."""
    if not isinstance(node, ast.Attribute) or node.attr not in SETTINGS:
        return False
    return node.attr in ("tier", "codec", "noise") or _last(node.value).lstrip("_") in OF_A_PLAN


def _words(node: ast.AST) -> bool:
    """Whether an expression is a word, or a display of words."""
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        return any(_words(part) for part in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _sites(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if (
                _last(node.value) in MEMBERS and node.attr.isupper()
            ) or node.attr in STANDS_FOR_A_ROW:
                yield node
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            member = any(
                isinstance(side, ast.Attribute) and _last(side.value) == "Codec" for side in sides
            )
            if member or (any(map(_names_a_row, sides)) and any(map(_words, sides))):
                yield node
        elif isinstance(node, ast.Subscript) and _last(node.value) in TABLES:
            yield node


def sites(root: Path = ROOT) -> list[str]:
    """Every site under a folder, as ``file:line: text``."""
    lines = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name in OWNERS or name.startswith(FOLDERS):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines += [f"{name}:{node.lineno}: {ast.unparse(node)}" for node in _sites(tree)]
    return lines


def main() -> int:
    lines = sites()
    files = {line.partition(":")[0] for line in lines}
    print("\n".join(lines))
    print(f"{len(lines)} sites in {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())

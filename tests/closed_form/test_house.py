"""Oracle: the layers and the budget of ``dev/house.toml``, read off the imports of every file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dev import tests_map
from dev.house import House, measure, open_house


def test_imports_go_down() -> None:
    assert [str(arrow) for arrow in open_house()[0].up()] == []


def test_no_module_imports_itself_through_others() -> None:
    assert open_house()[0].circles() == []


def test_every_folder_stands_in_the_table_of_layers() -> None:
    house = open_house()[0]
    folders = {
        path.relative_to(house.root).parts[0]
        for path in house.modules.values()
        if path.parent != house.root
    }
    assert folders == set(house.may_import)


def test_plan_program_and_simulate_need_no_torch() -> None:
    """The interpreter's own table of loaded modules, after all of theirs were imported."""
    pure = [
        n for n in open_house()[0].modules if n.partition(".")[0] in ("plan", "program", "simulate")
    ]
    lines = [f"import blockwalk.{name}" for name in pure]
    code = "\n".join(
        [*lines, "import sys", "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"]
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_arrow_up_and_a_circle_are_found(tmp_path: Path) -> None:
    """Two rooms written here: each imports the other, and only one of them may."""
    root = tmp_path / "blockwalk"
    for room, other in (("upper", "lower"), ("lower", "upper")):
        (root / room).mkdir(parents=True)
        (root / room / "room.py").write_text(
            f"def f():\n    from blockwalk.{other}.room import f\n"
        )
    house = House(root, {"upper": ("lower",)})
    assert [str(arrow) for arrow in house.up()] == ["lower.room:2 → upper.room"]
    assert house.circles() == [["lower.room", "upper.room"]]


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    text = '"""A docstring\nof two lines."""\n\n# a comment\nx = 1  # beside code\n\n\n'
    text += 'def f():\n    """Another."""\n    return (\n        x\n    )\n'
    assert measure(text) == (5, 12)


def test_the_map_of_tests_names_a_test_by_what_it_imports() -> None:
    """Oracle: the imports of this file's neighbour, read here; nothing is written."""
    lines = tests_map.table(open_house()[0], "noise").splitlines()
    rows = {line.split("`")[1]: line for line in lines[2:]}
    assert all("noise" in name for name in rows)
    assert "(closed_form/test_noise.py)" in rows["numerics/noise/noise"]

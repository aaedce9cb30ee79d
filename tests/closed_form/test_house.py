"""Oracle: the layers and bounds of ``dev/house.toml``, read off every file of src; and small files
written here, of which each figure is known."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from dev import legibility, placement_reads, sites, tests_map
from dev.house import House, figures, measure, open_house


def test_imports_go_down() -> None:
    assert [str(arrow) for arrow in open_house()[0].up()] == []


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


def test_every_figure_is_within_its_bound() -> None:
    house, bounds = open_house()
    over = {name: value for name, value in figures(house).items() if value > bounds.figures[name]}
    assert over == {}


def test_no_folder_outgrows_what_is_noted_of_it() -> None:
    house, bounds = open_house()
    sizes = {name: tokens for name, (_, tokens) in house.size().items()}
    assert sizes.keys() == bounds.tokens.keys()
    assert {n for n, tokens in sizes.items() if tokens > 1.05 * bounds.tokens[n]} == set()


def test_an_import_by_a_word_is_an_arrow(tmp_path: Path) -> None:
    root = tmp_path / "blockwalk"
    for room in ("upper", "lower"):
        (root / room).mkdir(parents=True)
    (root / "upper" / "room.py").write_text("")
    text = 'from importlib import import_module\nimport_module("blockwalk.upper.room:f")\n'
    (root / "lower" / "room.py").write_text(text)
    arrows = House(root, {}).arrows
    assert [str(arrow) for arrow in arrows] == ["lower.room:2 → upper.room"]


def test_fillers_packed_assignments_and_wide_lines_are_found(tmp_path: Path) -> None:
    path = tmp_path / "room.py"
    path.write_text(f"found = 1\nname, size = 2, 3\nfirst, rest = name\n# {'x' * 99}\n")
    text = legibility.read(path, {"found", "rest"})
    assert [line.partition(": ")[2] for line in text.fillers] == ["found", "rest"]
    assert [line.partition(": ")[2] for line in text.packed] == ["name, size = 2, 3"]
    assert text.wide == (f"{path}:4",)
    assert text.names == 5
    assert text.assignments == 3


def test_branches_are_counted() -> None:
    function = ast.parse("def f(a, b):\n    if a and b or a:\n        return [x for x in a]\n")
    assert legibility.complexity(function) == 5


def test_a_site_is_a_question_which_row_a_plan_has(tmp_path: Path) -> None:
    (tmp_path / "room.py").write_text(
        "a = plan.zeroth_order\n"
        "b = tier is Tier.DISK\n"
        "c = codec == Codec.RAW\n"
        "d = plan.zo.noise == 'mezo'\n"
        "e = NOISES[name]\n"
        "f = facts.durable, plan.loss, name == 'disk', other.kind == 'x'\n"
    )
    lines = sorted(line.split(":")[1] for line in sites.sites(tmp_path))
    assert lines == ["1", "2", "3", "4", "5"]


READS = 150
"""The most reads of placements outside the file of residences; it may only fall."""


def test_places_that_ask_where_state_lives_grow_fewer(tmp_path: Path) -> None:
    """Of the small files the reads are one of each form."""
    (tmp_path / "facts.py").write_text("class TierFacts:\n    mapped: bool = False\n")
    lines = [
        "a = tier.mapped",
        "b = codec is Codec.RAW",
        "c = name == 'streamed'",
        "if plan.frozen.tier: pass",
        "d = plan.frozen.tier",
    ]
    (tmp_path / "reader.py").write_text("\n".join(lines))
    reads = placement_reads.placement_reads(tmp_path)
    assert [form for form, _ in sorted(reads)] == ["branches", "comparisons", "facts", "names"]
    everywhere = placement_reads.placement_reads()
    assert len(everywhere) <= READS, "\n".join(place for _, place in everywhere)
    assert not [place for form, place in everywhere if form == "names"]


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

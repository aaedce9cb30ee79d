"""Oracle: what `blockwalk train` prints of the quickstart, whose picture docs/terminal.svg is."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import pytest
from dev import terminal

from blockwalk.cli import main
from tests.support.versions import has_cuda_libraries

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "terminal.svg"
MEASURE = re.compile(r"\d[\d.,–]*(\s?(B|kB|MB|GB|s|ms|min)\b)?")


def shape(line: str) -> str:
    """Return a line with every number, and the unit behind it, as #; so is what binds a step, which
    is the machine's."""
    return MEASURE.sub("#", re.sub(r"(?<=% computing )\w+", "#", " ".join(line.split())))


def pictured() -> list[str]:
    """Return the lines of the picture, in their order; a part of a line is a text element of its
    own."""
    rows: dict[float, str] = {}
    for y, part in re.findall(
        r'<text [^>]*?y="([\d.]+)"[^>]*>(.*?)</text>', PICTURE.read_text(encoding="utf-8")
    ):
        rows[float(y)] = rows.get(float(y), "") + html.unescape(part)
    return [" ".join(row.split()) for _, row in sorted(rows.items()) if row.strip()]


@pytest.mark.skipif(
    has_cuda_libraries, reason="a build for CUDA says in its first line that it found no driver"
)
def test_the_picture_of_a_terminal_shows_todays_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    assert (
        main.main(["train", "examples/quickstart.yaml", "--max_steps", "12", "--batch_size", "4"])
        == 0
    )
    printed = {shape(line) for line in capsys.readouterr().out.splitlines()}
    beside = ("blockwalk", f"$ {terminal.COMMAND}", "...")
    # the bar is a terminal's alone, and a note on memory is the machine's
    lines = [
        line
        for line in pictured()
        if line not in beside and not line.startswith("note: ") and "━" not in line
    ]
    assert len(lines) > 15
    # a long line goes on in the next, as a terminal's does
    assert [line for line in lines if not any(shape(line) in whole for whole in printed)] == []

"""Oracle: the kept results of the benchmarks, which README's figures are compared with, and a count
of its words."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import front_page

ROOT = Path(__file__).parents[2]
MOST_WORDS = 600
MOST_FIGURES = 40
UNITS = r"(?:[kMGT]B|s|ms|minutes?|hours?|days?|tokens/s|times|%|nats)"
FIGURE = re.compile(rf"(?<![\w.])\d[\d.,]*\s?{UNITS}(?![\w/])")
OWNED = {"8 GB", "16 GB", "22GB", "500 GB"}
"""Sizes of machines and of a budget, which a reader owns and nobody measured."""


def prose() -> str:
    """README without code blocks, comments, pictures and the targets of links."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|<!--.*?-->|!\[.*?\]\(.*?\)", " ", text, flags=re.DOTALL)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return re.sub(r"\]\([^)]*\)", "]", text)


def test_readme_can_be_read_in_three_minutes() -> None:
    """Words of the whole page, as ``wc -w`` counts them: code, tables and captions included."""
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= MOST_WORDS


def test_each_measured_figure_of_readme_is_the_one_that_was_kept() -> None:
    figures = [figure for figure in FIGURE.findall(prose()) if figure not in OWNED]
    assert 0 < len(figures) <= MOST_FIGURES
    known = {figure.words for figure in front_page.FIGURES}
    assert set(figures) == known
    assert front_page.wrong() == []


def test_the_picture_is_made_from_the_same_results() -> None:
    assert (ROOT / "docs" / "front.svg").read_text(encoding="utf-8") == front_page.picture()

"""Oracle: the script that writes the pages, the list of settings, the names that can be imported,
and mkdocs.yml."""

from __future__ import annotations

import re

import pytest
import yaml
from dev import pages

import blockwalk
from blockwalk.cli import settings_help
from blockwalk.plan.foreign_rows import ROWS, TOOLS
from blockwalk.train import config

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("path", sorted(pages.PAGES))
def test_a_page_is_what_the_script_writes(path: str) -> None:
    """If not: ``python -m dev.pages``."""
    assert (pages.ROOT / path).read_text(encoding="utf-8") == "\n".join(pages.PAGES[path]()) + "\n"


def test_the_site_has_each_page() -> None:
    nav = yaml.dump(yaml.safe_load((pages.ROOT / "mkdocs.yml").read_text().partition("nav:")[2]))
    assert all(path.removeprefix("docs/") in nav for path in pages.PAGES)


def test_the_page_of_names_has_every_name_that_has_a_setting() -> None:
    """Oracle: the table. Each name stands there once."""
    text = (pages.ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    known = set(config.setting_names())
    names = [
        name
        for row in ROWS
        if row.ours in known
        for tool in TOOLS[:-1]
        for name in row.names.get(tool, ())
    ]
    assert len(set(names)) >= 90
    for name in names:
        assert text.count(f"`{name}`") >= 1, name


def test_the_page_of_settings_lists_exactly_what_can_be_set() -> None:
    """Oracle: the names that a file may set. A placement is one; its parts are named in its
    sentence."""
    text = (pages.ROOT / "docs/settings.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    parts = tuple(f"{place}." for place in config.PLACEMENTS)
    assert sorted(listed) == sorted(
        name for name in config.setting_names() if not name.startswith(parts)
    )


def test_the_page_of_python_lists_exactly_what_can_be_imported() -> None:
    """Oracle: ``blockwalk.__all__``, and the one class that stands behind another library's
    interface."""
    text = (pages.ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = [path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)]
    assert sorted(listed) == sorted({*blockwalk.__all__, "BlockwalkTrainer"} - {"__version__"})


def test_a_sentence_on_a_setting_has_at_most_twenty_words() -> None:
    for name in config.setting_names():
        if not name.startswith(tuple(f"{place}." for place in config.PLACEMENTS)):
            _, sentences = settings_help.described(name)
            for sentence in re.split(r"(?<=[.!?])\s+", sentences):
                assert len(sentence.split()) <= 20, f"{name}: {sentence}"

"""Oracle: the script that writes the pages, the table of names, and mkdocs.yml."""

from __future__ import annotations

import pytest
import yaml
from dev import pages

from blockwalk.plan.foreign_names import ROWS, TOOLS
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
    names = [name for row in ROWS if row.ours in known for tool in TOOLS[:-1] for name in row.names.get(tool, ())]
    assert len(set(names)) >= 90
    for name in names:
        assert text.count(f"`{name}`") >= 1, name

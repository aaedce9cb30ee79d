"""Oracle: the bounds of ``dev/prose.py``, and sentences counted by hand."""

from __future__ import annotations

import pytest
from dev import prose

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: page.name)
def test_a_page_keeps_to_short_sentences(page: object) -> None:
    from pathlib import Path

    assert isinstance(page, Path)
    assert prose.average(page.read_text(encoding="utf-8")) <= prose.bound(page), (
        "python dev/prose.py --longest"
    )


def test_pages_have_no_phrase_that_was_read_twice() -> None:
    """README is held to it by ``make docs``."""
    for page in prose.pages()[1:]:
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert [phrase for phrase in prose.PHRASES if phrase in text] == [], page.name


def test_sentences_are_counted_as_a_reader_counts_them() -> None:
    text = (
        "# A heading that is not counted\n\nOne two three. Four `five six` seven!\n\n"
        "    blockwalk train run.yaml\n\n| a | table |\n\n- An item of five words\n"
        "- Another [with a link](to/somewhere.md): Two more here.\n"
    )
    assert [len(sentence.split()) for sentence in prose.sentences(text)] == [3, 3, 5, 4, 3]
    assert prose.average(text) == pytest.approx(18 / 5)

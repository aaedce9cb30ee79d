"""Oracle: the programs of main, byte for byte. A change to what is compiled must show here as a diff that its author meant;
``python -m tests.golden.programs`` rewrites them."""

from __future__ import annotations

import difflib

import pytest

from blockwalk.methods import METHODS
from tests.golden.programs import MODELS, path_of, text


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", METHODS)
def test_the_programs_of_a_row_are_those_of_main(name: str, model: str) -> None:
    wanted, found = path_of(name, model).read_text(), text(name, model)
    changed = list(difflib.unified_diff(wanted.splitlines(), found.splitlines(), "main", "here", n=1, lineterm=""))
    assert not changed, "\n".join(changed[:40]) + "\n\nif this is meant: python -m tests.golden.programs"

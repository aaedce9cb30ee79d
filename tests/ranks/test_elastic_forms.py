"""Oracle: closed forms. Answers and requests as a rank writes them are read, and every other form
is nobody's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockwalk.contrib.elastic_ranks.elastic import _answer, _request


def test_a_ranks_own_forms_are_read() -> None:
    assert _request("[3, null]") == (3, None)
    assert _request("[3, 0.5]") == (3, 0.5)
    assert _answer(
        json.dumps({"pace": 0.5, "losses": [[1.0, 2.0], [3.0, 4.0]]}).encode(), 2, 2
    ) == (
        [[1.0, 2.0], [3.0, 4.0]],
        0.5,
    )


@pytest.mark.parametrize(
    "line",
    ["", "{", "[[1], 1]", '["\\u001b]0;x", null]', "[0, null]", "[-1, null]", "[true, null]",
     "[1.0, null]", "[1]", "[1, 0.0]", "[1, -1.0]", "[1, NaN]", "[1, 1e999]", '[1, "x"]', "7",
     "[" * 100000],
)  # fmt: skip
def test_another_request_is_nobodys(line: str) -> None:
    assert _request(line) is None


@pytest.mark.parametrize(
    "answer",
    [
        {"pace": 0.5, "losses": []},
        {"pace": 0.5, "losses": [[1.0]]},
        {"pace": 0.5, "losses": [[1.0], [float("nan")]]},
        {"pace": 0.5, "losses": [[1.0], [float("inf")]]},
        {"pace": 0.5, "losses": [[1.0], ["x"]]},
        {"pace": 0.5, "losses": [[1.0], [1.0, 2.0]]},
        {"pace": 0.5, "losses": 3},
        {"pace": -1.0, "losses": [[1.0], [1.0]]},
        {"pace": None, "losses": [[1.0], [1.0]]},
        {"losses": [[1.0], [1.0]]},
        [],
        None,
    ],
)
def test_another_answer_is_of_a_rank_that_is_gone(answer: Any) -> None:
    assert _answer(json.dumps(answer).encode(), 2, 1) is None
    assert _answer(b"\xff", 2, 1) is None

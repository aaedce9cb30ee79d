"""Oracle: messages written out here, in two wordings each, and the facts that a reader would look
for in both."""

from __future__ import annotations

import warnings

import pytest

from tests.support.messages import missing, refused, warned

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "message",
    [
        "data.max_length is 140, and the model has 80 positions: lower data.max_length",
        "Lower data.max_length from 140: the model in model.gguf knows 80 positions.",
    ],
)
def test_facts_hold_in_any_wording(message: str) -> None:
    assert missing(message, "data.max_length 140", 80, "positions") == []
    assert missing(message, "max_length", "model.gguf|model") == []
    assert missing(message, "max_len 14 0.80 8 int4") == ["max_len", "14", "0.80", "8", "int4"]


@pytest.mark.parametrize(
    ("message", "fact"),
    [
        ("1.5 GB", "1"),
        ("1.5 GB", "5"),
        ("rank 12", "2"),
        ("int4a", "int4"),
        ("mebp2", "mebp"),
        ("weights", "weight"),
    ],
)
def test_a_part_of_a_name_or_number_is_no_fact(message: str, fact: str) -> None:
    assert missing(message, fact) == [fact]


def test_a_message_without_its_number_or_of_another_error_fails() -> None:
    with pytest.raises(AssertionError), refused(ValueError, "batch_size 3"):
        raise ValueError("batch_size is wrong")
    with pytest.raises(KeyError), refused(ValueError, "batch_size"):
        raise KeyError("batch_size")
    with pytest.raises(pytest.fail.Exception), refused(ValueError, "batch_size"):
        pass
    with pytest.raises(AssertionError), warned(UserWarning, "batch_size 3"):
        warnings.warn("batch_size is wrong", UserWarning, stacklevel=1)

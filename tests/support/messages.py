"""Messages matched by what must hold in any wording: the kind of error, and the settings, numbers
and files it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def missing(message: str, *facts: object) -> list[str]:
    """Return the facts that ``message`` does not name, as whole words in any order and case.

    Args:
        message: an error's text, or what a command wrote.
        facts: names, numbers and files. A string is cut at its spaces: ``"max_length 80"`` is two
            facts. In a string a bar separates wordings of which one must be there:
            ``"after|behind"``.
    """
    words = [
        word for fact in facts for word in (fact.split() if isinstance(fact, str) else [str(fact)])
    ]
    return [
        word for word in words if not any(_names(message, choice) for choice in word.split("|"))
    ]


def _names(message: str, fact: str) -> bool:
    """Whether ``fact`` stands in ``message``, and is no part of a longer name or number."""
    preceding = (
        r"(?<!\w)(?<!\d[.,])" if fact[:1].isdigit() else r"(?<!\w)" if fact[:1].isalpha() else ""
    )
    following = (
        r"(?!\w)(?!\.\d)" if fact[-1:].isdigit() else r"(?!\w)" if fact[-1:].isalpha() else ""
    )
    return re.search(preceding + re.escape(fact) + following, message, re.IGNORECASE) is not None


def says(message: str, *facts: object) -> None:
    """Assert that ``message`` names every one of ``facts``."""
    assert missing(message, *facts) == [], message


@contextmanager
def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], *facts: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect ``error`` from the block, with a message that names every one of ``facts``."""
    with pytest.raises(error) as refusal:
        yield refusal
    says(str(refusal.value), *facts)


@contextmanager
def warned(category: type[Warning], *facts: object) -> Iterator[pytest.WarningsRecorder]:
    """Expect a warning of ``category`` from the block, with a message that names every one of
    ``facts``."""
    with pytest.warns(category) as record:
        yield record
    messages = [
        str(warning.message) for warning in record if issubclass(warning.category, category)
    ]
    assert any(missing(message, *facts) == [] for message in messages), messages

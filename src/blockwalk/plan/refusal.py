"""The parts that refusals of a plan are made of: messages that say why, and which setting to
change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

Refusals = Callable[..., Iterator[str]]
"""(plan), of a tier (plan, kind of state): a message for each reason against a
:class:`~blockwalk.plan.plan.Plan` that names the row. Ranges and groups have been checked before it
is asked."""


def nothing(*plan: Any) -> Iterator[str]:
    """Yield no message."""
    yield from ()


def must_be(plan: Any, setting: str, value: Any, because: str) -> Iterator[str]:
    """Yield a message unless a setting has the one value that it may have here."""
    standing = operator.attrgetter(setting)(plan)
    if standing != value:
        shown = str(value).lower() if isinstance(value, bool) else value
        yield f"{setting} is {standing}, and {because}; set {setting}: {shown}"

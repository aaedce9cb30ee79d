"""Rows that a test lends to a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from blockwalk.plan.table import Table


@contextmanager
def registered(table: Table[Any], name: str, row: Any) -> Iterator[None]:
    """Register a row, and take it out again at the end."""
    table.register(name, row)
    try:
        yield
    finally:
        table.unregister(name)

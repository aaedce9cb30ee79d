"""Modules with rows that a test writes, and a process that forgets them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from blockwalk.plan.codecs import CODECS
from blockwalk.plan.estimators import ESTIMATORS, HOMES
from blockwalk.plan.losses import LOSSES
from blockwalk.plan.methods import METHODS
from blockwalk.plan.noise_kinds import NOISES
from blockwalk.plan.objectives import OBJECTIVES
from blockwalk.plan.schedules import SCHEDULES
from blockwalk.plan.table import Table
from blockwalk.plan.tiers import TIERS
from blockwalk.plan.update_rules import RULES
from blockwalk.plan.zeroth_order_kinds import KINDS, TARGETS
from blockwalk.system import row_modules

TABLES: tuple[Table, ...] = (  # type: ignore[type-arg]
    *(CODECS, ESTIMATORS, HOMES, KINDS, LOSSES, METHODS, NOISES, OBJECTIVES),
    *(RULES, SCHEDULES, TARGETS, TIERS),
)


def forget_rows(rows: list[list[str]]) -> None:
    """Take out what was registered since, and forget the modules, as a new process would."""
    for table, names in zip(TABLES, rows, strict=True):
        for name in set(table) - set(names):
            table.unregister(name)
    for module in row_modules.files():
        top = module[0].partition(".")[0]
        for name in [name for name in sys.modules if name.partition(".")[0] == top]:
            del sys.modules[name]
    row_modules._LOADED.clear()


@contextmanager
def new_process() -> Iterator[None]:
    """Run a block whose rows and imported modules are forgotten behind it."""
    rows = [list(table) for table in TABLES]
    try:
        yield
    finally:
        forget_rows(rows)

"""Names of settings in other tools, looked up: parsing asks here before it guesses by spelling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from blockwalk.plan import foreign_values as to
from blockwalk.plan.foreign_rows import ROWS, Foreign, is_word

BY_NAME = {name: row for row in reversed(ROWS) for name in row.all_names}
"""Rows by each of their names; the earlier row where two share one."""

SETTINGS = frozenset(row.ours for row in ROWS)
"""The settings that rows lead to."""

_KINDS = is_word("lora", "qlora", "dora", "qdora", "full", "none", "freeze")

VALUES: dict[str, tuple[Foreign, Callable[[Any], bool]]] = {
    "frozen": (
        replace(
            BY_NAME["quantization"],
            line=to.placed,
            template="A placement is tier × codec, or one part of it.",
        ),
        to.is_a_part,
    ),
    "optimizer.name": (BY_NAME["optim"], to.other_rule),
    "optimizer.schedule": (BY_NAME["lr_scheduler_type"], to.other_schedule),
    "recompute": (
        BY_NAME["gradient_checkpointing"],
        is_word("true", "false", "unsloth", "full", "selective"),
    ),
    "method": (BY_NAME["adapter"], _KINDS),
    "lora": (BY_NAME["adapter"], _KINDS),
    "lora.target_modules": (BY_NAME["lora_target"], is_word("all", "all_linear", "true")),
    "push_to_hub": (
        replace(BY_NAME["hub_model_id"], line=to.repository),
        is_word("true", "false", "none"),
    ),
    "max_steps": (replace(BY_NAME["iters"], line=to.always("max_steps", 0)), is_word("-1", "none")),
    "save_every": (BY_NAME["save_strategy"], is_word("epoch", "steps", "no", "best")),
    "eval_every": (BY_NAME["eval_strategy"], is_word("epoch", "steps", "no")),
}
"""Settings of our names, each with the row for values that people bring from elsewhere, and whether
a value is such."""


@dataclass(frozen=True, slots=True)
class Match:
    """A row that a name leads to."""

    row: Foreign
    exact: bool
    """Whether nothing stands around the name but a section of ours: then a row may be taken as it
    is."""


def find(key: str) -> Match | None:
    """Return the row of a name, with whatever sections around it (``training_args.learning_rate``,
    ``lora.target``), with dashes or underscores; None where the table has none."""
    name = key.replace("-", "_").lower()
    joined = name.replace(".", "_")
    for candidate in (name, joined):
        if candidate in BY_NAME:
            return Match(BY_NAME[candidate], exact=True)
    section, _, end = name.partition(".")
    while end:
        if end in BY_NAME:
            row = BY_NAME[end]
            return Match(row, exact=row.ours.startswith(f"{section}."))
        _, _, end = end.partition(".")
    return None

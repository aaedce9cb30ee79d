"""The range of every setting of a plan: the words that it takes, or the least and the most that it
may be."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterator
from typing import Any

from blockwalk.plan.choices import AUTO, MeshSettings
from blockwalk.plan.losses import LOSSES
from blockwalk.plan.noise_kinds import NOISES
from blockwalk.plan.objectives import OBJECTIVES
from blockwalk.plan.placement import Placement
from blockwalk.plan.row_settings import MOST
from blockwalk.plan.schedules import SCHEDULES
from blockwalk.plan.table import Table
from blockwalk.plan.update_rules import RULES
from blockwalk.plan.zeroth_order_kinds import KINDS, TARGETS

CHOICES: dict[str, Collection[str]] = {
    "recompute": ("auto", "all", "none"),
    "compare": ("auto", "never"),
    "loss": LOSSES,
    "objective": OBJECTIVES,
    "compute_dtype": ("auto", "float32", "bfloat16", "float16"),
    "optimizer.name": RULES,
    "optimizer.decay": ("matrices", "all"),
    "optimizer.schedule": SCHEDULES,
    "update.rounding": ("stochastic", "nearest"),
    "zo.kind": KINDS,
    "zo.target": TARGETS,
    "zo.noise": NOISES,
    "zo.rounding": ("nearest", "stochastic"),
    "cache.tier": ("none", "device", "host"),
    "context.way": ("auto", "keys", "heads"),
}
"""Settings that take one of a few words, and the words."""


def by_name(*rows: tuple[int, str]) -> dict[str, int]:
    """Return the number of each row by every name of it, which spaces divide."""
    return {name: number for number, names in rows for name in names.split()}


SMALLER = by_name(
    (2**62, "seed budget"),
    (2**32 - 1, "data.task_seed"),
    (2**16, "lora.rank"),
    (
        2**20,
        "mesh.world mesh.ranks_per_node mesh.data mesh.perturb mesh.context mesh.pipeline"
        " gradient_accumulation_steps prefetch",
    ),
    (2**20, "prefix.num_virtual_tokens zo.queries zo.noise_rank keep_checkpoints eval_batches"),
    (2**31 - 1, "batch_size eval_batch_size data.max_length data.padding_multiple"),
    (10_000_000, "start_timeout"),
)
"""The most that some of them may be, where that is another number than :data:`MOST`."""


def beyond(settings: Any, prefix: str = "", *, checked: Collection[str] = ()) -> Iterator[str]:
    """Yield messages about the numbers among the settings of a frozen value, and of those in it,
    that no run could have: not finite, or above :data:`MOST`.

    Args:
        prefix: the beginning of the settings' names.
        checked: fields that are left out.
    """
    for part in dataclasses.fields(settings):
        name = f"{prefix}{part.name}"
        value = getattr(settings, part.name)
        if name in checked or isinstance(value, Placement):
            continue
        if dataclasses.is_dataclass(value):
            yield from beyond(value, f"{name}.")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            limit = SMALLER.get(name, MOST[int if isinstance(number, int) else float])
            if not abs(number) <= limit:  # NaN is not
                yield f"{name} is {_digits(number)}; it must be a number up to {limit:,}"


def _digits(number: float) -> str:
    """Return a number, or the count of its digits where they are many."""
    if isinstance(number, float) or abs(number) < 10**18:
        return str(number)
    return f"a number of about {int(number.bit_length() * 0.30103) + 1} digits"


LEAST = by_name(
    (
        1,
        "gradient_accumulation_steps update.flush_every zo.queries zo.noise_rank zo.noise_interval"
        " pipeline.chunks",
    ),
    (1, " ".join(f"mesh.{f.name}" for f in dataclasses.fields(MeshSettings) if f.name != "groups")),
    (
        0,
        "prefetch seed optimizer.learning_rate optimizer.lora_b_ratio neftune_noise_alpha"
        " zo.seed_pool",
    ),
    (AUTO, "resident"),
)
"""The least that a setting may be."""


def completed(plan: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings of a plan that name a row which has settings of its own, and the row's
    name with every one of these.

    Raises:
        ValueError: one of these is unknown, missing or out of range.
    """
    for setting, table in CHOICES.items():
        name = operator.attrgetter(setting)(plan)
        if isinstance(table, Table) and (table.settings_of(name) or "(" in name):
            yield setting, table.choice(name) if name in table else name


def refusals(plan: Any) -> Iterator[str]:
    """Yield the single settings of a plan that are out of range, and what each must be."""
    yield from beyond(plan)
    for setting, words in CHOICES.items():
        name = operator.attrgetter(setting)(plan)
        if name not in words:
            text = f"{setting} is {name!r}; it must be one of {', '.join(words)}"
            yield words.unknown(name) if isinstance(words, Table) else text
    for setting, least in LEAST.items():
        number = operator.attrgetter(setting)(plan)
        if number < least:
            yield f"{setting} is {number}; it must be at least {least}"
    if plan.budget is not None and plan.budget <= 0:
        yield f"budget is {plan.budget} bytes; give a positive size such as 8GB, or leave it out"
    if not 0 <= plan.cache.threshold <= 1:
        yield f"cache.threshold is {plan.cache.threshold}; it is a share of the budget, from 0 to 1"

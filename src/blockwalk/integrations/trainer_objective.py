"""Objectives of log-probabilities in a Trainer: TRL's ``DPOConfig``, data sets of its columns, and
the reference, which is evaluated once before the first step.

A Trainer keeps no file of the reference: a run that goes on evaluates it again, with the weights
that it began from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from blockwalk.data.batching import by_length
from blockwalk.data.dataset import Encoded
from blockwalk.data.encode import encode
from blockwalk.data.formats import JUDGED, Format, name_of
from blockwalk.data.records import Record
from blockwalk.data.rendered import Tokenizer
from blockwalk.data.sources import without_nulls
from blockwalk.plan.objectives import REFERENCE, ObjectiveFacts
from blockwalk.plan.plan import Plan
from blockwalk.plan.settings import override
from blockwalk.walk.walker import Walker

LOSS_TYPES = {"sigmoid": "dpo", "ipo": "ipo"}
"""TRL's names of losses of pairs, and the objectives that they are."""

SETTINGS = ("beta",)
"""Settings of an objective that TRL's arguments have under the same names. ``label_smoothing`` is
none: TRL's loss ``sigmoid`` does not read it."""

FOLLOWED = frozenset((*SETTINGS, "loss_type", "max_length", "truncation_mode"))
"""Fields of ``DPOConfig`` that are followed where a data set is of pairs."""

EVALUATED_ONCE = "the reference is evaluated once, before the first step, in batches of evaluation"
MEANINGLESS = {
    "precompute_ref_log_probs": EVALUATED_ONCE,
    "precompute_ref_batch_size": EVALUATED_ONCE,
    "dataset_num_proc": "one process reads the data",
    "padding_free": "short rows are walked side by side anyway",
    "activation_offloading": "a plan places activations (activation)",
}
"""Fields of ``DPOConfig`` that mean nothing to a walk, and why."""


def is_judged(dataset: Any) -> bool:
    """Return whether a data set has the columns of pairs."""
    names = getattr(dataset, "column_names", None)
    columns = JUDGED[Format.PREFERENCE].columns
    return isinstance(names, list) and all({*column} & {*names} for column in columns)


def with_objective(plan: Plan, args: Any) -> Plan:
    """Return the plan with the objective that TRL's arguments describe; the plan's own where these
    describe none, or it has one of log-probabilities.

    Raises:
        ValueError: a loss or a cut that is not followed.
    """
    if plan.objective_facts.of_log_probabilities or not hasattr(args, "loss_type"):
        return plan
    listed = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    if len(listed) != 1 or listed[0] not in LOSS_TYPES:
        names = ", ".join(f"{name} ({objective})" for name, objective in LOSS_TYPES.items())
        raise ValueError(
            f"loss_type is {listed}, which BlockwalkTrainer does not follow; it takes one of"
            f" {names}, and a plan names others (objective)"
        )
    if getattr(args, "truncation_mode", "keep_start") != "keep_start":
        raise ValueError(
            f"truncation_mode is {args.truncation_mode}, and records are cut on the right here:"
            " leave it out"
        )
    settings = {f"objective.{name}": getattr(args, name) for name in SETTINGS}
    return override(plan, {"objective": LOSS_TYPES[listed[0]], **settings})


def encoded_pairs(
    dataset: Any, name: str, tokenizer: Tokenizer, objective: ObjectiveFacts, length: int | None
) -> Encoded:
    """Return a data set of pairs as tokens, cut to a length.

    Raises:
        ValueError: a record judges nothing, or the plan's objective learns no pairs.
    """

    def records() -> Iterator[Record]:
        for number, row in enumerate(dataset, start=1):
            yield Record(without_nulls(dict(row)), f"{name} row {number}")

    return encode(records(), tokenizer, max_length=length, objective=objective, source=name)


def require_objective(plan: Plan) -> None:
    """Raise ValueError for an objective that a Trainer does not follow."""
    facts = plan.objective_facts
    if facts.baseline:
        raise ValueError(
            f"objective is {name_of(facts)}, whose baseline takes a walk of its own before each"
            " step, which BlockwalkTrainer does not take: blockwalk.train does"
        )


def with_reference(walker: Walker, rows: Encoded, batch_size: int, multiple: int) -> Encoded:
    """Return rows with the log-probability of each by the walker's model as it is now, where the
    objective compares with a reference."""
    if not walker.plan.objective_facts.reference:
        return rows
    sums_R = np.zeros(len(rows))
    for numbers, batch in by_length(rows, batch_size, multiple):
        sums_R[numbers] = -walker.label_losses(batch).numpy()
    numbers_of_rows: Mapping[str, Any] = {**rows.numbers, REFERENCE: sums_R}
    return dataclasses.replace(rows, numbers=numbers_of_rows)

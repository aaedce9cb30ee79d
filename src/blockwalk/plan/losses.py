"""The table of losses: a loss is a row here, and says what becomes of the logits."""

from __future__ import annotations

from dataclasses import dataclass

from blockwalk.plan.refusal import Refusals, nothing
from blockwalk.plan.table import Table


@dataclass(frozen=True, slots=True)
class LossFacts:
    """One loss, as planning knows it."""

    by_chunks: bool = False
    """True where it is computed over chunks of tokens and of the vocabulary, and never holds all
    logits: padding is cut, the head is read once for each chunk of tokens, and a sequence may hold
    several documents."""
    refuses: Refusals = nothing
    help: str = ""


LOSSES = Table(
    "loss",
    {
        "chunked": LossFacts(
            by_chunks=True,
            help="cross-entropy over parts of the vocabulary, which never holds all logits",
        ),
        "model": LossFacts(help="the model's own loss"),
    },
)
"""Losses by name."""
